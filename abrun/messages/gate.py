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
    Code.GATE_LEDGER_MISSING: "--against: {path} is not a file; start a ledger: abrun gate INCUMBENT --start "
    "--against {path} --claim 'train/reward:last 20%:better 0'",
    Code.GATE_LEDGER_EXISTS: "--start: {path} already exists; drop --start to ask it, or choose another file",
    Code.GATE_LEDGER_INVALID: "--against: {path} is not a ledger of abrun gate; start one with --start",
    Code.GATE_LINE_LOST: "--against: {path}: answer {number} stands where answer {expected} should; "
    "restore the file",
    Code.GATE_CLAIM_REFUSED: "--claim: got another kind of claim on {metric}; allowed: METRIC:WINDOW:better "
    "NUMBER, in the metric's unit, such as 'train/reward:last 20%:better 0'",
    Code.GATE_DIRECTION_UNKNOWN: "--claim: whether higher is better is unknown for {metric}; add "
    "', higher is better' or ', lower is better'",
    Code.GATE_WORTH_REFUSED: "--worth: got {worth:repr}; allowed: a number above the claim's {margin:g}, or "
    "standard deviations such as '2 sigma'",
    Code.GATE_INCUMBENT_REFUSED: "{incumbent}: got {num_runs:count run} as the incumbent; allowed: at least "
    "{minimum} that differ, so that the noise is known",
    Code.GATE_SUPERSEDED: "{candidate}: new runs of an earlier incumbent; to judge it against {incumbent}, "
    "run it anew and give another --name",
    Code.GATE_RUNS_CHANGED: "{candidate}: {num_missing} of the {num_earlier} runs that were judged are "
    "missing or changed; give all earlier runs with the new ones, or another --name",
    Code.GATE_TOO_MANY_SEEDS: "{candidate}: got {num_seeds} seeds; allowed: at most {maximum}, chosen in "
    "advance (--seeds 0-{maximum})",
    Code.GATE_RUN_NOT_FINISHED: "{run}: is {status}, so the candidate cannot be judged; wait or run it again",
    Code.GATE_RUN_SHORT: "{run}: {metric} {recorded:if covers steps {recorded[0]}-{recorded[1]}|is not "
    "recorded}, but the gate reads steps {steps[0]}-{steps[1]}; run it to the end",
    Code.GATE_DIVERGED: "WORSE: {metric} of {candidate} is NaN or infinite in "
    "{num_diverged:count run}; discard it",
    Code.GATE_FAILED: "WORSE: of {candidate}, {runs:list} failed; discard it, or run what failed again",
    Code.GATE_COPIES: "{problem}; run {candidate} with seeds that no other run has",
    Code.GATE_INCUMBENT_DIVERGED: "{incumbent}: {num_diverged:count run} failed or became NaN or infinite; "
    "an incumbent needs runs that end; leave the run out with --exclude",
    Code.START_NEEDS: "--start requires {missing}; add it",
}
