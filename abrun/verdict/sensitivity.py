"""Assay sensitivity (ICH E10, 1.5): whether these runs could have shown a difference, had there been one.

A match of runs that learn nothing, repeat each other or stop early says nothing about the treatment. Each
function returns why not; None: nothing is amiss.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from abrun.metric_names import (
    ADVANTAGES_MAX,
    ADVANTAGES_MIN,
    GRAD_NORM,
    LEARNING_RATE,
    SIGNAL_SHARE,
    default_transform,
    find_metric,
    is_clock,
    unit_of,
)
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import RecordedRun, Sides, stack
from abrun.stats.equivalence import t_interval
from abrun.stats.series import NO_SERIES, Array, Series
from abrun.verdict.summaries import climbs, direction_in, last_digit
from abrun.verdict.whole_curve import COPIED, copied, has_detail

# What is 0 at every step where nothing can be learned.
DRIVERS = (GRAD_NORM, LEARNING_RATE, SIGNAL_SHARE)


def no_signal(sides: Sides, metric: str, *, may_repeat: bool = False) -> Reason | None:
    """Why these runs would have agreed on a metric whatever the treatment does.

    `may_repeat`: bit-identical arms are what was declared, not a treatment that was not applied.
    """
    found = find_metric(metric)
    if found and "given" in found.roles:
        return Code.FOLLOWS_FROM_CONFIG()
    baselines, treatments = sides.baselines, sides.treatments
    for runs, arm in ((baselines, "baseline"), (treatments, "treatment")):
        for driver in DRIVERS:
            values = _recorded(runs, driver)
            if len(values) and not np.nan_to_num(values, posinf=0.0, neginf=0.0).any():
                finite = bool(np.isfinite(values).all())
                return Code.NOTHING_LEARNED(metric=driver, arm=arm, finite=finite)
        ends = [_recorded(runs, end) for end in (ADVANTAGES_MIN, ADVANTAGES_MAX)]
        if all(len(one) and not one.any() for one in ends):
            return Code.ADVANTAGES_ZERO(arm=arm)
    values = _recorded(sides.runs, metric)
    values = values[np.isfinite(values)]
    if len(values) and np.ptp(values) == 0 and unit_of(metric) != "bytes":  # memory need not move
        return Code.NEVER_MOVED(value=values[0])
    return cut_short(sides.runs) or (None if may_repeat else _untouched(sides))


def not_learned(baselines: Sequence[RecordedRun], claim: Claim, last: int, margin: float) -> Reason | None:
    """Why the baseline learned too little for a claim to mean anything.

    A metric that learning moves in one direction must have climbed by more than the margin by the window's
    end: the lower 95 % bound over seeds. Of any other (a norm, an entropy, trainer against engine) no
    such thing is known: there some metric that has a direction must have climbed at all, where one is
    recorded. Time and memory do not depend on what is learned.
    """
    if not claim.climbs or is_clock(claim.metric) or unit_of(claim.metric) == "bytes":
        return None
    if direction_in(baselines[0], claim.metric):
        low, still = (
            climb_bound(climbs(baselines, claim, last)),
            dead_seeds(baselines, claim, last, margin),
        )
        if low > margin and 2 * still < len(baselines):
            return None
        if low > margin:
            return Code.DEAD_SEEDS(num=still, of=len(baselines), margin=margin, step=last)
        mean = float(np.mean(climbs(baselines, claim, last)))
        return Code.CLIMB_NOT_SHOWN(margin=margin, step=last, climb=mean, bound=low)
    learners = learning_metrics(baselines)
    # Any of them will do: each at its share of the 5 %, or flat ones would pass by their number (Bonferroni).
    bounds = {one: climb_bound(_climbs(baselines, one, last), len(learners)) for one in learners}
    if not bounds or max(bounds.values()) > 0:
        return None
    return Code.NOTHING_CLIMBED(step=last, metrics=[*bounds], bound=max(bounds.values()))


def dead_seeds(baselines: Sequence[RecordedRun], claim: Claim, last: int, margin: float) -> int:
    """How many climbed by no more than the margin; 0 of a metric without a direction, or that need not."""
    return int((climbs(baselines, claim, last) <= margin).sum()) if claim.climbs else 0


def learning_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """The metrics that learning moves in one direction, and that every run recorded more than once."""
    return [
        metric
        for metric in (runs[0].metrics if runs else ())
        if direction_in(runs[0], metric) and all(len(run.series(metric)) > 1 for run in runs)
    ]


def climb_bound(values: Array, num_metrics: int = 1) -> float:
    """The lower 95 % bound of the mean climb over seeds, jointly over metrics; -inf where it is not known."""
    known = len(values) > 1 and np.isfinite(values).all()
    return t_interval(values, 1 - 0.1 / num_metrics)[0] if known else -np.inf


def _climbs(runs: Sequence[RecordedRun], metric: str, last: int) -> Array:
    return climbs(runs, Claim(metric=metric, margin=1.0, transform=default_transform(metric)), last)


def cut_short(runs: Sequence[RecordedRun]) -> Reason | None:
    """A run whose last recorded step is further from its last configured one than its steps are apart."""
    for run in runs:
        configured, steps = (run.config or {}).get("steps"), run.steps
        if isinstance(configured, int) and len(steps) > 1:
            apart = int(np.diff(steps).max())
            if steps[-1] + apart <= configured and steps[-1] + 1 < configured:
                return Code.CUT_SHORT(run=str(run), step=steps[-1], configured=configured)
    return None


def _untouched(sides: Sides) -> Reason | None:
    """Arms that hold the same numbers in every pair: the treatment may not have been applied at all."""
    if not sides.paired:
        return None
    pairs = list(zip(sides.baselines, sides.treatments, strict=True))
    of_reference = any(run.thinned for run in sides.baselines)  # a later version may well repeat it
    if pairs and not of_reference and all(_same_numbers(*pair) for pair in pairs):
        return Code.ARMS_IDENTICAL()
    return None


def _recorded(runs: Sequence[RecordedRun], metric: str) -> Array:
    return np.concatenate([run.series(metric).values for run in runs] or [NO_SERIES.values])


def _of_two_seeds(sides: Sides) -> Iterator[tuple[RecordedRun, RecordedRun]]:
    """Every two runs that are to be two observations: all but those of one pair, which may well agree."""
    for one, other in combinations(sides.runs, 2):
        if not sides.paired or one.name.seed != other.name.seed:
            yield one, other


def one_run_as_two_seeds(sides: Sides, metric: str | None = None) -> Reason | None:
    """Two seeds with the same numbers, but for what a machine adds, are not two observations; nor are two of
    which a claim reads one curve, whatever else was logged beside it. Nothing can be tested over them.

    Noise or rounding makes no second run of a copy: see `copied`.
    """
    precision = cache(_precision)  # of each curve once, not of each pair
    for one, other in _of_two_seeds(sides):
        if _same_numbers(one, other):
            return _repeated(other, one)
        if metric and _same_curve(one.series(metric), other.series(metric), precision):
            return _repeated(other, one, [metric])
    return _noisy_copy(sides, metric) if metric else None


def _repeated(
    run: RecordedRun, other: RecordedRun, metrics: Sequence[str] = (), correlation: float | None = None
) -> Reason:
    return Code.ONE_RUN_AS_TWO_SEEDS(run=str(run), other=str(other), metrics=metrics, correlation=correlation)


def _noisy_copy(sides: Sides, metric: str) -> Reason | None:
    """Name two seeds whose claimed metric moves alike at every step; for a discrete one, all their others."""
    runs = sides.runs
    values = stack(runs, metric)[1]
    detailed = bool(len(runs)) and bool(has_detail(values).all())
    metrics, alike = ([metric], copied(values)) if detailed else _copied_elsewhere(runs, metric)
    for left, right in zip(*np.nonzero(np.triu(alike, 1)), strict=True):
        one, other = runs[left], runs[right]
        if one.name.seed != other.name.seed:
            return _repeated(other, one, metrics[:3], COPIED)
    return None


def _copied_elsewhere(runs: Sequence[RecordedRun], metric: str) -> tuple[list[str], NDArray[np.bool_]]:
    """Return which two runs [R, R] move alike in every other metric that can tell, and those metrics.

    Values that are the same to the last bit (a learning rate) follow from the configuration.
    """
    metrics, alike = [], np.ones((len(runs), len(runs)), bool)
    for other in runs[0].metrics if runs else ():
        known = find_metric(other)
        given = known is not None and "given" in known.roles
        if other == metric or given or is_clock(other) or unit_of(other) == "bytes":
            continue
        values = stack(runs, other)[1]
        equal = np.array_equal(values, np.broadcast_to(values[:1], values.shape))
        if has_detail(values).all() and not equal:
            metrics.append(other)
            alike &= copied(values)
    return metrics, alike if metrics else np.zeros_like(alike)


def _precision(series: Series) -> tuple[int, float]:
    """Return how many distinct values a curve has, and its last digit."""
    return len(np.unique(series.values)), last_digit(series.values)


def _same_curve(one: Series, other: Series, precision: Callable[[Series], tuple[int, float]]) -> bool:
    """Ten steps and more that agree to the last digit of the coarser log, of a curve that moves."""
    if len(one) < 10 or not np.array_equal(one.steps, other.steps) or not np.isfinite(one.values).all():
        return False
    distance, size = np.abs(one.values - other.values).max(), np.ptp(one.values)
    if not distance <= size / 18 or min(precision(series)[0] for series in (one, other)) < 10:
        return False  # a digit that ten values differ in is no more than a ninth of their range
    if distance <= 1e-6 * size:
        return True
    digit, error = max(precision(series)[1] for series in (one, other)), one.values - other.values
    if distance > 0.501 * digit:
        return False
    jumps = np.var(np.diff(error)) > np.var(error)  # as rounding errors do, and two smooth curves do not
    return bool(jumps)


def _same_numbers(run: RecordedRun, other: RecordedRun) -> bool:
    learned = [one for one in {*run.metrics, *other.metrics} if not is_clock(one) and unit_of(one) != "bytes"]
    return bool(learned) and all(
        np.array_equal(run.series(one).steps, other.series(one).steps)
        and np.array_equal(run.series(one).values, other.series(one).values, equal_nan=True)
        for one in learned
    )
