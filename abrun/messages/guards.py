"""Sentences on guards: the limits that a treatment must keep."""

import math

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import arm_texts


def _finite(clean: list[str], broken: list[str], paired: bool) -> str:
    """Watched metrics have no NaN or Inf (`clean`), or the baseline has them as well (`broken`)."""
    clauses = [f"no NaN or Inf in {', '.join(clean)}"] if clean else []
    if broken:
        baseline = "its baseline" if paired else "every baseline run"
        clauses.append(f"NaN or Inf in {', '.join(broken)}, but also in {baseline}")
    return "; ".join(clauses) or "none of the watched metrics is recorded"


def _not_finite_more_often(metric, share, baseline_share, p, level, arm, baseline_arm) -> str:
    treatment, baseline = arm_texts(arm, baseline_arm)
    return (
        f"{metric} is NaN or Inf at {100 * share:.3g} % of the steps of {treatment} and at "
        f"{100 * baseline_share:.3g} % of those of {baseline} ({_p_value(p, level, arm)})"
    )


def _token_error_kept(metric: str, above: float | None, value: float, limit: float) -> str:
    """The train-inference mismatch keeps its limit: the worst run's median, or the steps `above` a value."""
    statistic = "the worst run's median" if above is None else f"the share of steps above {above:g}"
    return f"{metric}: {statistic} is {_finite_text(value)} (limit {limit:g})"


def _token_error_exceeded(metric, above, value, limit, baseline, p, level, arm, baseline_arm) -> str:
    value_text = _token_error_kept(metric, above, value, limit)
    baseline_text = f"{_finite_text(baseline)} in {arm_texts(arm, baseline_arm)[1]}"
    return f"{value_text}, {baseline_text} ({_p_value(p, level, arm)})"


def _p_value(p: float, level: float, arm: str) -> str:
    return f"p = {p:.2g} if {arm_texts(arm, '')[0]} were no worse; significance level {level:.2g}"


def _finite_text(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


MESSAGES: dict[Code, Message] = {
    Code.RUNS_FINISHED: "no {arm} run failed{paired:if  where its baseline finished}",
    Code.NO_BASELINE_FINISHED: "no baseline run finished",
    Code.NO_RUN_ENDED: "no {arm} run has ended",
    Code.ENDINGS_NOT_KNOWN: "the runs do not record whether they finished",
    Code.RUN_FAILED: "{run} failed at step {step} ({failure}), but {paired:if its baseline|every baseline "
    "run} finished{num_more:if  (and {num_more} more)}; if the machine was at fault, run it again",
    Code.NOTHING_RECORDED: "no {arm} run has recorded anything",
    Code.FINITE: _finite,
    Code.NOT_FINITE: "{metric} is {value} in {run} from step {step}, but finite in {paired:if its "
    "baseline|every baseline run}",
    Code.STAYS_NOT_FINITE: "{metric} is {value} in {run} from step {step} to the end, but not in {paired:if "
    "its baseline|every baseline run}",
    Code.NOT_FINITE_IN_WINDOW: "{metric} is {value} in {run} at step {step}, inside the window of its claim",
    Code.NOT_FINITE_MORE_OFTEN: _not_finite_more_often,
    Code.FIRST_OF_SEVERAL: "{first} (and {num_more} more)",
    Code.TOKEN_ERROR_NOT_RECORDED: "{metric} is not recorded",
    Code.TOKEN_ERROR_KEPT: _token_error_kept,
    Code.TOKEN_ERROR_EXCEEDED: _token_error_exceeded,
    Code.RATIO_NOT_RECORDED: "{quantity}: not recorded in finished runs of both arms",
    Code.RATIO_KEPT: "{quantity}: {arm} / {baseline_arm} is {ratio:.3g} (limit {limit:g})",
    Code.RATIO_EXCEEDED: lambda quantity, ratio, limit, p, level, arm, baseline_arm: (
        f"{quantity}: {arm} / {baseline_arm} is {ratio:.3g} (limit {limit:g}; {_p_value(p, level, arm)})"
    ),
}
