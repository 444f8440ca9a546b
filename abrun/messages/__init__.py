"""Sentences of all reason codes. Wordings are defined only in this package.

Each module has a table from code to message. A message is a template, or a function if a sentence needs more
than a template. Functions get a reason's values as keyword arguments; the values have no static types.
"""

from abrun.messages import (
    claim_evidence,
    claims,
    comparing,
    endings,
    fleet,
    gate,
    guards,
    injected,
    launching,
    noise,
    not_tested,
    notes,
    preflight,
    recipes,
    refusals,
    stores,
    validity,
    verdicts,
)
from abrun.messages.codes import Code, Reason
from abrun.messages.message import Message, render

_MODULES = (
    *(claim_evidence, claims, comparing, endings, fleet, gate, guards, injected, launching),
    *(noise, not_tested, notes, preflight, recipes, refusals, stores, validity, verdicts),
)
MESSAGES: dict[Code, Message] = {
    code: message for module in _MODULES for code, message in module.MESSAGES.items()
}


def sentence(reason: Reason) -> str:
    """Return a reason as one sentence without a full stop; reasons in its values become sentences first."""
    values = {name: _replace_reasons(value) for name, value in reason.values.items()}
    return render(MESSAGES[reason.code], values)


def sentences(reasons: "list[Reason] | tuple[Reason, ...]") -> list[str]:
    return [sentence(reason) for reason in reasons]


def _replace_reasons(value: object) -> object:
    if isinstance(value, Reason):
        return sentence(value)
    if isinstance(value, list):
        return [_replace_reasons(item) for item in value]
    if isinstance(value, dict):
        return {name: _replace_reasons(item) for name, item in value.items()}
    return value
