"""Sentences of `abrun gate`: its answers, their caveats, and refusals."""

from collections.abc import Sequence

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import bound_text, difference_text


def _evidence(
    metric: str, improvement: float, interval: Sequence[float], num_seeds: int, num_incumbent_runs: int
) -> str:
    """The estimate that an answer rests on."""
    seeds = f"{num_seeds} {'seed' if num_seeds == 1 else 'seeds'}"
    difference = difference_text(improvement, interval)
    return f"improvement of {metric} {difference}, {seeds} against {num_incumbent_runs} runs"


def _alike(candidate: str, incumbent: str, worth: float, evidence: str) -> str:
    return (
        f"ALIKE: {candidate} does not improve on {incumbent} by {bound_text(worth)} or more: {evidence}; "
        "discard it"
    )


MESSAGES: dict[Code, Message] = {
    Code.GATE_EVIDENCE: _evidence,
    Code.GATE_BETTER: "BETTER: {candidate} improves on {incumbent}{margin:if  by more than {margin:g}|} and "
    "is the new incumbent: {evidence}; p {p:.2g}, level {level:.2g}",
    Code.GATE_WORSE: "WORSE: {candidate} is worse than {incumbent}: {evidence}; discard it",
    Code.GATE_ALIKE: _alike,
    Code.GATE_OPEN: "OPEN: {candidate} is not decided against {incumbent}: {evidence}; add "
    "{seeds_to_add:count seed} and ask again",
    Code.GATE_SEEDS_SPENT: "OPEN: {candidate} is not decided against {incumbent}: {evidence}; its seeds are "
    "spent: discard it",
    Code.GATE_INCUMBENT: "INCUMBENT: {incumbent} now has {num_runs:count run}, which later candidates are "
    "compared with",
    Code.GATE_AGE: "the oldest run of {incumbent} is {days:count day} old; if code or machine changed since, "
    "run it again and start a new ledger",
    Code.GATE_ENVIRONMENT: "package versions or devices of {candidate} and {incumbent} differ, so the "
    "difference may be theirs; run the incumbent again",
    Code.GATE_ADD_TO_INCUMBENT: "more runs of the incumbent find more improvements: add "
    "{seeds_to_add:count seed} to {incumbent}, then ask about it again",
    Code.GATE_STATE: "gate on {metric} over steps {first}-{last}, {higher:if higher|lower} is better: "
    "{num_candidates:count candidate}, {num_discoveries} kept; the incumbent is {incumbent} "
    "({num_runs:count run}); level of the next candidate {level:.2g}",
    Code.GATE_DIVERGED: "WORSE: {metric} of {candidate} is NaN or infinite in "
    "{num_diverged:count run}; discard it",
    Code.GATE_FAILED: "WORSE: of {candidate}, {runs:list} failed; discard it, or run what failed again",
}
