"""T1: the first step, before any treated update can have had an effect, must be the same."""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from scipy import special

from abrun.metric_names import (
    ADVANTAGES_MAX,
    ADVANTAGES_MIN,
    GEN_KL_ERROR,
    LOSS,
    MEAN_PROMPT_LENGTH,
    REWARD,
    STEP_ONE,
    TOKEN_MULT_PROB_ERROR,
)
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Compare
from abrun.recorded.experiment import Pair, RecordedRun, no_shared_step_reason
from abrun.runs.records import start_step
from abrun.stats.equivalence import ALPHA, equivalence_test
from abrun.stats.series import Array

# How far rounding alone may move a step-one metric, relative to its scale. float32 sums over a batch in
# another order differ by 1e-6 to 1e-5; bfloat16 keeps 8 bits (2^-8 = 4e-3) and rounds at every layer.
ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}
GROSS = 0.5  # of its scale: no rounding, in any precision
# Rounding raises these, whichever way it goes: they measure how far trainer and engine are apart, and are low
# where both happen to round alike. A fault raises them, too.
RAISED_BY_ROUNDING = (GEN_KL_ERROR, TOKEN_MULT_PROB_ERROR)
SHARED_REWARDS = 3  # distinct first rewards, each equal within its pair, that show shared prompts
_NUM_NODES = 2000  # dense towards 0, where the ratio's tail comes from
# Entropy of a peaked policy is near 0 while its rounding error is that of log-probs, of order 1.
ENTROPY_SCALE = 0.1


