"""Resolved configuration of one training run."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from abrun.messages.codes import Code, Reason
from abrun.recipe.algorithms import Dpo, Grpo, PolicyGradientSettings, Ppo, Sft
from abrun.recipe.faults import ACCEPT_FAULT_NAME_OR_NONE, LIBRARY, InjectedFault, unmet_need
from abrun.recipe.implementations import BACKENDS, ENGINES
from abrun.recipe.policy import NO_FILTERS, Filters, Model, Policy, Rollout
from abrun.recipe.refusals import shortened
from abrun.recipe.section import Count, Env, FieldError, PathText, Positive, Section
from abrun.recipe.tasks import CompletionsTask, PreferencesTask, TaskConfig, Validation
from abrun.runs.redaction import REFERENCE


class WarmStart(Section):
    """Supervised steps on the task before the runs; done once, cached and shared by all arms and seeds."""

    steps: Count
    batch_size: Count = 32
    learning_rate: Positive = 1e-3


class CheckpointConfig(Section):
    """Checkpoints: how often they are saved and how many are kept."""

    every: Count = 50
    keep: Count = 2
    final_weights: bool = False  # also save the trained model as a Hugging Face checkpoint
    # Checkpoint of another run to start from (.../checkpoints/step-000050): weights, optimizer and step, in
    # any parallel layout. The reference of a KL penalty or of DPO remains the run's initial weights
    start_from: PathText | None = None


class KeptSamples(Section):
    """Completions of the first and every tenth step, saved to samples.jsonl for inspection."""

    prompts: Annotated[int, Field(ge=1, le=100)] = 2  # one completion for each of a step's first prompts


# Device memory of a process outside torch's allocator. Measured on an H100: 0.61 GiB for a CUDA context and a
# bf16 matmul, with and without MPS; the rest is for kernels loaded later and CUDA graphs
CONTEXT_BYTES = 3 * 2**28


def share_of_device(device_bytes: int, runs_per_gpu: int) -> int:
    """Return the bytes that each of the runs on a device may allocate; all of them for a run alone."""
    return device_bytes if runs_per_gpu == 1 else device_bytes // runs_per_gpu - CONTEXT_BYTES


class ClusterConfig(Section):
    """Devices of one run. Without GPUs it trains on CPU cores, one thread per rank."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    cpu_ranks: Count = 1
    # Runs that share each GPU, with an equal share of its memory; times are then not compared
    runs_per_gpu: Count = 1

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_ranks

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Wandb(Section):
    """Upload of metrics to wandb. WANDB_ variables apply as usual."""

    project: str = "abrun"
    entity: str | None = None

    @field_validator("project", "entity")
    @classmethod
    def _check_wandb_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[^/\\#?%:\s]([^/\\#?%:\t\n\r]{0,126}[^/\\#?%:\s])?", name):
            raise FieldError(f"got {shortened(name)}; allowed: 1 to 128 characters without / \\ # ? % :")
        return name


class Limits(Section):
    """Timeouts after which a run is stopped, and how often it is retried."""

    run_s: Positive | None = None  # seconds after a start at which the run saves a checkpoint and fails
    # Seconds without a sign of life from any rank (default 600), or without a new step of a command (1800)
    stalled_s: Positive | None = None
    # Maximum restarts after failures; there is none if the failed start got no further than the one before
    retries: Annotated[int, Field(ge=0, lt=100)] = 1
    log_mib: Annotated[float, Field(ge=1)] = 64.0  # maximum size of stdout.log; its head and tail are kept


# Sections and keys of a run's configuration that cannot change a recorded number
NO_EFFECT_KEYS = (
    *("limits", "wandb", "keep_samples", "checkpoint.keep", "checkpoint.final_weights"),
    "cluster.runs_per_gpu",  # except for times
)


def can_change_numbers(key: str) -> bool:
    """Return whether a dotted key of a run's configuration can change what the run records."""
    return not any(key == name or key.startswith(f"{name}.") for name in NO_EFFECT_KEYS)


class RunConfig(Section):
    """Configuration shared by runs of any trainer."""

    steps: Count
    cluster: ClusterConfig = ClusterConfig()
    limits: Limits = Limits()

    @property
    def engine_devices(self) -> int:
        """Return the number of a node's devices for rollout engines, in addition to `cluster`."""
        return 0

    @property
    def devices_per_node(self) -> int:
        """Return the number of a node's GPUs or CPU cores that the run occupies."""
        return self.cluster.ranks_per_node + self.engine_devices

    @property
    def stalled_s(self) -> float:
        """Return the seconds without progress after which a run counts as stalled."""
        return self.limits.stalled_s or 600.0


class OwnTrainer(Section):
    """abrun's own trainer."""

    type: Literal["abrun"] = "abrun"
    env: Env = Field(default={})  # environment variables set before any import, on top of the inherited ones

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if REFERENCE.search(value) or "\0" in value:
                raise FieldError(
                    f"got {name}: {shortened(value)}; references are not expanded here: write plain text, or "
                    "export the variable and drop it here, since runs inherit the environment"
                )
        return env


class OwnRunConfig(RunConfig):
    """Configuration of one run of abrun's own trainer, as stored resolved in its `config.json`."""

    trainer: OwnTrainer = OwnTrainer()
    algorithm: Annotated[Grpo | Ppo | Sft | Dpo, Field(discriminator="type")]
    model: Model
    policy: Policy = Policy()
    rollout: Rollout = Rollout()
    task: Annotated[TaskConfig, Field(discriminator="type")]
    validation: Validation | None = None
    warm_start: WarmStart | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    wandb: Wandb | None = None
    keep_samples: KeptSamples | None = KeptSamples()  # with a policy gradient; null: no samples
    # Fault for the verdict to detect: a name of docs/reference/faults.md, or a section
    injected_fault: Annotated[InjectedFault | None, ACCEPT_FAULT_NAME_OR_NONE] = None

    @property
    def engine_devices(self) -> int:
        return (self.rollout.devices or 0) if self.samples_completions else 0

    @property
    def data_parallel(self) -> int:
        """Return the number of replicas of the policy; each gets an equal share of every batch."""
        return self.cluster.ranks // math.prod(self.policy.backend.shape.values())

    @property
    def trained_distribution(self) -> tuple[float, Filters]:
        """Return temperature and filters of the trained distribution: those of the sampler, or none.

        SFT and DPO have no sampler, so `rollout` does not apply to them.
        """
        if isinstance(self.algorithm, PolicyGradientSettings):
            return self.rollout.temperature, self.rollout.filters
        return 1.0, NO_FILTERS

    @property
    def head_precision(self) -> dict[str, str]:
        """Return the dtypes of the LM head: matmul and logits in the trainer, matmul in the engine."""
        policy = self.policy
        precision = {"projection": policy.head_dtype, "logits": policy.logits_dtype}
        return precision | ({"engine": self.engine_head_dtype} if self.samples_completions else {})

    @property
    def engine_head_dtype(self) -> str:
        return self.rollout.head_dtype or self.policy.head_dtype

    @property
    def samples_completions(self) -> bool:
        """Return whether completions are sampled, for training or validation."""
        validates = self.validation is not None and not isinstance(
            self.task, CompletionsTask | PreferencesTask
        )
        trains = isinstance(self.algorithm, PolicyGradientSettings) and self.rollout.engine != "recorded"
        return validates or trains

    @property
    def records_rollouts(self) -> bool:
        """Return whether the run writes down what it samples in training."""
        is_sampled = isinstance(self.algorithm, PolicyGradientSettings) and self.rollout.engine != "recorded"
        return self.rollout.record and is_sampled

    @property
    def unmet_fault_need(self) -> str | None:
        """Return an unmet need of the injected fault, with the fix; None if there is none."""
        return self.injected_fault and unmet_need(LIBRARY[self.injected_fault.name], self)

    @property
    def decodes_with_policy(self) -> bool:
        """Return whether completions are sampled from the policy's own modules."""
        return self.samples_completions and self.rollout.engine == "torch"


def recorded_source(config: RunConfig) -> str | None:
    """Return where the recorded rollouts come from that a run trains on; None if it samples its own."""
    if isinstance(config, OwnRunConfig) and config.rollout.engine == "recorded":
        return config.rollout.source
    return None


def unsupported_settings(config: OwnRunConfig) -> list[str]:
    """Return why, for each setting that is valid in a recipe but not implemented in this version."""
    backend, engine, reasons = config.policy.backend, config.rollout.engine, list[str]()
    if backend.type not in BACKENDS:
        reasons.append(_unsupported_value("policy.backend.type", backend.type, BACKENDS))
    if config.rollout.devices and config.cluster.nodes > 1:
        devices, nodes = config.rollout.devices, config.cluster.nodes
        reasons.append(
            f"rollout.devices: got {devices} with cluster.nodes {nodes}, which is not supported yet; use "
            "nodes: 1, or devices: null"
        )
    if engine not in ENGINES:
        reasons.append(_unsupported_value("rollout.engine", engine, ENGINES))
    return reasons


def _unsupported_value(field: str, value: str, built: Iterable[str]) -> str:
    return f"{field}: got {value!r}, which is not supported yet; allowed: {[*built]}"


HEAD_LABELS = {
    "projection": "the trainer's LM head",
    "logits": "the trainer's logits",
    "engine": "the rollout engine's LM head",
}


def compare_precisions(arm: str, baseline: Mapping[str, str], treatment: Mapping[str, str]) -> Reason | None:
    """Return the differences in `head_precision` between an arm and its baseline; None if equal."""
    precisions = {
        label: [baseline[key], treatment[key]]
        for key, label in HEAD_LABELS.items()
        if key in baseline and key in treatment and baseline[key] != treatment[key]
    }
    return Code.PRECISION_DIFFERS(arm=arm, precisions=precisions) if precisions else None
