"""Sentences beside verdicts that code decides by or stores: settings, packages, launches, uploads."""

from collections.abc import Mapping

from abrun.messages.codes import Code
from abrun.messages.message import Message

_AXES = {"steps": "training steps", "final": "final scores", "prompts": "scores per prompt"}


def _axes_mixed(places: Mapping[str, str]) -> str:
    kinds = " and ".join(f"{_AXES[axis]} ({place})" for axis, place in places.items())
    return f"sources: got {kinds}, which have no values in common; compare runs of one kind"


MESSAGES: dict[Code, Message] = {
    # Settings
    Code.SETTING_REFUSED: "{field}: got {got}, which hides every GPU; unset CUDA_VISIBLE_DEVICES",
    Code.PROBLEMS_UNREADABLE: "{field}: got {path:repr}, which cannot be read: {problem}; give a JSON-lines "
    "file",
    # Packages
    Code.PACKAGE_NOT_INSTALLED: "the package {package} is missing; pip install 'abrun[{extra}]'",
    Code.PACKAGE_BROKEN: "{package} cannot be imported: {error}; {unneeded:if pip uninstall {unneeded}, "
    "which abrun does not need|pip install --force-reinstall {package}}",
    Code.IMPORT_TOO_SLOW: "importing {package} took more than {seconds} s; run abrun doctor again when the "
    "machine is idle",
    # Devices
    Code.NO_GPU: "nvidia-smi lists no GPU; use cluster.gpus_per_node: 0",
    Code.TORCH_WITHOUT_CUDA: "torch {version} is built without CUDA; {install}",
    Code.TORCH_FINDS_NO_GPU: "torch {version}, built for CUDA {cuda}, finds no GPU (is the driver too old?); "
    "see nvidia-smi",
    # Comparing
    Code.AXES_MIXED: _axes_mixed,
    Code.OTHER_VERDICT_SCHEMA: "{path}: schema_version is {version}, but this abrun reads {readable}; "
    "compare the runs again",
    Code.VERDICT_DAMAGED: "{path}: {field}: {problem}; compare the runs again",
    # Launching
    Code.MPS_NOT_STARTED: "cluster.runs_per_gpu: runs share GPUs by time slices, without CUDA's "
    "multi-process service: {problem}",
    Code.NODE_CANNOT_RUN: "{host}: {problem}",
    Code.PROBE_FAILED: "{probe}: ended with an error; see {log}",
    Code.SLURM_COMMAND_FAILED: "slurm: {command}: {answer}",
    Code.INTERIM_SAVES: "Interim analyses are cheaper: {pairs_if_equal:.3g} pairs on average if the arms are "
    "equal, at most {max_pairs}; one analysis with the same P(match) takes {fixed_pairs:.3g}; launch with "
    "{options}",
    Code.INTERIM_COSTS_MORE: "One analysis is cheaper: {fixed_pairs:.3g} pairs; interim analyses with the "
    "same P(match) take {pairs_if_equal:.3g} on average if the arms are equal",
    Code.AUTO_ASKED: "{recipe}: {fields:list}: got 'auto'",
    Code.AUTO_NOT_MEASURED: "{asked}, but a step of arms.{arm} with {values} could not be measured: {error}; "
    "or give values: {instead}",
    # Uploads to wandb
    Code.STEPS_SENT: "{steps:count step} uploaded{url:if , {url}}",
    Code.MIRROR_NOT_BEGUN: "{error} This run {offline:if logs to wandb offline|continues without wandb}.",
    Code.MIRROR_STOPPED: "wandb stopped: {error}",
    Code.MIRROR_NOT_ENDED: "did not finish: {error}",
    Code.REPORT_SENT: "The report is in wandb: {url:if {url}|offline in {folder}; upload it with wandb sync}",
    Code.WANDB_SWITCHED_OFF: "wandb is disabled here (WANDB_MODE=disabled?)",
}
