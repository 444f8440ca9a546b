"""Sentences of refusals to compare: runs, options, references and ledgers that cannot be used."""

from collections.abc import Mapping

from abrun.messages.codes import Code
from abrun.messages.message import Message

_AXES = {"steps": "training steps", "final": "final scores", "prompts": "scores per prompt"}


def _axes_mixed(places: Mapping[str, str]) -> str:
    kinds = " and ".join(f"{_AXES[axis]} ({place})" for axis, place in places.items())
    return f"sources: got {kinds}, which have no values in common; compare runs of one kind"


EXPERIMENTS: dict[Code, Message] = {}
SOURCES: dict[Code, Message] = {
    Code.AXES_MIXED: _axes_mixed,
}
REFERENCES: dict[Code, Message] = {}
LEDGERS: dict[Code, Message] = {
    Code.OTHER_VERDICT_SCHEMA: "{path}: schema_version is {version}, but this abrun reads {readable}; "
    "compare the runs again",
    Code.VERDICT_DAMAGED: "{path}: {field}: {problem}; compare the runs again",
}
MESSAGES = {**EXPERIMENTS, **SOURCES, **REFERENCES, **LEDGERS}
