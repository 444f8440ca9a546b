"""Durations between times of the wall clock, which may be set meanwhile."""

MAX_START_S = 366 * 86_400.0  # longer, or negative: a clock was set meanwhile


def is_plausible(seconds: float) -> bool:
    """Return whether a difference of two times is one that a start can last."""
    return 0 <= seconds <= MAX_START_S
