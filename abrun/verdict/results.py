"""The result of a declared claim: what was claimed, what the runs show of it, what more would show."""

from dataclasses import dataclass, replace
from typing import Literal

from abrun.metric_names import Transform
from abrun.reasons import Reason
from abrun.recipe.claims import Unit
from abrun.recorded.experiment import Sides
from abrun.stats.equivalence import ALPHA
from abrun.stats.series import Array

Reduction = Literal["mean", "median", "maximum", "minimum"]
Test = Literal[
    "paired TOST",
    "sigma test",
    "Welch TOST",
    "Welch sigma test",
    "limit",
    "ratio limit",
    "exact",
]
Result = Literal["equivalent", "holds", "different", "undecided", "not tested"]


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


@dataclass(frozen=True, slots=True)
class ErrorRates:
    """How often a claim's test may err."""

    alpha: float = ALPHA  # of each one-sided test of a match
    alpha_difference: float = ALPHA  # of a mismatch, over all claims


ONE_TEST = ErrorRates()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerms:
    """What is claimed, and the runs and steps that it is tested on."""

    metric: str
    window: str
    steps: tuple[int, int] | None  # first and last step of the window
    num_steps: int  # steps in it at which the metric was recorded by every pair
    transform: Transform
    reduction: Reduction
    test: Test
    margin: float | None  # in units of the transformed metric; None: relative, and not yet measured
    margin_unit: Unit  # it was declared in: the metric's own (""), or the baseline's sigma, level, climb
    margin_number: float  # in that unit; a share of the level or climb
    margin_text: str
    alpha: float  # of each one-sided test: 0.05, or this interim analysis's level
    alpha_difference: float  # of a difference beyond the margin, over all claims: what the guards leave of it
    num_pairs: int = 0
    seeds: tuple[int, ...] = ()  # of the pairs
    num_runs: tuple[int, int] | None = None  # of both arms, where they are not paired

    @property
    def paired(self) -> bool:
        return self.num_runs is None

    def over(self, sides: Sides) -> "ClaimTerms":
        """Return the claim with the pairs, or runs, that it is tested on."""
        if not sides.paired:
            return replace(self, num_pairs=0, seeds=(), num_runs=sides.sizes)
        seeds = tuple(run.name.seed for run in sides.baselines)
        return replace(self, num_pairs=len(seeds), seeds=seeds, num_runs=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the runs show. Summaries and differences are in units of the transformed metric."""

    differences: tuple[float, ...] = ()  # treatment - baseline, by seed
    baseline_mean: float | None = None
    baseline_sd: float | None = None
    treatment_sd: float | None = None
    treatment_mean: float | None = None
    mean_difference: float | None = None
    sd_difference: float | None = None  # of a pair; unpaired: of one run of each arm
    sd_at_margin: float | None = None  # of treatment - (baseline ± margin), where the margin is measured, too
    standard_error: float | None = None  # of the mean difference
    freedom: float | None = None  # of its t distribution
    ci90: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None  # level 1 - 2 alpha: what the margin is compared with
    certified_bound: float | None = None  # the smallest absolute margin that would have passed
    certified_number: float | None = None  # the same in `margin_unit`
    certified_jointly: float | None = None  # an absolute bound that holds together with all other claims'
    detected: Detected | None = None  # where the interval of the difference excludes zero
    limited: float | None = None  # of a limit: the treatment's mean over seeds, or its ratio to the baseline
    limited_interval: tuple[float, float] | None = None  # level 1 - 2 alpha
    detail: Reason | None = None  # of an exact claim: where it first fails
    climb: float | None = None  # of the baseline up to the window's end, mean over seeds; None: no direction
    p_equivalence: float | None = None
    p_tost: float | None = None
    p_difference: float | None = None  # from zero
    p_difference_holm: float | None = None
    p_beyond: float | None = None  # from no more than the margin
    p_beyond_holm: float | None = None
    pair_correlation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What as many pairs, and what more of them, can show. Unpaired: runs of each arm."""

    power_now: float | None = None  # if the arms are truly equal and sd_difference is the true one
    pairs_needed: int | None = None  # for 80 % power; None: more than 1000
    pairs_needed_range: tuple[int | None, int | None] | None = None  # over the 90 % interval of the sd
    pairs_needed_observed: int | None = None  # the same if the true difference is the observed one
    pairs_if_shared: int | None = None  # unpaired: the same in pairs of arms correlated over seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """T3 for one declared claim. `verdict.json` has its parts side by side in one row."""

    arm: str
    claim: ClaimTerms
    estimate: Estimate = Estimate()
    power: Power = Power()
    problem: Reason | None = None  # why these runs cannot show equivalence, whatever the numbers are
    warnings: tuple[Reason, ...] = ()  # what to know beside the outcome
    result: Result = "not tested"
