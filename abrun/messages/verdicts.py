"""Sentences of verdicts: reasons why an arm fails or stays undecided, and descriptions without a test."""

from collections.abc import Mapping, Sequence
from functools import partial

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import (
    SCORES_TEXT,
    arm_texts,
    count_text,
    deviation_text,
    direction_text,
    interval_text,
    more_text,
    percent_text,
    ratio_text,
)

MAX_NAMED = 6  # metrics in a sentence
_OPEN_GUARDS = {
    "baseline too": "the baseline exceeds the limit as well, which rules out a match",
    "open": "seed noise alone could explain this, but it rules out a match",
}
_MARGINS = {
    "climb": "a tenth of the baseline's climb of {size:.3g}",
    "level": "a twentieth of the baseline's level",
    "zero": "none, because the baseline is 0",
}


def _step_one(
    ending: str,
    metric: str,
    baseline: float,
    treatment: float,
    step: int,
    seed: int,
    deviation: float,
    scale: float,
    scale_from: str,
    tolerance: float,
    tolerance_from: str,
    arm: str,
    baseline_arm: str,
) -> str:
    """The first step differs by more than rounding; `ending` says what that may mean."""
    treatment_name, baseline_name = arm_texts(arm, baseline_arm)
    return (
        f"step one: {metric} is {baseline:.6g} in {baseline_name} and {treatment:.6g} in {treatment_name} at "
        f"step {step} (seed {seed}): the deviation is {deviation_text(deviation, scale, scale_from)}, above "
        f"the tolerance of {tolerance:.2g} ({tolerance_from}){ending.format(metric=metric)}"
    )


def _described(
    arm, baseline, metric, levels, steps, axis, unit, runs, paired, difference, interval, detected
) -> str:
    """Observed difference of the arms; `levels` and `runs` have the baseline's value first."""
    window = SCORES_TEXT.get(axis) or f"steps {steps[0]}-{steps[1]}"
    sample = (
        f"{runs[0]} {'pair' if unit == 'seed' else 'prompt'}s" if paired else f"{runs[0]} and {runs[1]} runs"
    )
    sample = "one run of each arm" if max(runs) == 1 else sample
    change = (
        f"{metric} is {abs(difference):.3g} {'lower' if difference < 0 else 'higher'} in {arm}: "
        f"{levels[1]:.4g} against {levels[0]:.4g} in {baseline}, {window}"
    )
    if interval is None and difference == 0:
        return f"{metric} is the same in {arm} and {baseline}: {levels[1]:.4g}, {window}, {sample}"
    confidence = f" (90 % CI {interval_text(interval)})" if interval else ""
    if interval is None or (max(runs) == 1 and interval[0] * interval[1] > 0):
        return f"{change}, {sample}{confidence}"
    if detected is None:
        return (
            f"{metric}: no difference detected: {levels[1]:.4g} in {arm}, {levels[0]:.4g} in {baseline}, "
            f"{window}, {sample} (difference {difference:+.3g}, 90 % CI {interval_text(interval)})"
        )
    return f"{change}; {direction_text(detected, arm, baseline)}{confidence}"


def _ratio_at_each_step(metric, arm, baseline, ratio, steps, pairs, constant) -> str:
    """One arm is above the other at every step; `ratio`: mean, minimum, maximum of treatment / baseline."""
    mean, low, high = ratio
    larger, smaller = arm, baseline
    if mean < 1:
        mean, low, high, larger, smaller = 1 / mean, 1 / high, 1 / low, baseline, arm
    sample = f"at each of {steps} steps" + f" in each of {pairs} pairs" * (pairs > 1)
    factor = ", a nearly constant factor, as from another scale or normalisation" * constant
    return (
        f"{metric} is {ratio_text(mean)} as high in {larger} as in {smaller} {sample} ({ratio_text(low)} to "
        f"{ratio_text(high)}{factor})"
    )


