"""The direction of a difference whose interval excludes zero, whatever a verdict says of its margin."""

from dataclasses import dataclass
from typing import Literal

from abrun.stats.series import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """A difference of treatment and baseline, on the scale of its claim (of a ratio: its logarithm)."""

    direction: Literal["lower", "higher"]  # of the treatment
    difference: float  # mean
    interval: tuple[float, float]  # level 1 - 2 alpha
    num_agreeing: (
        int  # pairs that differ in this direction; unpaired: treated runs beyond the baseline's mean
    )
    num_compared: int  # pairs, or treated runs
    paired: bool


def detect(
    baseline: Array, treatment: Array, difference: float, interval: tuple[float, float], *, paired: bool
) -> Detected | None:
    """Return the difference that an interval detects; None where it includes zero."""
    if not (interval[0] > 0 or interval[1] < 0):
        return None
    sign = 1 if interval[0] > 0 else -1
    apart = treatment - (baseline if paired else baseline.mean())
    return Detected(
        direction="higher" if sign > 0 else "lower",
        difference=difference,
        interval=interval,
        num_agreeing=int((sign * apart > 0).sum()),
        num_compared=len(treatment),
        paired=paired,
    )
