"""Sentences on MLPerf's check against reference convergence points (RCPs)."""

from abrun.messages.message import Message
from abrun.messages.numbers import percent_text
from abrun.reasons import Code


def _judged(mean, limit, reference_mean, batch_size, point_batch_size, interpolated, scaling) -> str:
    """The submission's olympic mean against the limit."""
    relation = "below" if mean < limit else "not below"
    origin = "interpolated to" if interpolated else "at"
    text = (
        f"olympic mean {mean:.10g} at batch size {batch_size:g} is {relation} the limit {limit:.10g} of the "
        f"reference {origin} batch size {point_batch_size:g} (its mean: {reference_mean:.10g})"
    )
    return text if scaling == 1 or mean < limit else f"{text}; MLPerf scales the score by {scaling:.4f}"


def _without_spread(num: int, batch_size: float, value: float, share: float, rate: float) -> str:
    return (
        f"the {num} reference runs at batch size {batch_size:g} are all {value:.10g}, so their sd is 0 and "
        f"the limit is their mean: up to {percent_text(share)} of such runs may be an evaluation earlier "
        f"(95 % bound), and then {percent_text(rate)} of equal submissions fail"
    )


MESSAGES: dict[Code, Message] = {
    Code.RCP_PASSES: _judged,
    Code.RCP_FAILS: _judged,
    Code.RCP_NOT_CONVERGED: "{num} of {of} runs did not converge; allowed: {allowed}",
    Code.RCP_MISSING: "no reference {smaller:if at or below|at or above} batch size {batch_size:g}; the "
    "{smaller:if smallest|largest} is {nearest:g}; submit reference runs at {batch_size:g}",
    Code.RCP_WITHOUT_SPREAD: _without_spread,
    Code.RCP_OTHER_NUM_RUNS: "got {num:count run}, but the limit is that of {needed}; submit {needed}",
}
