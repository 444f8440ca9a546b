"""Sentences on guards: the limits that a treatment must keep."""

import math

from abrun.messages.message import Message
from abrun.reasons import Code


def _its_baseline(paired: bool) -> str:
    return "its baseline" if paired else "every baseline run"


def _and_more(num_more: int) -> str:
    return f" (and {num_more} more)" if num_more else ""


def _runs_finished(arm: str, paired: bool) -> str:
    return f"every {arm} run finished where {_its_baseline(paired)} did"


def _run_failed(run: str, step: int, failure: str, num_more: int, paired: bool) -> str:
    return (
        f"{run} failed at step {step} where {_its_baseline(paired)} finished ({failure}){_and_more(num_more)}"
    )


def _finite(clean: list[str], broken: list[str], paired: bool) -> str:
    """Name the watched metrics without NaN or Inf, and those with some, as the baseline has."""
    its = _its_baseline(paired)
    sentences = [f"no NaN or Inf in {', '.join(clean)}"] if clean else []
    sentences += (
        [f"{'some' if clean else 'NaN or Inf'} in {', '.join(broken)}, as in {its}"] if broken else []
    )
    return "; ".join(sentences) or "none of the watched metrics is recorded"


def _not_finite(metric: str, value: float, run: str, step: int, paired: bool) -> str:
    return f"{metric} is {value} in {run} from step {step}, and finite in {_its_baseline(paired)}"


def _stays_not_finite(metric: str, value: float, run: str, step: int, paired: bool) -> str:
    return f"{metric} is {value} in {run} from step {step} to the end, and not in {_its_baseline(paired)}"


def _not_finite_more_often(metric: str, share: float, baseline_share: float, p: float, level: float) -> str:
    return (
        f"{metric} is NaN or Inf at {100 * share:.3g} % of the treatment's steps and "
        f"{100 * baseline_share:.3g} % "
        f"of the baseline's (p = {p:.2g} of no more, level {level:.2g})"
    )


def _token_error_kept(metric: str, above: float | None, value: float, limit: float) -> str:
    """Say what is kept: the worst run's median, or (`above`) the share of steps above a limit."""
    what = "the worst run's median" if above is None else f"the share of steps above {above:g}"
    return f"{metric}: {what} is {_number(value)} (limit {limit:g})"


def _token_error_exceeded(
    metric: str, above: float | None, value: float, limit: float, baseline: float, p: float, level: float
) -> str:
    kept = _token_error_kept(metric, above, value, limit)
    return f"{kept}, {_number(baseline)} in the baseline (p = {p:.2g} of no more, level {level:.2g})"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


MESSAGES = {
    Code.RUNS_FINISHED: Message(_runs_finished, meaning="every treated run finished where its baseline did"),
    Code.NO_BASELINE_FINISHED: Message("no baseline run finished"),
    Code.NO_RUN_ENDED: Message("no {arm} run has ended"),
    Code.ENDINGS_NOT_KNOWN: Message("the runs do not say whether they finished"),
    Code.RUN_FAILED: Message(
        _run_failed,
        remedy="if the machine was at fault, launch with --resume",
        meaning="a treated run failed where its baseline finished",
    ),
    Code.NOTHING_RECORDED: Message("no {arm} run has recorded anything"),
    Code.FINITE: Message(_finite, meaning="watched metrics are finite, or not finite in the baseline either"),
    Code.NOT_FINITE: Message(_not_finite, meaning="a metric is NaN or Inf that its baseline has finite"),
    Code.STAYS_NOT_FINITE: Message(
        _stays_not_finite, meaning="a metric stays NaN or Inf, and its baseline's does not"
    ),
    Code.NOT_FINITE_IN_WINDOW: Message(
        "{metric} is {value} in {run} at step {step}, inside the window of its claim"
    ),
    Code.NOT_FINITE_MORE_OFTEN: Message(
        _not_finite_more_often, meaning="a metric is NaN or Inf at more steps than in the baseline"
    ),
    Code.FIRST_OF_SEVERAL: Message("{first} (and {num_more} more)"),
    Code.TOKEN_ERROR_NOT_RECORDED: Message("{metric} is not recorded"),
    Code.TOKEN_ERROR_KEPT: Message(
        _token_error_kept, meaning="the error of trainer against rollout engine keeps its limit"
    ),
    Code.TOKEN_ERROR_EXCEEDED: Message(
        _token_error_exceeded, meaning="the error of trainer against rollout engine is beyond its limit"
    ),
    Code.RATIO_NOT_RECORDED: Message("{quantity}: not recorded in finished runs of both arms"),
    Code.RATIO_KEPT: Message("{quantity}: treatment / baseline is {ratio:.3g} (limit {limit:g})"),
    Code.RATIO_EXCEEDED: Message(
        "{quantity}: treatment / baseline is {ratio:.3g} (limit {limit:g}; p = {p:.2g} of no more, level "
        "{level:.2g})"
    ),
}
