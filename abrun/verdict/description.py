"""Arms described, where nothing is claimed or can be: levels, differences, what a claim would take.

Of one run an arm no test can tell what a treatment does from what a seed does. Of several, the interval of
the difference says what could be claimed; the margin that is suggested follows from the baseline alone.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from abrun.errors import ComparisonError
from abrun.metric_names import (
    FINAL_WEIGHTS,
    MEMORY_PEAK,
    REWARD,
    STEP_ONE,
    default_transform,
    is_clock,
    with_role,
)
from abrun.reasons import Code, Reason
from abrun.recipe.claims import DEFAULT_WINDOW, Claim
from abrun.recorded.experiment import RecordedExperiment, Sides, stack_runs
from abrun.stats.equivalence import Tost, equivalence_test, sd_in_steps
from abrun.stats.power import freedom_per_run, pairs_needed
from abrun.stats.series import Array, window_bounds
from abrun.verdict.claims import judge_equivalence
from abrun.verdict.margins import resolved_margin
from abrun.verdict.results import Detected, detect
from abrun.verdict.summaries import climbs, direction_in, moving, reduced, resolution

MOST_OTHERS = 12  # of these, what learning moves first, then step one's
COUNTERS = (
    r"(.*/)?(epoch|step|global_step|total_steps|max_steps|num_tokens|num_input_tokens_seen|total_flos"
    r"|training_iteration|iterations(_since_restore)?|total_timesteps|(time|env_)?steps_(total|since_restore)"
    r"|episodes_total|n_updates)"
)
SHARE_OF_CLIMB, SHARE_OF_LEVEL = 0.1, 0.05  # what a suggested margin is of the baseline
SMALLEST = 1e-300  # level or climb that a margin is offered as a share of


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One metric of the runs: levels over a window, and how far apart the arms are."""

    arm: str
    metric: str
    window: str
    steps: tuple[int, int]  # of the window
    num_runs: tuple[int, int]  # of both arms
    paired: bool  # by seed
    baseline: float  # mean over the runs, of the window's mean, or median of a spiky metric
    treatment: float
    difference: float
    # Of two runs, one of each arm: the distance of the curves, over every shared step; None: of several.
    mean_distance: float | None  # of |treatment - baseline|
    largest_distance: float | None
    largest_at: int | None  # step
    # Of several runs of each arm; None: of one.
    detected: Detected | None  # where that interval excludes zero
    interval: tuple[float, float] | None  # 90 %, of the difference: paired, or Welch's
    certified_bound: float | None  # the smallest margin that would be certified now
    margin: float | None  # suggested: from the baseline alone; None: it is 0 there, and stays so
    margin_is: Reason  # what it is of the baseline
    runs_needed: int | None  # pairs, or runs of each arm, for 80 % power at that margin; None: more than 1000


def descriptions(experiment: RecordedExperiment, arm: str, claims: Sequence[Claim]) -> list[Description]:
    """Of one run an arm: the claimed metrics, then others. Of several: where nothing is claimed, all of them.

    None where abrun launched the runs and there are several, or where an arm has none.
    """
    sides = experiment.sides(arm).finished
    launched = experiment.launched_compare_sha256 is not None
    if min(sides.sizes) == 0 or (max(sides.sizes) > 1 and (claims or launched)):
        return []
    windows = {claim.metric: claim.window for claim in claims}
    others = [one for one in _ranked(sides) if one not in windows]
    wanted = windows | dict.fromkeys(others[:MOST_OTHERS], DEFAULT_WINDOW)
    declared = experiment if claims or launched else None
    found = (_description(arm, sides, metric, window, declared) for metric, window in wanted.items())
    return [one for one in found if one]


def claimable(experiment: RecordedExperiment) -> Description | None:
    """What to claim: the first metric on which the runs of the first treatment could have shown a difference
    of a sensible margin, in its own units.
    """
    arm = experiment.treatments[0]
    sides = experiment.sides(arm).finished
    if min(sides.sizes) == 0:
        return None
    for metric in _ranked(sides)[:MOST_OTHERS]:
        if metric in (MEMORY_PEAK, FINAL_WEIGHTS):  # which mean something else in a claim
            continue
        found = _description(arm, sides, metric, DEFAULT_WINDOW, experiment)
        if found is None or found.margin is None or default_transform(metric) != "identity":
            continue
        claim = claim_on(found)
        margin = resolved_margin(claim, None)
        grid = experiment.metric_steps(metric)
        if judge_equivalence(arm, sides, claim, margin, grid, may_repeat=True).problem is None:
            return found
    return None


def claim_on(found: Description) -> Claim:
    return Claim(metric=found.metric, window=found.window, margin=found.margin)


def num_metrics(sides: Sides) -> tuple[int, int]:
    """How many metrics every run recorded, and how many any did."""
    recorded = [{*run.metrics} for run in sides.finished.runs]
    return len(set.intersection(*recorded)), len(set.union(*recorded))


def no_shared_metric(sides: Sides) -> Reason:
    """Return what runs recorded of which no metric can be described."""
    recorded = [
        sorted({name for run in runs for name in run.metrics}) for runs in (sides.baselines, sides.treatments)
    ]
    known = {*recorded[0], *recorded[1]}
    unread = [where for run in sides.runs for name, where in run.unread.items() if name in known]
    return Code.NO_SHARED_METRIC(
        baseline=recorded[0][:4], treatment=recorded[1][:4], unread=unread[0] if unread else None
    )


