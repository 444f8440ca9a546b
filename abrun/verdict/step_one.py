"""Step one: the first step, before any treated update can have an effect, must agree."""

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from typing import Literal

import numpy as np

from abrun.logs.recorded.experiment import Pair, RecordedRun, no_shared_step_reason
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Compare
from abrun.runs.metric_names import (
    ADVANTAGES_MAX,
    ADVANTAGES_MIN,
    FIXED_BY_ROLLOUTS,
    GEN_KL_ERROR,
    GRAD_NORM,
    LOSS,
    MEAN_GEN_TOKENS,
    MEAN_PROMPT_LENGTH,
    REWARD,
    STEP_ONE,
    TOKEN_MULT_PROB_ERROR,
    learning_sign,
)
from abrun.runs.records import start_step
from abrun.stats.equivalence import ALPHA, equivalence_test, mean_and_sd
from abrun.stats.many_tests import maxima_ratio_quantile
from abrun.stats.resolution import agree_beyond_chance, last_decimal_unit
from abrun.stats.series import Array
from abrun.verdict.evidence import Evidence
from abrun.verdict.summaries import find_smallest_step

# Rounding tolerance of a step-one metric, relative to its scale. float32 sums over a batch in
# another order differ by 1e-6 to 1e-5; bfloat16 keeps 8 bits (2^-8 = 4e-3) and rounds at every layer.
ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}
GROSS_DEVIATION = 0.5  # relative to its scale: more than rounding in any precision
# Rounding in either direction raises these: they measure the mismatch of trainer and engine, and are low
# if both happen to round alike. A fault raises them, too.
RAISED_BY_ROUNDING = (GEN_KL_ERROR, TOKEN_MULT_PROB_ERROR)
FAR_APART = 0.1  # of a metric's size: more than a fault that leaves the gradient alone does
_OF_ENGINE = (GEN_KL_ERROR, TOKEN_MULT_PROB_ERROR, "train/sampling_importance_ratio")
MIN_SHARED_REWARDS = 3  # distinct first rewards, equal within pairs, as evidence of shared prompts
# Entropy of a peaked policy is near 0 while its rounding error is that of log-probs, of order 1.
ENTROPY_SCALE = 0.1


# "redefined": one metric differs, while the gradient (or a reward's components) and all else agree.
# "not tested": beyond the usual rounding, but the rounding of these runs is unknown. "open": so in the median
# pair, from rounding or from a fault, which prevents a match.
StepOneResult = Literal["pass", "fail", "redefined", "open", "not tested"]
_CODES = {"fail": Code.STEP_ONE_DIFFERS, "redefined": Code.METRIC_REDEFINED, "open": Code.STEP_ONE_OPEN}


def check_step_one(
    arm: str, pairs: Sequence[Pair], compare: Compare, alpha: float = ALPHA, num_pairs: int | None = None
) -> list[Evidence]:
    """Check every step-one metric that some pair has in both arms at its first step, at `alpha` over all.

    Any pair can fail, also one after the first `num_pairs` of an interim analysis; only those `num_pairs`
    can leave a metric open. A deviation is relative to the metric's own size, or to that of its rounding
    errors: see `_measure_deviation`. If the arms sampled their completions anew, no single pair can fail but
    by a non-finite value: a deviation must be shown over all pairs. Returns nothing if the first recorded
    step is, or may be, later than the runs' first step: updates have been made by then.
    """
    analysed_seeds = {pair.seed for pair in pairs[:num_pairs]}
    pairs = [
        pair
        for pair in pairs
        if first_step(pair.baseline) <= 1 + start_step(pair.baseline.environment)
        and not pair.has_restarted_counter
    ]
    share = alpha / len(STEP_ONE)
    replays = any(run.trains_on_recording for pair in pairs for run in pair.runs)
    metrics = (metric for metric in STEP_ONE if not (replays and metric in FIXED_BY_ROLLOUTS))
    sampled_anew = not has_shared_rollouts(pairs)
    checked = (
        _check_metric(arm, pairs, metric, compare, share, analysed_seeds, sampled_anew=sampled_anew)
        for metric in metrics
    )
    results = [result for result in checked if result]
    failing = [check["metric"] for check in results if check.result in ("fail", "open")]
    if len(failing) == 1 and not sampled_anew and _is_redefined(failing[0], results, pairs):
        results = [
            replace(check, result="redefined") if check["metric"] in failing else check for check in results
        ]
    return [_add_reason(check, pairs[0].baseline.name.arm) for check in results]


