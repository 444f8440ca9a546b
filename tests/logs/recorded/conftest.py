"""Experiments with a known truth, as in the tests of the verdict."""

from tests.verdict.conftest import judged, simulated

__all__ = ["judged", "simulated"]
