"""Sentences of refusals to launch, continue or cancel runs."""

from abrun.messages.codes import Code
from abrun.messages.message import Message

MESSAGES: dict[Code, Message] = {
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
}