def _add_reason(check: Evidence, baseline_arm: str) -> Evidence:
    """Return the check with its reason, unless it passes or is not tested."""
    if check.result not in _CODES:
        return check
    unshown = ("num_pairs", "aa_deviation", "sampled_anew")
    shown = {name: value for name, value in check.values.items() if name not in unshown}
    return replace(check, reason=_CODES[check.result](arm=check.arm, **shown, baseline_arm=baseline_arm))


def _is_redefined(metric: str, checks: Sequence[Evidence], pairs: Sequence[Pair]) -> bool:
    """Return True if the metric that differs has another definition, so that the training may be the same.

    Of a reward, its components agree. Of another metric, the gradient agrees, and the metric is far apart in
    every pair; abrun's own trainer has one definition, and no gradient speaks for a rollout engine.
    """
    if metric == REWARD:
        return _components_agree(pairs)
    agreeing = {check["metric"] for check in checks if check.result == "pass"}
    values = _paired_first_values(pairs, metric)
    is_apart = np.abs(values[:, 1] - values[:, 0]) > FAR_APART * np.abs(values).max(axis=1)
    is_foreign = all("trainer.type" not in (run.config or {}) for pair in pairs for run in pair.runs)
    return is_foreign and metric not in _OF_ENGINE and GRAD_NORM in agreeing and bool(is_apart.all())


def _components_agree(pairs: Sequence[Pair]) -> bool:
    """Return True if the runs record parts of the training reward that vary, and agree at step one."""
    values = [
        first_values
        for pair in pairs
        for metric in pair.baseline.metrics.keys() - {REWARD}
        if "reward" in metric and learning_sign(metric, policy_gradient=True) == 1
        if not metric.startswith("validation/") and (first_values := _first_values(*pair.runs, metric))
    ]
    return len({*values}) > 1 and np.allclose(*np.transpose(values), rtol=ROUNDING["bfloat16"], atol=0)


def _check_metric(
    arm: str,
    pairs: Sequence[Pair],
    metric: str,
    compare: Compare,
    alpha: float,
    analysed_seeds: Set[int],
    *,
    sampled_anew: bool,
) -> Evidence | None:
    """Return the pair that deviates most in a metric; None if no pair has it in both arms."""
    first_values = [(pair, _first_values(*pair.runs, metric)) for pair in pairs]
    usable = [(pair, values) for pair, values in first_values if values and math.isfinite(values[0])]
    if not usable:
        return None
    # Sampled rewards can be near 0 and opposite in sign: then only the spread over pairs has their size.
    spread = mean_and_sd(np.array([values[0] for _, values in usable]))[1] if sampled_anew else 0.0
    measured = [_measure_deviation(pair.baseline, metric, *values, spread) for pair, values in usable]
    deviations, scales = (np.array(column) for column in zip(*(row[:2] for row in measured), strict=True))
    worst = int(np.abs(deviations).argmax())
    (pair, (baseline, treatment)), (_, scale, scale_from) = usable[worst], measured[worst]
    deviation = abs(float(deviations[worst]))
    rerun_deviations = _measure_reruns(pairs, metric, spread)
    tolerance, source, is_certain = _find_tolerance(
        metric, pair, compare, len(usable), rerun_deviations, alpha, sampled_anew=sampled_anew
    )
    result: StepOneResult = "pass"
    if tolerance >= 1 and math.isfinite(deviation):  # no finite deviation could fail
        result = "not tested"
    elif deviation > tolerance:
        is_gross = deviation > GROSS_DEVIATION and not (sampled_anew and math.isfinite(deviation))
        if is_certain or is_gross:
            result = "fail"
        elif metric in RAISED_BY_ROUNDING:
            counted = deviations[[pair.seed in analysed_seeds for pair, _ in usable]]
            is_raised = len(counted) > 0 and np.median(counted) > tolerance
            is_raised &= not sampled_anew or _is_shifted(deviations, tolerance, alpha, 0.0)
            result = "open" if is_raised else "not tested"
        else:
            # One scale for all: values that scale themselves would make the t-test err four times as often.
            step = _logged_step([pair for pair, _ in usable], metric) if sampled_anew else 0.0
            differences, step = deviations * scales / scales.max(), step / scales.max()
            result = "fail" if _is_shifted(differences, tolerance, alpha, step) else "not tested"
    values = {
        "metric": metric,
        "baseline": baseline,
        "treatment": treatment,
        "step": first_step(pair.baseline),
        "seed": pair.seed,
        "num_pairs": len(usable),
        "deviation": deviation,  # |treatment - baseline| / scale; of train/gen_kl_error both as sqrt(2 KL)
        "scale": scale,
        "scale_from": scale_from,  # what the scale is
        "tolerance": tolerance,
        "tolerance_from": source,
        "aa_deviation": max(rerun_deviations, default=None),  # largest among A/A reruns
        "sampled_anew": sampled_anew,  # the arms have their own completions, so no single pair can fail
    }
    return Evidence(kind="step one", arm=arm, result=result, values=values)


