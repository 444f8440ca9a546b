"""Sentences of all reason codes: of verdicts, and of what stored files or decisions name by a code.

Each module has a table from code to message. A message is a template, or a function if a sentence needs more
than a template. Functions get a reason's values as keyword arguments; the values have no static types.
"""

from abrun.messages import (
    claim_evidence,
    claims,
    endings,
    failure_rates,
    guards,
    injected,
    noise,
    not_tested,
    notes,
    refusals,
    validity,
    verdicts,
)
from abrun.messages.codes import MESSAGES, Reason

_MODULES = (
    *(claim_evidence, claims, endings, failure_rates, guards, injected),
    *(noise, not_tested, notes, refusals, validity, verdicts),
)
for _module in _MODULES:
    MESSAGES.update(_module.MESSAGES)


def sentence(reason: Reason) -> str:
    """Return a reason as one sentence without a full stop; reasons in its values become sentences first."""
    return str(reason)


def sentences(reasons: "list[Reason] | tuple[Reason, ...]") -> list[str]:
    return [str(reason) for reason in reasons]
