"""Result of a declared claim: its terms, the estimate from the runs, and the power of more runs."""

from dataclasses import dataclass, replace
from typing import Literal

from abrun.logs.log import Axis
from abrun.logs.recorded.experiment import Sides
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import ClaimKind, Unit
from abrun.runs.metric_names import Better, Transform
from abrun.stats.equivalence import ALPHA
from abrun.stats.series import Array

SampleUnit = Literal["seed", "prompt"]  # what a pair shares
WindowReduction = Literal["mean", "median", "maximum", "minimum"]
TestMethod = Literal[
    "paired TOST",
    "sigma test",
    "Welch TOST",
    "Welch sigma test",
    "paired t-test",
    "Welch t-test",
    "sigma bound",
    "Welch sigma bound",
    "limit",
    "ratio limit",
    "exact",
    "exact rate",
    "spread",
]
SCORES: dict[Axis, str] = {"final": "final scores", "prompts": "all prompts"}
ClaimOutcome = Literal["equivalent", "holds", "different", "undecided", "not tested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedDifference:
    """A detected difference treatment - baseline, on the scale of its claim (for a ratio, its logarithm)."""

    direction: Literal["lower", "higher"]  # treatment relative to baseline
    difference: float  # mean difference
    interval: tuple[float, float]  # level 1 - 2 alpha
    # Pairs that differ in this direction; unpaired: treated runs beyond the baseline's mean.
    num_agreeing: int
    num_compared: int  # number of pairs, or of treated runs
    num_opposing: int = 0  # of them, those that differ in the other direction
    paired: bool
    unit: SampleUnit = "seed"


def detect(
    baseline: Array,
    treatment: Array,
    difference: float,
    interval: tuple[float, float],
    *,
    paired: bool,
    unit: SampleUnit = "seed",
) -> DetectedDifference | None:
    """Return the difference if its confidence interval excludes zero, else None."""
    if not (interval[0] > 0 or interval[1] < 0):
        return None
    sign = 1 if interval[0] > 0 else -1
    differences = treatment - (baseline if paired else baseline.mean())
    return DetectedDifference(
        direction="higher" if sign > 0 else "lower",
        difference=difference,
        interval=interval,
        num_agreeing=int((sign * differences > 0).sum()),
        num_compared=len(treatment),
        num_opposing=int((sign * differences < 0).sum()),
        paired=paired,
        unit=unit,
    )


@dataclass(frozen=True, slots=True)
class ErrorRates:
    """Error rates of a claim's tests."""

    alpha: float = ALPHA  # one-sided alpha of each test of a match
    alpha_difference: float = ALPHA  # familywise alpha of a mismatch, over all claims


ONE_TEST = ErrorRates()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerms:
    """A claim as it is tested: its metric, window, test and margin, with the runs and steps."""

    metric: str
    window: str
    steps: tuple[int, int] | None  # first and last step of the window
    num_steps: int  # steps in the window that every pair recorded
    transform: Transform
    reduction: WindowReduction
    test: TestMethod
    margin: float | None  # in units of the transformed metric; None: relative, not yet measured
    margin_unit: Unit  # as declared: the metric's own (""), or the baseline's sigma, level, climb
    margin_number: float  # in that unit; a share of the level or climb
    margin_text: str
    alpha: float  # one-sided alpha: 0.05, or the level of this interim analysis
    # Familywise alpha of a difference beyond the margin, after the guards' share.
    alpha_difference: float
    num_pairs: int = 0
    seeds: tuple[int, ...] = ()  # seeds of the pairs
    num_runs: tuple[int, int] | None = None  # runs of each arm; None if paired
    axis: Axis = "steps"  # final or prompts: the runs have scores, no curves
    unit: SampleUnit = "seed"  # prompt: one run of each arm, whose prompts are the pairs
    kind: ClaimKind = "within"
    better: Better | None = None  # direction of an improvement; None: neither, or unknown
    improvement: float | None = None  # true improvement assumed for the power of `better`

    @property
    def paired(self) -> bool:
        return self.num_runs is None

    @property
    def worse(self) -> Better | None:
        """Return the direction of a deterioration; None if neither is known."""
        if self.better is None:
            return None
        return "lower" if self.better == "higher" else "higher"

    @property
    def accepted(self) -> tuple[float | None, float | None] | None:
        """Return the differences that the claim accepts, None for an open end; None without a margin."""
        if self.margin is None:
            return None
        if self.kind == "within":
            return -self.margin, self.margin
        threshold = -self.margin if self.kind == "not_worse" else self.margin
        return (None, -threshold) if self.better == "lower" else (threshold, None)

    def over(self, sides: Sides) -> "ClaimTerms":
        """Return the claim with the pairs, or runs, that it is tested on."""
        if not sides.paired:
            return replace(self, num_pairs=0, seeds=(), num_runs=sides.sizes)
        seeds = tuple(run.name.seed for run in sides.baselines)
        return replace(self, num_pairs=len(seeds), seeds=seeds, num_runs=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedNoise:
    """Noise of earlier experiments, declared before the runs, and of reruns, which moderates a test."""

    sd: float  # of one pair
    dof: float  # its weight in degrees of freedom
    experiments: int
    reruns: int = 0  # A/A reruns of this experiment
    pairs_like: float  # so many pairs alone would have as many degrees of freedom for their error
    interval_alone: tuple[float, float]  # without it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimEstimate:
    """Estimates from the runs. Summaries and differences are in units of the transformed metric."""

    differences: tuple[float, ...] = ()  # treatment - baseline, one per seed
    baseline_mean: float | None = None
    baseline_sd: float | None = None
    treatment_sd: float | None = None
    treatment_mean: float | None = None
    mean_difference: float | None = None
    sd_difference: float | None = None  # of one pair; unpaired: of the difference of one run of each arm
    # Sd of treatment - (baseline ± margin), if the margin is estimated too.
    sd_at_margin: float | None = None
    standard_error: float | None = None  # of the mean difference
    freedom: float | None = None  # degrees of freedom of the difference's t distribution
    ci90: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None  # level 1 - 2 alpha, compared with the margin
    # Each end holds with 95 % confidence at all numbers of pairs at once (abrun.stats.anytime)
    anytime_interval: tuple[float, float] | None = None
    # The smallest absolute margin that would have passed; `better`: the largest, negative if none would.
    certified_bound: float | None = None
    certified_number: float | None = None  # the same in `margin_unit`
    certified_jointly: float | None = None  # absolute bound that holds jointly with all other claims'
    detected: DetectedDifference | None = None  # None if the interval includes zero
    # Limits: the treatment's mean over seeds, or its ratio to the baseline.
    limited: float | None = None
    limited_interval: tuple[float, float] | None = None  # level 1 - 2 alpha
    # Rates of divergence: how many runs diverged, of how many; of the baseline, of the treatment
    diverged: tuple[tuple[int, int], tuple[int, int]] | None = None
    detail: Reason | None = None  # exact claims: the first difference
    # The baseline's mean climb up to the window's end; None without a direction.
    climb: float | None = None
    p_equivalence: float | None = None  # of the claim, whatever its kind
    p_equivalence_holm: float | None = None  # if one of several claims suffices (compare.require: any)
    p_tost: float | None = None
    p_difference: float | None = None  # two-sided test of no difference
    p_difference_holm: float | None = None
    p_beyond: float | None = None  # minimum-effect test beyond the margin; that a one-sided claim is broken
    p_beyond_holm: float | None = None
    pair_correlation: float | None = None
    noise: BorrowedNoise | None = None  # absent from verdict.json if None


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of this sample size, and the sample size that is needed. Unpaired: runs of each arm."""

    power_now: float | None = None  # if the arms are equal and sd_difference is the true sd
    pairs_needed: int | None = None  # sample size for 80 % power; None above 1000
    pairs_needed_range: tuple[int | None, int | None] | None = None  # over the 90 % interval of the sd
    pairs_needed_observed: int | None = None  # pairs_needed if the true difference is the observed one
    pairs_if_shared: int | None = None  # unpaired: pairs needed if pairing correlates the arms


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """Result of one declared claim. `verdict.json` has its three records flattened into one row."""

    arm: str
    claim: ClaimTerms
    estimate: ClaimEstimate = ClaimEstimate()
    power: Power = Power()
    problem: Reason | None = None  # reason why these runs cannot show equivalence
    warnings: tuple[Reason, ...] = ()
    result: ClaimOutcome = "not tested"

    def also_at(self, largest: "ClaimResult") -> "ClaimResult":
        """Return a result on means that holds only if `largest`, where each pair differs most, holds, too."""
        names = ("p_equivalence", "p_tost", "certified_bound", "certified_number")
        both = {name: (getattr(self.estimate, name), getattr(largest.estimate, name)) for name in names}
        bounds = {name: max(values) for name, values in both.items() if None not in values}
        estimate = replace(self.estimate, anytime_interval=None, **bounds)  # it holds for means only
        result = replace(self, estimate=estimate, power=largest.power)
        if largest.result != "undecided" or self.result == "undecided":
            return result
        bound = Code.LARGEST_STEP(bound=largest.estimate.certified_bound)
        return replace(result, result="undecided", warnings=(*result.warnings, bound))

    def over_scores(self, axis: Axis, unit: SampleUnit) -> "ClaimResult":
        """Return the result of a claim on scores: they have no window of steps."""
        if axis == "steps":
            return self
        seeds = self.claim.seeds if unit == "seed" else ()
        terms = replace(self.claim, window=SCORES[axis], steps=None, axis=axis, unit=unit, seeds=seeds)
        detected = self.estimate.detected and replace(self.estimate.detected, unit=unit)
        return replace(self, claim=terms, estimate=replace(self.estimate, detected=detected))
