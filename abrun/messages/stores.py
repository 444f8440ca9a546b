"""Sentences of refusals of run directories and files that cannot be read, written or trusted."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

MESSAGES: dict[Code, Message] = {
    Code.STEPS_SENT: "{steps:count step} uploaded{url:if , {url}}",
    Code.MIRROR_NOT_BEGUN: "{error} This run {offline:if logs to wandb offline|continues without wandb}.",
    Code.MIRROR_STOPPED: "wandb stopped: {error}",
    Code.MIRROR_NOT_ENDED: "did not finish: {error}",
    Code.REPORT_SENT: "The report is in wandb: {url:if {url}|offline in {folder}; upload it with wandb sync}",
    Code.WANDB_SWITCHED_OFF: "wandb is disabled here (WANDB_MODE=disabled?)",
}
