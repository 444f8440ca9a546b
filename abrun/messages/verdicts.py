"""Sentences of a verdict: why an arm matches, differs, stays open or is invalid."""

from abrun.messages.message import Message
from abrun.reasons import Code

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
}
