"""Sentences beside verdicts that code decides by or stores: settings, packages, launches, uploads."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

MESSAGES: dict[Code, Message] = {
    # Settings
    Code.PROBLEMS_UNREADABLE: "{field}: got {path:repr}, which cannot be read: {problem}; give a JSON-lines "
    "file",
    # Launching
    Code.PROBE_FAILED: "{probe}: ended with an error; see {log}",
    # Uploads to wandb
    Code.STEPS_SENT: "{steps:count step} uploaded{url:if , {url}}",
    Code.MIRROR_NOT_BEGUN: "{error} This run {offline:if logs to wandb offline|continues without wandb}.",
}
