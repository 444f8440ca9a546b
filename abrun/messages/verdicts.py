"""Sentences of a verdict: why an arm matches, differs, stays open or is invalid."""

from functools import wraps
from typing import Any

from abrun.messages.message import Message
from abrun.reasons import Code

_OPEN_GUARDS = {
    "baseline too": "the baseline breaks the limit as well",
    "open": "beyond the limit, which seeds alone may have done",
}


def _step_one_differs(
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
) -> str:
    return (
        f"step one: {metric} is {baseline:.6g} in the baseline and {treatment:.6g} in the treatment at step "
        f"{step} (seed {seed}): a deviation by {deviation:.2g} of {scale_from} ({scale:.3g}), tolerance "
        f"{tolerance:.2g} ({tolerance_from})"
    )


@wraps(_step_one_differs)
def _step_one_open(**values: Any) -> str:
    return f"{_step_one_differs(**values)}: rounding raises it, as a fault does, and no ground for a match"


def _guard_open(guard: str, reason: str, result: str) -> str:
    return f"guard {guard}: {reason}: {_OPEN_GUARDS[result]}, and no ground for a match"


MESSAGES = {
    Code.NO_CLAIM: Message(
        "no verdict: no claim says which difference would be accepted (--primary METRIC:WINDOW:MARGIN), so "
        "this is a description and does not test whether the arms converge alike"
    ),
    Code.NO_PRIMARY: Message(
        "no primary metric is declared: step one and the guards pass, which does not show that the arms "
        "converge alike",
        remedy="declare compare.primary with a margin",
    ),
    Code.OF_ARM: Message("{arm}: {reason}"),
    Code.MORE_FAULTS: Message("and {num} more of this kind"),
    Code.STEP_ONE_DIFFERS: Message(_step_one_differs, meaning="the first step differs beyond its tolerance"),
    Code.STEP_ONE_OPEN: Message(
        _step_one_open,
        meaning="the first step differs beyond its tolerance in what rounding raises, too",
    ),
    Code.GUARD_FAILS: Message("guard {guard} fails: {reason}"),
    Code.GUARD_OPEN: Message(
        _guard_open, meaning="a guard's limit is exceeded, but not by more than seeds may do"
    ),
    Code.ONE_RUN_EACH: Message(
        "one run of each arm is a description and no test: what lies between them may be their seeds' doing"
    ),
    Code.POST_HOC: Message("post hoc: {why}"),
    Code.UNCODED: Message("{text}"),
}