def _logged_step(pairs: Sequence[Pair], metric: str) -> float:
    """Return the step in which first values move: of counts, or the last digit that is logged."""
    runs = [run for pair in pairs for run in pair.runs]
    return max(find_smallest_step(runs, metric), last_decimal_unit(_paired_first_values(pairs, metric)))


def _measure_reruns(pairs: Sequence[Pair], metric: str, spread: float) -> list[float]:
    """Return the sizes of the A/A reruns' finite deviations from their baselines."""
    deviations = [
        abs(_measure_deviation(pair.baseline, metric, *values, spread)[0])
        for pair in pairs
        for rerun in pair.reruns
        if (values := _first_values(pair.baseline, rerun, metric)) and math.isfinite(values[0])
    ]
    return [*filter(math.isfinite, deviations)]


def has_shared_prompts(pairs: Sequence[Pair]) -> bool:
    """Return True if the runs show that both arms of every started pair began with the same prompts.

    The evidence is the prompts' hashes, prompt lengths that vary between pairs but not within any, or shared
    rollouts.
    """
    pairs = _started_pairs(pairs)
    hashes = [[(run.environment or {}).get("prompts_sha256") for run in pair.runs] for pair in pairs]
    if all(baseline_hash and baseline_hash == treatment_hash for baseline_hash, treatment_hash in hashes):
        return True
    return _has_same_first_values(pairs, MEAN_PROMPT_LENGTH) or has_shared_rollouts(pairs)


def has_shared_rollouts(pairs: Sequence[Pair]) -> bool:
    """Return True if both arms of every started pair trained on the same completions at the first step.

    Common prompts are not common rollouts: most trainers sample anew in each arm. The evidence is a metric
    of the first step that varies between pairs but not within any, or three distinct rewards that are equal
    within pairs of equal lengths. abrun's trainer draws completions by seed, step and row: with one sampler
    they are the same in float32, and elsewhere if rounding has changed no length.
    """
    pairs = _started_pairs(pairs)
    metrics = (metric for metric in STEP_ONE if metric not in (REWARD, MEAN_PROMPT_LENGTH))
    if any(_has_same_first_values(pairs, metric) for metric in metrics):
        return True
    lengths = _paired_first_values(pairs, MEAN_GEN_TOKENS)
    unit = max(map(last_decimal_unit, lengths.T)) if len(lengths) else 0.0
    if len(lengths) and np.abs(lengths[:, 1] - lengths[:, 0]).max() > 1.01 * unit:
        return all(_draws_alike(pair, {"float32"}) for pair in pairs)
    return all(_draws_alike(pair, ROUNDING.keys()) for pair in pairs) or _has_same_first_rewards(pairs)


