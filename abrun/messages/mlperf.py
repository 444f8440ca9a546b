"""Sentences on MLPerf's check against reference convergence points (RCPs)."""

from abrun.messages.message import Message
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


MESSAGES: dict[Code, Message] = {
    Code.RCP_PASSES: _judged,
    Code.RCP_FAILS: _judged,
    Code.RCP_NOT_CONVERGED: "{num} of {of} runs did not converge; allowed: {allowed}",
    Code.RCP_MISSING: "no reference {smaller:if at or below|at or above} batch size {batch_size:g}; the "
    "{smaller:if smallest|largest} is {nearest:g}; submit reference runs at {batch_size:g}",
    Code.RCP_WITHOUT_SPREAD: "the {num} reference runs at batch size {batch_size:g} are all {value:.10g}, so "
    "their sd is 0 and the limit is their mean: up to {share:.0%} of such runs may be an evaluation earlier "
    "(95 % bound), and then {rate:.0%} of equal submissions fail",
    Code.RCP_OTHER_NUM_RUNS: "got {num:count run}, but the limit is that of {needed}; submit {needed}",
}
