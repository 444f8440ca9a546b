"""What one training run sees: its resolved configuration."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from abrun.reasons import Code, Reason
from abrun.recipe.algorithms import Dpo, Grpo, PolicyGradientSettings, Ppo, Sft
from abrun.recipe.faults import LIBRARY, NAMED_OR_NONE, InjectedFault, lacking
from abrun.recipe.implementations import BACKENDS, ENGINES
from abrun.recipe.policy import (
    NO_FILTERS,
    Filters,
    Model,
    Policy,
    Rollout,
)
from abrun.recipe.refusals import shortened
from abrun.recipe.section import Count, Env, FieldError, PathText, Positive, Section
from abrun.recipe.tasks import Completions, Preferences, TaskConfig, Validation
from abrun.redaction import REFERENCE


class WarmStart(Section):
    """Supervised steps on the task before the runs: done once, shared by all arms and seeds, and cached."""

    steps: Count
    batch_size: Count = 32
    learning_rate: Positive = 1e-3


class Checkpoint(Section):
    """When training state is saved, and how many saves are kept."""

    every: Count = 50
    keep: Count = 2
    final_weights: bool = False  # also keep the trained model, as a Hugging Face checkpoint
    # Another run's (.../checkpoints/step-000050), in any layout, to go on from: weights, optimizer and step
    start_from: PathText | None = None


class KeptSamples(Section):
    """Completions that a run keeps in samples.jsonl, to be looked at: docs/training.md."""

    prompts: Annotated[int, Field(ge=1, le=100)] = 2  # of a step's first prompts, a completion each
    every: Count = 10  # steps; and of the first one


class Cluster(Section):
    """What one run occupies. Without GPUs it trains on CPU cores, one thread a rank."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    cpu_ranks: Count = 1

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_ranks

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Wandb(Section):
    """Mirror of the metrics: docs/wandb.md. WANDB_MODE and the other WANDB_ variables hold as usual."""

    project: str = "abrun"
    entity: str | None = None

    @field_validator("project", "entity")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[^/\\#?%:\s]([^/\\#?%:\t\n\r]{0,126}[^/\\#?%:\s])?", name):
            raise FieldError(
                f"got {shortened(name)}; allowed: 1 to 128 characters, none of them one of / \\ # ? % :"
            )
        return name


class Limits(Section):
    """When a run is ended from outside, and how often it is started again."""

    run_s: Positive | None = None  # seconds from a start: then it saves a checkpoint and has failed
    # Seconds without a sign of life: from any rank (default 600), or, of a command, without a new step (1800)
    stalled_s: Positive | None = None
    retries: Annotated[int, Field(ge=0, lt=100)] = 1  # after a failure past a step that none reached before
    log_mib: Annotated[float, Field(ge=1)] = 64.0  # of stdout.log: its head and tail are kept


# Sections and keys of a run's configuration that cannot change a number that it records
WITHOUT_EFFECT = ("limits", "wandb", "keep_samples", "checkpoint.keep", "checkpoint.final_weights")


def can_change_numbers(key: str) -> bool:
    """Return whether a dotted key of a run's configuration can change what the run records."""
    return not any(key == name or key.startswith(f"{name}.") for name in WITHOUT_EFFECT)


class RunConfig(Section):
    """What any run has, whoever trains it."""

    steps: Count
    cluster: Cluster = Cluster()
    limits: Limits = Limits()

    @property
    def engine_devices(self) -> int:
        """Devices of a node that it occupies besides those of `cluster`, for rollout engines."""
        return 0

    @property
    def devices_per_node(self) -> int:
        """All that it occupies of a node: GPUs, or CPU cores."""
        return self.cluster.ranks_per_node + self.engine_devices

    @property
    def stalled_s(self) -> float:
        """Seconds without a sign of life after which a run counts as hanging."""
        return self.limits.stalled_s or 600.0


class OwnTrainer(Section):
    """The trainer that comes with abrun."""

    type: Literal["abrun"] = "abrun"
    env: Env = Field(default={})  # set before anything is imported; all else is inherited

    @field_validator("env")
    @classmethod
    def _env_refers_to_nothing(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if REFERENCE.search(value) or "\0" in value:
                raise FieldError(
                    f"got {name}: {shortened(value)}; a run of abrun's own trainer inherits the environment: "
                    "give plain text, or export it and drop it here"
                )
        return env


class OwnRunConfig(RunConfig):
    """Everything one run of abrun's own trainer sees. Resolved, it is what its `config.json` holds."""

    trainer: OwnTrainer = OwnTrainer()
    algorithm: Annotated[Grpo | Ppo | Sft | Dpo, Field(discriminator="type")]
    model: Model
    policy: Policy = Policy()
    rollout: Rollout = Rollout()
    task: Annotated[TaskConfig, Field(discriminator="type")]
    validation: Validation | None = None
    warm_start: WarmStart | None = None
    checkpoint: Checkpoint = Checkpoint()
    wandb: Wandb | None = None
    keep_samples: KeptSamples | None = KeptSamples()  # of a policy gradient; null: none
    # Broken on purpose, for a verdict to find: a name of docs/faults.md, or a section
    injected_fault: Annotated[InjectedFault | None, NAMED_OR_NONE] = None

    @property
    def engine_devices(self) -> int:
        return (self.rollout.devices or 0) if self.samples else 0

    @property
    def data_parallel(self) -> int:
        """Replicas of the policy, each of which takes an equal share of every batch."""
        return self.cluster.ranks // math.prod(self.policy.backend.shape.values())

    @property
    def trained_distribution(self) -> tuple[float, Filters]:
        """Temperature and filters of the distribution that is trained: the sampler's, or all of it.

        Imitation and preferences have no sampler, whatever `rollout` says.
        """
        if isinstance(self.algorithm, PolicyGradientSettings):
            return self.rollout.temperature, self.rollout.filters
        return 1.0, NO_FILTERS

    @property
    def head_precision(self) -> dict[str, str]:
        """The dtypes of the LM head's matmul and logits in the trainer, and of its matmul in the engine."""
        policy = self.policy
        precision = {"projection": policy.head_dtype, "logits": policy.logits_dtype}
        return precision | ({"engine": self.engine_head_dtype} if self.samples else {})

    @property
    def engine_head_dtype(self) -> str:
        return self.rollout.head_dtype or self.policy.head_dtype

    @property
    def samples(self) -> bool:
        """Whether completions are sampled, to train on or to validate by."""
        validates = self.validation is not None and not isinstance(self.task, Completions | Preferences)
        return validates or isinstance(self.algorithm, PolicyGradientSettings)

    @property
    def fault_lacks(self) -> str | None:
        """What a injected fault needs that the run lacks, and how it gets it; None: nothing."""
        return self.injected_fault and lacking(LIBRARY[self.injected_fault.name], self)

    @property
    def decodes(self) -> bool:
        """Whether they are sampled from the policy's own modules."""
        return self.samples and self.rollout.engine == "torch"


def not_built(config: OwnRunConfig) -> list[Reason]:
    """Return what a run asks for that a recipe can say and this version's trainer cannot do."""
    backend, engine, reasons = config.policy.backend, config.rollout.engine, list[Reason]()
    if backend.type not in BACKENDS:
        reasons.append(_not_among("policy.backend.type", backend.type, BACKENDS))
    if config.rollout.devices and config.cluster.nodes > 1:
        devices, nodes = config.rollout.devices, config.cluster.nodes
        reasons.append(Code.ENGINE_DEVICES_NEED_ONE_NODE(devices=devices, nodes=nodes))
    if engine not in ENGINES:
        reasons.append(_not_among("rollout.engine", engine, ENGINES))
    return reasons


def _not_among(field: str, value: str, built: Iterable[str]) -> Reason:
    return Code.NOT_BUILT(field=field, got=value, allowed=[*built])


HEAD_LABELS = {
    "projection": "the trainer's LM head",
    "logits": "the trainer's logits",
    "engine": "the rollout engine's LM head",
}


def precision_difference(
    arm: str, baseline: Mapping[str, str], treatment: Mapping[str, str]
) -> Reason | None:
    """Return in which dtypes of `OwnRunConfig.head_precision` an arm and its baseline differ; None: none."""
    precisions = {
        label: [baseline[key], treatment[key]]
        for key, label in HEAD_LABELS.items()
        if key in baseline and key in treatment and baseline[key] != treatment[key]
    }
    return Code.PRECISION_DIFFERS(arm=arm, precisions=precisions) if precisions else None
