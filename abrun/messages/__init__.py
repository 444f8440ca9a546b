"""Every sentence that is made from a reason code: the only place to change a wording.

A file for each room holds a table from code to message. A message is a template, or a function of the values
where a sentence needs more than a template. Functions are called by the names of the values alone; a reason's
values have no static types.
"""

from abrun.messages import (
    claim_evidence,
    claims,
    comparing,
    endings,
    guards,
    injected,
    launching,
    next_steps,
    not_tested,
    notes,
    preflight,
    recipes,
    refusals,
    stores,
    validity,
    verdicts,
)
from abrun.messages.message import Message, render
from abrun.reasons import Code, Reason

MESSAGES: dict[Code, Message] = {
    **verdicts.MESSAGES,
    **validity.MESSAGES,
    **guards.MESSAGES,
    **claims.MESSAGES,
    **claim_evidence.MESSAGES,
    **not_tested.MESSAGES,
    **injected.MESSAGES,
    **notes.MESSAGES,
    **next_steps.MESSAGES,
    **comparing.MESSAGES,
    **endings.MESSAGES,
    **preflight.MESSAGES,
    **launching.MESSAGES,
    **recipes.MESSAGES,
    **refusals.MESSAGES,
    **stores.MESSAGES,
}


def sentence(reason: Reason) -> str:
    """Return a reason as one sentence, without a full stop. Reasons among its values are worded, too."""
    values = {name: _worded(value) for name, value in reason.values.items()}
    return render(MESSAGES[reason.code], values)


def sentences(reasons: "list[Reason] | tuple[Reason, ...]") -> list[str]:
    return [sentence(reason) for reason in reasons]


def _worded(value: object) -> object:
    if isinstance(value, Reason):
        return sentence(value)
    if isinstance(value, list):
        return [_worded(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _worded(entry) for name, entry in value.items()}
    return value
