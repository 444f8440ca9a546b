"""Experiments with a known truth, as in the tests of the verdict."""

import pytest

from tests.verdict.conftest import judged, simulated

__all__ = ["judged", "simulated"]


@pytest.fixture(autouse=True)
def _installed(trainer_installed: None) -> None:
    """Next commands are suggested to somebody who can train."""
