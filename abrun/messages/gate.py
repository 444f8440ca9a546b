"""Sentences of `abrun gate`: what an answer does not cover, and what to run next."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

MESSAGES: dict[Code, Message] = {
    Code.GATE_AGE: "the oldest run of {incumbent} is {days:count day} old; if code or machine changed since, "
    "run it again and start a new ledger",
    Code.GATE_ENVIRONMENT: "package versions or devices of {candidate} and {incumbent} differ, so the "
    "difference may be theirs; run the incumbent again",
    Code.GATE_ADD_TO_INCUMBENT: "more runs of the incumbent find more improvements: add "
    "{seeds_to_add:count seed} to {incumbent}, then ask about it again",
}
