"""How many experiments a test simulates: a fifth by default, all of them in the slow suite."""

import pytest


def replicated(whole: int) -> pytest.MarkDecorator:
    """Give a test `num`, the number of its simulated experiments."""
    return pytest.mark.parametrize("num", [whole // 5, pytest.param(whole, marks=pytest.mark.slow)])