def _started_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs whose runs both have a step-one metric at the baseline's first step."""
    return [pair for pair in pairs if any(_first_values(*pair.runs, metric) for metric in STEP_ONE)]


def _draws_alike(pair: Pair, dtypes: Collection[str]) -> bool:
    """Return True if both runs replay rollouts, or are abrun's trainer with one sampler and such dtypes."""
    if any(run.trains_on_recording for run in pair.runs):
        return True
    configs = [run.config or {} for run in pair.runs]
    samplers = [{key: value for key, value in c.items() if key.startswith("rollout.")} for c in configs]
    return samplers[0] == samplers[1] and all(
        config.get("trainer.type") == "abrun" and config.get("policy.dtype") in dtypes for config in configs
    )


def _has_same_first_rewards(pairs: Sequence[Pair]) -> bool:
    """Return True if every pair begins with one reward, and the pairs have three or more distinct rewards.

    Without shared prompts, 3 to 10 pairs look like this in 0.5 % of experiments or less
    (test_whole_curve.py).
    """
    rewards = _paired_first_values(pairs, REWARD)
    is_equal = len(rewards) == len(pairs) and bool((rewards[:, 0] == rewards[:, 1]).all())
    return is_equal and len(np.unique(rewards)) >= MIN_SHARED_REWARDS


def _has_same_first_values(pairs: Sequence[Pair], metric: str) -> bool:
    """Return True if a metric's first values agree within pairs, as unrelated values hardly would."""
    values = _paired_first_values(pairs, metric)
    return len(values) >= max(len(pairs), 2) and agree_beyond_chance(values)


def _paired_first_values(pairs: Sequence[Pair], metric: str) -> Array:
    """Return the finite first values [P, 2] of the pairs that have them in both arms."""
    values = [_first_values(*pair.runs, metric) for pair in pairs]
    first_values = np.array([pair_values for pair_values in values if pair_values]).reshape(-1, 2)
    return first_values[np.isfinite(first_values).all(axis=-1)]


def first_step(run: RecordedRun) -> int:
    """Return the first training step of a run; 0 if it has none. (Evaluations may come earlier.)"""
    return min(
        (int(run.series(metric).steps[0]) for metric in STEP_ONE if len(run.series(metric))), default=0
    )


def _first_values(baseline: RecordedRun, run: RecordedRun, metric: str) -> tuple[float, float] | None:
    step = first_step(baseline)
    baseline_value, run_value = baseline.series(metric).value_at(step), run.series(metric).value_at(step)
    return None if baseline_value is None or run_value is None else (baseline_value, run_value)


def _measure_deviation(
    baseline: RecordedRun, metric: str, baseline_value: float, run_value: float, spread: float
) -> tuple[float, float, str]:
    """Return a run's signed deviation, the size that rounding errors are proportional to, and its name.

    The deviation is relative to that size, and inf for a value that is not finite. A KL in nats is converted
    to the log-prob error x that it stands for, since k3(x) is x^2 / 2 for small x. (Below 0 it is rounding of
    a trainer that computes it in float32.) `spread`: the sd over pairs if the arms sampled their completions
    anew, else 0.
    """
    is_finite = math.isfinite(run_value)
    if metric == GEN_KL_ERROR:
        errors = [math.sqrt(2 * max(value, 0.0)) for value in (baseline_value, run_value if is_finite else 0)]
        return errors[1] - errors[0] if is_finite else math.inf, 1.0, "a nat of log-prob error, sqrt(2 KL)"
    sizes = {
        "the larger value": max(abs(baseline_value), abs(run_value) if is_finite else 0.0),
        "the sd over pairs": spread,
    }
    if metric.endswith("entropy"):
        sizes["the floor for small entropies"] = ENTROPY_SCALE
    if metric == LOSS:
        # At ratio 1 a policy-gradient loss is the mean of advantages, which cancel. Rounding applies to the
        # terms, as large as the largest advantage (about 1 where they are normalised).
        step = first_step(baseline)
        ends = [baseline.series(end).value_at(step) for end in (ADVANTAGES_MIN, ADVANTAGES_MAX)]
        advantages = [abs(end) for end in ends if end is not None and math.isfinite(end)]
        source = "the largest advantage" if advantages else "the floor for small losses"
        sizes[source] = max(advantages, default=1.0)
    source = max(sizes, key=lambda name: sizes[name])
    if not is_finite or baseline_value == run_value:
        return 0.0 if is_finite else math.inf, sizes[source], source
    return (run_value - baseline_value) / sizes[source], sizes[source], source