def _ranked(sides: Sides) -> list[str]:
    """The metrics of every run that describe the training, those that learning moves first."""
    recorded = set.intersection(*({*run.metrics} for run in sides.runs))
    telling = (one for one in recorded if not (is_clock(one) or re.fullmatch(COUNTERS, one)))
    return sorted(telling, key=lambda one: _rank(sides, one))


def _rank(sides: Sides, metric: str) -> tuple[int, int, str]:
    way = direction_in(sides.baselines[0], metric)
    learned = 0 if metric == REWARD else 1 if way == 1 else 2 if way == -1 else 3
    at_step_one = STEP_ONE.index(metric) if metric in STEP_ONE else len(STEP_ONE)
    again = " vs " in metric  # Megatron-LM's: the same numbers over the samples, `lm loss vs samples`
    return learned + 4 * again, at_step_one + 100 * (metric in with_role("given")), metric


def _description(
    arm: str, sides: Sides, metric: str, window: str, declared: RecordedExperiment | None
) -> Description | None:
    """Where nothing was declared, the window is one of the steps at which every run recorded the metric."""
    steps, values = stack_runs(sides.runs, metric)
    grid = declared.metric_steps(metric) if declared else steps
    known = np.isfinite(values).all(axis=0)
    steps, values = steps[known], values[:, known]
    try:
        first, last = window_bounds(window, grid, metric) if len(grid) else (0, -1)
    except ComparisonError:
        return None
    inside = (first <= steps) & (steps <= last)
    if not inside.any():
        return None
    runs = reduced(values[:, inside], metric)
    left, right = runs[: sides.sizes[0]], runs[sides.sizes[0] :]
    alone = sides.sizes == (1, 1)
    distance = np.abs(values[-1] - values[0])
    spread = moving(*np.split(values[:, inside], [sides.sizes[0]]), paired=sides.paired)
    step = resolution(sides.runs, _plain(metric), spread)
    test = (
        equivalence_test(left, right, 1.0, resolution=step, paired=sides.paired)
        if min(sides.sizes) > 1
        else None
    )
    margin, margin_is = _sensible_margin(sides, metric, float(left.mean()), last)
    return Description(
        arm=arm,
        metric=metric,
        window=window,
        steps=(first, last),
        num_runs=sides.sizes,
        paired=sides.paired,
        baseline=float(left.mean()),
        treatment=float(right.mean()),
        difference=float(right.mean() - left.mean()),
        mean_distance=float(distance.mean()) if alone else None,
        largest_distance=float(distance.max()) if alone else None,
        largest_at=int(steps[distance.argmax()]) if alone else None,
        detected=detect(left, right, test.mean_difference, test.interval, paired=sides.paired)
        if test
        else None,
        interval=test.interval if test else None,
        certified_bound=test.certified_bound if test else None,
        margin=margin,
        margin_is=margin_is,
        runs_needed=_needed(test, margin, (left, right), step, paired=sides.paired)
        if test and margin
        else None,
    )


def description_reasons(described: Sequence[Description], baseline: str) -> list[Reason]:
    """The finding first: of the foremost metric how far the arms are apart, then which others are."""
    first, *others = described
    finding = Code.DESCRIBED(
        arm=first.arm,
        baseline=baseline,
        metric=first.metric,
        levels=[first.baseline, first.treatment],
        steps=first.steps,
        runs=first.num_runs,
        paired=first.paired,
        difference=first.difference,
        interval=first.interval,
        detected=asdict(first.detected) if first.detected else None,
    )
    tested = [other for other in others if other.interval is not None]
    apart = {other.metric: other.difference for other in tested if other.detected}
    alike = [other.metric for other in tested if not other.detected]
    return [finding, *([Code.OTHER_METRICS(apart=apart, alike=alike)] if apart or alike else [])]


def _plain(metric: str) -> Claim:
    """A claim on the metric as it is recorded: no logarithm is taken of what is described."""
    # Unchecked: a log may call a metric `memory`, which a claim reads as the peak of all phases.
    return Claim.model_construct(metric=metric, margin=1.0, transform="identity")


def _sensible_margin(sides: Sides, metric: str, level: float, last: int) -> tuple[float | None, Reason]:
    """A tenth of what the baseline learned, else a twentieth of its level, to one digit upwards."""
    climb = float(np.mean(climbs(sides.baselines, _plain(metric), last)))
    if math.isfinite(climb) and climb > SMALLEST:
        return _offered(SHARE_OF_CLIMB, "climb", climb)
    if math.isfinite(level) and abs(level) > SMALLEST:
        return _offered(SHARE_OF_LEVEL, "level", abs(level))
    return None, Code.MARGIN_OFFERED(of="zero", size=0.0, rounded_up_to=None)


def _offered(share: float, of: str, size: float) -> tuple[float, Reason]:
    """A margin of one digit, and what it is: rounded up, unless the share has one digit itself."""
    margin = _one_digit(share * size)
    is_exact = f"{share * size:.3g}" == f"{margin:.3g}"
    return margin, Code.MARGIN_OFFERED(of=of, size=size, rounded_up_to=None if is_exact else margin)


def _one_digit(value: float) -> float:
    digit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(round(value / digit, 6)) * digit:.1g}")


def _needed(test: Tost, margin: float, arms: tuple[Array, Array], step: float, *, paired: bool) -> int | None:
    if paired:
        return pairs_needed(margin, test.standard_error * math.sqrt(len(arms[0])))
    sds = [sd_in_steps(of, step) for of in arms]
    return pairs_needed(margin, math.hypot(*sds), freedom=freedom_per_run(sds))