def _other_metrics(apart: Mapping[str, float], num_metrics: int, rate: float, of_steps: bool) -> str:
    """Metrics that differ, the least probable by chance first."""
    others = count_text(num_metrics, "other metric")
    qualifier = f"false discovery rate {percent_text(rate)}"
    if not apart:
        return f"{others}: no difference detected ({qualifier})"
    if of_steps:
        qualifier = f"beside the noise from step to step, {qualifier}; seeds may differ as much"
    names = [f"{metric} {difference:+.3g}" for metric, difference in apart.items()][:MAX_NAMED]
    return (
        f"{len(apart)} of {others} differ{'s' * (len(apart) == 1)}: "
        f"{', '.join(names)}{more_text(len(apart) - len(names))} ({qualifier})"
    )


def _far_apart(levels: Mapping[str, Sequence[float]], spikes: Mapping[str, Sequence[float]]) -> str:
    """Metrics without a claim; the baseline's value comes first."""
    texts = [f"{metric} {base:.3g} and {treated:.3g}" for metric, (base, treated) in levels.items()]
    texts += [
        f"{metric} spikes to {base:.3g} and {treated:.3g}" for metric, (base, treated) in spikes.items()
    ]
    return f"far apart, without a claim: {', '.join(texts[:MAX_NAMED])}{more_text(len(texts) - MAX_NAMED)}"


def _left_out_of_metrics(
    metrics: Sequence[str],
    remaining: Sequence[int],
    paired: bool,
    run: str,
    covered: Sequence[int] | None,
    step: int | None,
) -> str:
    """A run does not count for some metrics."""
    names = ", ".join(metrics[:MAX_NAMED]) + more_text(len(metrics) - MAX_NAMED)
    rest = count_text(remaining[0], "pair") if paired else f"{remaining[0]} and {remaining[1]} runs"
    problem = f"not recorded in {run}"
    if covered:
        problem = f"{run} has only steps {covered[0]}-{covered[1]}"
    elif step is not None:
        problem = f"{run} is not finite at step {step}"
    return f"{names}: {problem}; {rest} remain{'s' * (rest == '1 pair')}"


def _no_shared_metric(baseline: Sequence[str], treatment: Sequence[str], unread: str | None) -> str:
    if unread is not None:
        return f"no metric is recorded in every run: {unread}"
    baseline_names, treatment_names = (", ".join(names) or "nothing" for names in (baseline, treatment))
    return (
        f"no metric is recorded in every run: the baseline logs {baseline_names}, the treatment "
        f"{treatment_names}; map names that mean the same, such as --alias train/reward=NAME"
    )


MESSAGES: dict[Code, Message] = {
    Code.NO_CLAIM: "no claim given: this describes the runs and tests nothing; for a verdict, add --claim "
    "METRIC:WINDOW:MARGIN",
    Code.NOTHING_CLAIMED: "no claim declared: step one and the guards pass, which does not show that the "
    "arms converge alike; add compare.claims with a margin",
    Code.OF_ARM: "{arm}: {reason}",
    Code.MORE_FAULTS: "and {num} more of this kind",
    Code.STEP_ONE_DIFFERS: partial(_step_one, ""),
    Code.STEP_ONE_OPEN: partial(_step_one, "; the cause may be rounding or a fault"),
    Code.METRIC_REDEFINED: partial(
        _step_one, "; another definition of {metric}, not another training: the other metrics agree"
    ),
    Code.GUARD_FAILS: "guard {guard} fails: {reason}",
    Code.GUARD_OPEN: lambda guard, reason, result: f"guard {guard}: {reason}; {_OPEN_GUARDS[result]}",
    Code.ONE_RUN_EACH: "one run of each arm: the difference may be seed noise, so nothing is tested",
    Code.POST_HOC: "post hoc: {why}",
    Code.PROMPTS_AS_UNITS: "one run of each arm, paired by prompt: this holds for these two checkpoints on "
    "prompts like these; runs of other seeds may differ",
    Code.DESCRIBED: _described,
    Code.RATIO_AT_EACH_STEP: _ratio_at_each_step,
    Code.OTHER_METRICS: _other_metrics,
    Code.FAR_APART: _far_apart,
    Code.LEFT_OUT_OF_METRICS: _left_out_of_metrics,
    Code.NO_SHARED_METRIC: _no_shared_metric,
    Code.MARGIN_OFFERED: lambda of, size, rounded_up_to: (
        _MARGINS[of].format(size=size)
        + ("" if rounded_up_to is None else f", rounded up to {rounded_up_to:.3g}")
    ),
}
