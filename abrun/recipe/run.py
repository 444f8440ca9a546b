"""What one training run sees: its resolved configuration."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from abrun.reasons import Code, Reason
from abrun.recipe.algorithms import Dpo, Grpo, PolicyGradientSettings, Ppo, Sft
from abrun.recipe.environment import Env
from abrun.recipe.fault_needs import lacking
from abrun.recipe.faults import LIBRARY, NAMED_OR_NONE, PlantedFault
from abrun.recipe.implementations import BACKENDS, ENGINES
from abrun.recipe.policy import (
    NO_FILTERS,
    PRESET_EXPERTS,
    Filters,
    Model,
    Policy,
    Rollout,
    temperature_misfit,
)
from abrun.recipe.refusals import shortened
from abrun.recipe.section import Count, FieldError, PathText, Positive, Section
from abrun.recipe.tasks import Arithmetic, Completions, Preferences, TaskConfig, Validation
from abrun.redaction import REFERENCE

FILTERS = tuple(field.name for field in dataclasses.fields(Filters))


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

    @model_validator(mode="after")
    def _one_kind_of_device(self) -> Self:
        if self.gpus_per_node and self.cpu_ranks > 1:
            raise ValueError(
                f"cluster.cpu_ranks: got {self.cpu_ranks} with gpus_per_node {self.gpus_per_node}; "
                "a run trains on GPUs or on CPU cores: drop one of the two"
            )
        return self

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
    planted_fault: Annotated[PlantedFault | None, NAMED_OR_NONE] = None

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
    def decodes(self) -> bool:
        """Whether they are sampled from the policy's own modules."""
        return self.samples and self.rollout.engine == "torch"

    @model_validator(mode="after")
    def _ranks_fit_the_backend(self) -> Self:
        backend, ranks, ranks_per_node = self.policy.backend, self.cluster.ranks, self.cluster.ranks_per_node
        replica = math.prod(backend.shape.values())
        if ranks % replica:
            parts = " x ".join(f"{name} {size}" for name, size in backend.shape.items())
            raise ValueError(
                f"policy.backend: got {parts} = {replica} ranks a replica, for {ranks} ranks; use sizes "
                f"whose product divides {ranks}, or other cluster sizes"
            )
        for part, size in (
            ("policy.backend", backend.tensor_parallel),
            ("rollout", 1 if self.rollout.devices else self.rollout.tensor_parallel),
        ):
            if ranks_per_node % size:
                raise ValueError(
                    f"{part}.tensor_parallel: got {size} for {ranks_per_node} ranks a node, and such a group "
                    f"stays on one node; use a divisor of {ranks_per_node}"
                )
        available = backend.ranks_of_experts(ranks)
        if available % backend.expert_parallel:
            raise ValueError(
                f"policy.backend.expert_parallel: got {backend.expert_parallel} for {available} ranks that a "
                f"layer's experts can be spread over; use a divisor of {available}"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.algorithm.check_ranks(self.data_parallel)
        if self.warm_start:
            self._check_shares("warm_start.batch_size", self.warm_start.batch_size)
        if self.trained_distribution[1].drop_tokens and self.policy.logprobs.impl != "logits":
            rollout, off = self.rollout, NO_FILTERS
            name = next(each for each in FILTERS if getattr(rollout, each) != getattr(off, each))
            raise ValueError(
                f"rollout.{name}: got {getattr(rollout, name)} with policy.logprobs.impl "
                f"{self.policy.logprobs.impl!r}, which never holds the logits to filter; "
                f"use {name}: {json.dumps(getattr(off, name))}, or impl: logits"
                f"{' with one_pass: false' * self.policy.logprobs.one_pass}"
            )
        if self.rollout.head_dtype == "bfloat16" and self.policy.dtype == "float32":
            raise ValueError(
                "rollout.head_dtype: got 'bfloat16' with policy.dtype 'float32'; use head_dtype: null, or "
                "policy.dtype: bfloat16"
            )
        punishment = getattr(self.algorithm, "overlong_punishment", None)
        most = self.rollout.max_new_tokens
        if punishment and punishment.buffer > most:
            raise ValueError(
                f"algorithm.overlong_punishment.buffer: got {punishment.buffer}, more than "
                f"rollout.max_new_tokens {most}; use {most} or less"
            )
        head_dtype = getattr(self.algorithm, "value_head_dtype", "float32")
        if self.policy.backend.type == "megatron" and head_dtype != "float32":
            raise ValueError(
                f"algorithm.value_head_dtype: got {head_dtype!r} with policy.backend.type 'megatron', whose "
                "masters are float32; use float32"
            )
        return self

    @model_validator(mode="after")
    def _fault_can_be_planted(self) -> Self:
        planted = self.planted_fault
        lacks = planted and lacking(LIBRARY[planted.name], self)
        if planted and lacks:
            raise ValueError(f"planted_fault: got {planted.name!r}, which {lacks}, or planted_fault: null")
        return self

    @model_validator(mode="after")
    def _validation_fits(self) -> Self:
        validation = self.validation
        if validation:
            self._check_shares("validation.num_prompts", validation.num_prompts)
        if validation and validation.path is not None and not hasattr(self.task, "path"):
            raise ValueError(
                f"validation.path: got {shortened(validation.path)} with task.type {self.task.type!r}, whose "
                "prompts are generated; use path: null"
            )
        if validation and validation.temperature and self.rollout.engine == "vllm":
            misfit = temperature_misfit(validation.temperature)
            if misfit:
                raise ValueError(f"validation.temperature: {misfit}, or 0")
        return self

    @model_validator(mode="after")
    def _invariant_kernels_are_there(self) -> Self:
        if self.rollout.batch_invariant and not self.cluster.gpus_per_node:
            raise ValueError(
                "rollout.batch_invariant: got true with cluster.gpus_per_node: 0, and vLLM has no such "
                "kernels for CPU cores; use batch_invariant: false, or GPUs"
            )
        return self

    @model_validator(mode="after")
    def _one_pass_knows_its_loss(self) -> Self:
        if not self.policy.logprobs.one_pass:
            return self
        sequence = "one_pass, which needs a loss known token by token, and a token of"
        if isinstance(self.algorithm, Grpo) and self.algorithm.loss == "gspo":
            raise ValueError(
                f"algorithm.loss: got 'gspo' with policy.logprobs.{sequence} GSPO depends on its whole "
                "sequence; use one_pass: false"
            )
        if isinstance(self.algorithm, Dpo):
            raise ValueError(
                f"algorithm.type: got 'dpo' with policy.logprobs.{sequence} DPO depends on both completions "
                "of its pair; use one_pass: false"
            )
        return self

    @model_validator(mode="after")
    def _task_fits_the_algorithm(self) -> Self:
        kind, task = self.algorithm.type, self.task.type
        if isinstance(self.algorithm, PolicyGradientSettings) and isinstance(
            self.task, Completions | Preferences
        ):
            raise ValueError(
                f"task.type: got {task!r} with algorithm.type {kind!r}, which needs a task that can judge a "
                "completion; use arithmetic, word_problems, reasoning_gym, gsm8k or jsonl"
            )
        if isinstance(self.algorithm, Dpo):
            if not isinstance(self.task, Arithmetic | Preferences):
                raise ValueError(
                    f"task.type: got {task!r} with algorithm.type 'dpo', which needs pairs of completions; "
                    "use preferences or arithmetic"
                )
            size = self.policy.micro_batch_size
            if size and size % 2:
                raise ValueError(
                    f"policy.micro_batch_size: got {size} with algorithm.type 'dpo', whose pairs stay "
                    "together; use an even number of sequences"
                )
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        """Of a preset it is known now; of a checkpoint it is found out as it loads."""
        policy, preset = self.policy, self.model.preset
        asked = {
            "backend.expert_parallel": (policy.backend.expert_parallel, 1),
            "router_aux_loss_coefficient": (policy.router_aux_loss_coefficient, 0.0),
            "replay_routing": (policy.replay_routing, False),
        }
        for name, (got, off) in asked.items():
            if got != off and preset is not None and preset not in PRESET_EXPERTS:
                raise ValueError(
                    f"policy.{name}: got {json.dumps(got)} with model.preset {preset!r}, which has no "
                    f"experts; use {name.split('.')[-1]}: {json.dumps(off)}"
                )
        number, size = self.model.architecture.get("num_experts", 0), policy.backend.expert_parallel
        if number % size:
            raise ValueError(
                f"policy.backend.expert_parallel: got {size} with model.preset {preset!r}, whose layers have "
                f"{number} experts; use a divisor of {number}"
            )
        if policy.replay_routing and not isinstance(self.algorithm, PolicyGradientSettings):
            raise ValueError(
                f"policy.replay_routing: got true with algorithm.type {self.algorithm.type!r}, which has no "
                "old log-probs whose routes could be recorded; use replay_routing: false"
            )
        return self

    def _check_shares(self, field: str, size: int) -> None:
        if size % self.data_parallel:
            raise ValueError(
                f"{field}: got {size} for {self.data_parallel} data-parallel ranks; "
                f"use a multiple of {self.data_parallel}"
            )


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