def _find_tolerance(
    metric: str,
    pair: Pair,
    compare: Compare,
    num_pairs: int,
    rerun_deviations: Sequence[float],
    alpha: float,
    *,
    sampled_anew: bool,
) -> tuple[float, str, bool]:
    """Return the tolerance, its source, and if a deviation beyond it is certainly more than rounding.

    The tolerance for bfloat16 is a rule of thumb: an optimizer step within the first step, or a norm of
    cancelling terms, can exceed it. Only A/A reruns or the recipe can set a reliable tolerance. In bfloat16,
    reruns are ignored for the metrics in RAISED_BY_ROUNDING: the baseline rounds the same way each time.
    """
    declared = compare.step_one_tolerance
    if isinstance(declared, dict):
        declared = declared.get(metric)
    if declared is not None:
        return declared, "recipe", True
    dtypes = {(run.config or {}).get("policy.dtype") for run in (pair.baseline, pair.treatment)}
    if None in dtypes:  # unknown precision of another framework: assume the coarsest
        rounding, rounding_source = ROUNDING["bfloat16"], "rounding in an unrecorded precision"
    else:
        coarsest = max(map(str, dtypes), key=lambda dtype: ROUNDING.get(dtype, 0.0))
        rounding, rounding_source = ROUNDING.get(coarsest, ROUNDING["float32"]), f"rounding of {coarsest}"
    is_certain = rounding <= ROUNDING["float32"] and not sampled_anew
    is_raised = not is_certain and metric in RAISED_BY_ROUNDING
    largest = max(rerun_deviations, default=0.0)
    if largest > 0 and not is_raised:
        factor = maxima_ratio_quantile(num_pairs, len(rerun_deviations), alpha)
        if factor * largest > rounding:
            source = f"{factor:.3g}x the largest A/A deviation of {len(rerun_deviations)}"
            return factor * largest, source, True
    return rounding, rounding_source, is_certain


def _is_shifted(deviations: Array, tolerance: float, alpha: float, resolution: float) -> bool:
    """Return True if pairs deviate beyond the tolerance in one direction: rounding goes either way."""
    if len(deviations) < 2 or not np.isfinite(deviations).all():
        return False
    test = equivalence_test(np.zeros(len(deviations)), deviations, tolerance, resolution=resolution)
    return test.p_beyond < alpha


def first_step_unread_reason(pairs: Sequence[Pair], recorded: Sequence[str]) -> Reason:
    """Return why the first step is not evaluated in runs that abrun did not launch."""
    if not pairs:
        return Code.FIRST_STEP_NOT_PAIRED()
    if all(no_shared_step_reason([pair.baseline, pair.treatment]) for pair in pairs):
        return Code.FIRST_STEP_NOT_SHARED()
    firsts = [(first_step(pair.baseline), first_step(pair.treatment)) for pair in pairs]
    differing = next((steps for steps in firsts if steps[0] != steps[1]), None)
    if differing:
        return Code.FIRST_STEPS_DIFFER(baseline=differing[0], treatment=differing[1])
    latest = max(latest for latest, _ in firsts)
    if latest > 1:
        return Code.FIRST_STEP_LATE(step=latest)
    if any(
        all(name in run.metrics for pair in pairs for run in (pair.baseline, pair.treatment))
        for name in STEP_ONE
    ):
        return Code.FIRST_STEP_NOT_FINITE()
    return Code.FIRST_STEP_NOT_RECORDED(recorded=recorded)