StepOneResult = Literal["pass", "fail", "open", "not tested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOne:
    """T1 for one metric: the pair that deviates most, before any treated update can have had an effect.

    `deviation` is |treatment - baseline| / scale (of train/gen_kl_error both as sqrt(2 KL)), and `scale_from`
    says what the scale is.
    """

    arm: str
    metric: str
    step: int
    seed: int
    num_pairs: int
    baseline: float
    treatment: float
    deviation: float
    scale: float
    scale_from: str
    tolerance: float
    tolerance_from: str
    aa_deviation: float | None  # the largest among same-seed baseline reruns
    # "not tested": beyond what rounding does as a rule, and nothing says what it does here. "open": in the
    # median pair, by rounding or by a fault, which is no ground for a match.
    result: StepOneResult


def step_one(
    arm: str, pairs: Sequence[Pair], compare: Compare, alpha: float = ALPHA, num_pairs: int | None = None
) -> list[StepOne]:
    """T1 for every metric of the list that the first step of some pair has in both arms, at `alpha` in all.

    A failure is one of any pair, also after an interim analysis of the first `num_pairs`; what is open is so
    by those.
    A deviation is relative to the metric's own size, or to that of its rounding errors: see `_scale`. Nothing
    where the first recorded step is a later one than the runs' first, or may be: updates have been made.
    """
    analysed_seeds = {pair.seed for pair in pairs[:num_pairs]}
    pairs = [
        pair
        for pair in pairs
        if first_step(pair.baseline) <= 1 + start_step(pair.baseline.environment)
        and not pair.has_restarted_counter
    ]
    share = alpha / len(STEP_ONE)
    found = (_step_one(arm, pairs, metric, compare, share, analysed_seeds) for metric in STEP_ONE)
    return [one for one in found if one]


def _step_one(
    arm: str, pairs: Sequence[Pair], metric: str, compare: Compare, alpha: float, analysed_seeds: Set[int]
) -> StepOne | None:
    deviations = []
    for pair in pairs:
        values = _first_values(pair.baseline, pair.treatment, metric)
        if values and math.isfinite(values[0]):
            deviations.append((_deviation(pair.baseline, metric, *values), pair, values))
    if not deviations:
        return None
    deviation, pair, (baseline, treatment) = max(deviations, key=lambda one: one[0])
    scale, scale_from = _scale(pair.baseline, metric, baseline, treatment)
    again = [
        _deviation(pair.baseline, metric, *values)
        for pair in pairs
        for rerun in pair.reruns
        if (values := _first_values(pair.baseline, rerun, metric)) and math.isfinite(values[0])
    ]
    aa_deviation = max((one for one in again if math.isfinite(one)), default=None)
    tolerance, source, known = _tolerance(metric, pair, compare, len(deviations), again, alpha)
    result: StepOneResult = "pass"
    if tolerance >= 1 and math.isfinite(deviation):  # nothing below would tell anything
        result = "not tested"
    elif deviation > tolerance:
        moved = [_moved(metric, *values) for _, _, values in deviations]
        if known or deviation > GROSS:
            result = "fail"
        elif metric in RAISED_BY_ROUNDING:
            early = [
                far for far, (_, one, _) in zip(moved, deviations, strict=True) if one.seed in analysed_seeds
            ]
            result = "open" if early and np.median(early) > tolerance else "not tested"
        else:
            result = "fail" if _shifted(moved, tolerance, alpha) else "not tested"
    return StepOne(
        arm=arm,
        metric=metric,
        step=first_step(pair.baseline),
        seed=pair.seed,
        num_pairs=len(deviations),
        baseline=baseline,
        treatment=treatment,
        deviation=deviation,
        scale=scale,
        scale_from=scale_from,
        tolerance=tolerance,
        tolerance_from=source,
        aa_deviation=aa_deviation,
        result=result,
    )


def shares_prompts(pairs: Sequence[Pair]) -> bool:
    """Whether the runs show that both arms of every pair that has begun did so with the same prompts.

    By their hashes; or by a metric of the first step that varies from pair to pair, and not within any. A
    reward, often 0 in all runs but one or two, must be the same number in both runs of every pair, and have
    three values or more.
    """
    pairs = [
        pair for pair in pairs if any(_first_values(pair.baseline, pair.treatment, one) for one in STEP_ONE)
    ]
    hashes = [
        [(run.environment or {}).get("prompts_sha256") for run in (pair.baseline, pair.treatment)]
        for pair in pairs
    ]
    if all(left and left == right for left, right in hashes):
        return True
    others = (one for one in (MEAN_PROMPT_LENGTH, *STEP_ONE) if one != REWARD)
    return any(_begins_alike(pairs, one) for one in others) or _same_first_rewards(pairs)


def _same_first_rewards(pairs: Sequence[Pair]) -> bool:
    """Check that every pair begins with one reward, and that the pairs have three rewards or more.

    Where prompts are not shared, 3 to 10 pairs are so in 0.5 % of experiments or less (test_whole_curve.py).
    """
    values = [_first_values(pair.baseline, pair.treatment, REWARD) for pair in pairs]
    equal = all(both is not None and math.isfinite(both[0]) and both[0] == both[1] for both in values)
    return equal and len({both[0] for both in values if both is not None}) >= SHARED_REWARDS


def _begins_alike(pairs: Sequence[Pair], metric: str) -> bool:
    """Whether a metric's first values differ within pairs by less than 1 % of their sd over pairs."""
    values = [_first_values(pair.baseline, pair.treatment, metric) for pair in pairs]
    known = np.array([both for both in values if both is not None]).reshape(-1, 2)
    if len(known) < max(len(pairs), 2) or not np.isfinite(known).all():
        return False
    spread = float(known[:, 0].std(ddof=1))
    return spread > 0 and float(np.abs(known[:, 1] - known[:, 0]).max()) <= 0.01 * spread


def first_step(run: RecordedRun) -> int:
    """The first step of a run's training; 0 where it has none. (Evaluations may come before.)"""
    return min((int(run.series(one).steps[0]) for one in STEP_ONE if len(run.series(one))), default=0)


def _first_values(baseline: RecordedRun, other: RecordedRun, metric: str) -> tuple[float, float] | None:
    first = first_step(baseline)
    left, right = baseline.series(metric).at(first), other.series(metric).at(first)
    return None if left is None or right is None else (left, right)


def _deviation(baseline: RecordedRun, metric: str, left: float, right: float) -> float:
    if left == right:
        return 0.0
    if not math.isfinite(right):
        return math.inf
    if metric == GEN_KL_ERROR:
        return abs(_moved(metric, left, right))
    return abs(right - left) / _scale(baseline, metric, left, right)[0]


def _scale(baseline: RecordedRun, metric: str, left: float, right: float) -> tuple[float, str]:
    """What a rounding error of this metric is proportional to, and what that is."""
    if metric == GEN_KL_ERROR:
        return 1.0, "a nat of log-prob error, sqrt(2 KL)"
    size = max(abs(left), abs(right)) if math.isfinite(right) else abs(left)
    least, least_from = 0.0, ""
    if metric.endswith("entropy"):
        least, least_from = ENTROPY_SCALE, "the least scale of an entropy"
    if metric == LOSS:
        # At ratio 1 a policy-gradient loss is the mean of advantages, which cancel: what was rounded are the
        # terms, as large as the largest advantage (about 1 where they are normalised).
        first = first_step(baseline)
        ends = [baseline.series(end).at(first) for end in (ADVANTAGES_MIN, ADVANTAGES_MAX)]
        known = [abs(end) for end in ends if end is not None and math.isfinite(end)]
        least = max(known, default=1.0)
        least_from = "the largest advantage" if known else "the least scale of a loss"
    return (size, "its size") if size >= least else (least, least_from)


def share_of_scale(deviation: float, scale: float, scale_from: str) -> str:
    """`0.047 of the largest advantage (2.47)`: with what it is divided by, for whoever divides again."""
    return f"{deviation:.2g} of {scale_from} ({scale:.3g})"


def _tolerance(
    metric: str, pair: Pair, compare: Compare, num_pairs: int, again: Sequence[float], alpha: float
) -> tuple[float, str, bool]:
    """The tolerance, where it is from, and whether a deviation beyond it is no rounding.

    bfloat16's rounding is a rule of thumb: an optimizer step within the first step, or a norm of cancelling
    terms, may enlarge it; that is known only where reruns, or the recipe, say how much. Of what rounding
    raises reruns do not: the baseline rounds as the baseline does.
    """
    declared = compare.step_one_tolerance
    if isinstance(declared, dict):
        declared = declared.get(metric)
    if declared is not None:
        return declared, "recipe", True
    dtypes = {(run.config or {}).get("policy.dtype") for run in (pair.baseline, pair.treatment)}
    if None in dtypes:  # a foreign framework's, which is most often the coarsest
        rounding, rounding_of = ROUNDING["bfloat16"], "rounding in a precision that the runs do not say"
    else:
        coarsest = max(map(str, dtypes), key=lambda dtype: ROUNDING.get(dtype, 0.0))
        rounding, rounding_of = ROUNDING.get(coarsest, ROUNDING["float32"]), f"rounding of {coarsest}"
    exact = rounding <= ROUNDING["float32"]
    raised = not exact and metric in RAISED_BY_ROUNDING
    repeated = [one for one in again if math.isfinite(one)]
    if repeated and max(repeated) > 0 and not raised:
        factor = factor_of_maxima(num_pairs, len(repeated), alpha)
        if factor * max(repeated) > rounding:
            what = f"{factor:.3g}x the largest A/A deviation of {len(repeated)}"
            return factor * max(repeated), what, True
    return rounding, rounding_of, exact


def factor_of_maxima(num_pairs: int, num_reruns: int, alpha: float) -> float:
    """The 1 - alpha quantile of max |x_1..n| / max |y_1..m| for independent normal x, y of one spread.

    P(ratio > c) is the integral of 1 - F(c y)^n over the law of the largest of m, F the half-normal, by
    quadrature and bisection: exact. With one rerun it is in the thousands, with three about twenty.
    """
    nodes, weights = _quadrature()
    share = (nodes + 1) / 2
    largest = math.sqrt(2) * special.erfinv(share ** (1 / num_reruns))  # y at these quantiles of the largest

    def beyond(factor: float) -> float:
        inside = special.erf(factor * largest / math.sqrt(2)) ** num_pairs
        return float(np.sum(weights * (1 - inside)) / 2)

    low, high = 0.0, 1.0
    while beyond(high) > alpha and high < 1e9:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > alpha else (low, middle)
    return high


@cache
def _quadrature() -> tuple[Array, Array]:
    """Gauss-Legendre's; a second's work, which only reruns ask for."""
    return np.polynomial.legendre.leggauss(_NUM_NODES)


def _moved(metric: str, baseline: float, treatment: float) -> float:
    """With its sign, how far the treatment is from its baseline: log(treatment / baseline).

    inf where one is 0, or the signs differ. Of a KL in nats of the log-prob error x that it stands for, as
    k3(x) is x^2 / 2 for small x. (Below 0 it is the rounding of a trainer that computes it in float32.)
    """
    if baseline == treatment:
        return 0.0
    if metric == GEN_KL_ERROR:
        return math.sqrt(2 * max(treatment, 0.0)) - math.sqrt(2 * max(baseline, 0.0))
    share = treatment / baseline if baseline else 0.0
    return math.log(share) if share > 0 and math.isfinite(share) else math.inf


def _shifted(signed: Sequence[float], tolerance: float, alpha: float) -> bool:
    """Whether the pairs deviate in one direction by more than the tolerance: rounding goes either way."""
    if len(signed) < 2 or not np.isfinite(signed).all():
        return False
    return equivalence_test(np.zeros(len(signed)), signed, tolerance).p_beyond < alpha


def unreadable(pairs: Sequence[Pair], recorded: Sequence[str]) -> Reason:
    """Return why nothing is read of the first step of runs that abrun did not launch."""
    if pairs and all(no_shared_step_reason([pair.baseline, pair.treatment]) for pair in pairs):
        return Code.FIRST_STEP_NOT_SHARED()
    firsts = [(first_step(pair.baseline), first_step(pair.treatment)) for pair in pairs]
    apart = next((both for both in firsts if both[0] != both[1]), None)
    if apart:
        return Code.FIRST_STEPS_DIFFER(baseline=apart[0], treatment=apart[1])
    first = max((first for first, _ in firsts), default=0)
    if first > 1:
        return Code.FIRST_STEP_LATE(step=first)
    if any(
        all(name in run.metrics for pair in pairs for run in (pair.baseline, pair.treatment))
        for name in STEP_ONE
    ):
        return Code.FIRST_STEP_NOT_FINITE()
    return Code.FIRST_STEP_NOT_RECORDED(recorded=recorded)
