"""Resolved configuration of one training run."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field, field_validator

from abrun.messages.codes import Code, Reason
from abrun.recipe.algorithms import Dpo, Grpo, PolicyGradientSettings, Ppo, Sft
from abrun.recipe.faults import ACCEPT_FAULT_NAME_OR_NONE, LIBRARY, InjectedFault, unmet_need
from abrun.recipe.policy import NO_FILTERS, Filters, Model, Policy, Rollout, check_vllm_temperature
from abrun.recipe.section import (
    Count,
    Env,
    FieldError,
    PathText,
    Positive,
    RuleError,
    Section,
    matching,
    rule,
)
from abrun.recipe.tasks import CompletionsTask, PreferencesTask, TaskConfig, Validation
from abrun.runs.redaction import REFERENCE, shortened, yaml_text


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

    @rule
    def _check_devices(self) -> None:
        if self.gpus_per_node and self.cpu_ranks > 1:
            got = f"cluster.cpu_ranks: got {self.cpu_ranks} with gpus_per_node {self.gpus_per_node}"
            raise RuleError(f"{got}; a run trains on GPUs or on CPU cores: drop one of the two")
        got = f"cluster.runs_per_gpu: got {self.runs_per_gpu}"
        if self.runs_per_gpu > 1 and not self.gpus_per_node:
            instead = "use 1 (--jobs sets the number of parallel runs on CPU cores)"
            raise RuleError(f"{got} with gpus_per_node 0, which leaves no GPU to share; {instead}")
        if self.runs_per_gpu > 1 and self.nodes > 1:
            raise RuleError(f"{got} with nodes {self.nodes}, but only runs of one node share GPUs; use 1")

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_ranks

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


WANDB_PATTERN = r"[^/\\#?%:\s]([^/\\#?%:\t\n\r]{0,126}[^/\\#?%:\s])?"
WandbName = Annotated[str, matching(WANDB_PATTERN, "1 to 128 characters without / \\ # ? % :")]


class Wandb(Section):
    """Upload of metrics to wandb. WANDB_ variables apply as usual."""

    project: WandbName = "abrun"
    entity: WandbName | None = None


class Limits(Section):
    """Timeouts after which a run is stopped, and how often it is retried."""

    run_s: Positive | None = None  # seconds after a start at which the run saves a checkpoint and fails
    # Seconds without a sign of life from any rank (default 600), or without a new step of a command (1800)
    stalled_s: Positive | None = None
    start_s: Positive | None = None  # seconds until a command's first step (default: stalled_s)
    # Maximum restarts after failures; there is none if the failed start got no further than the one before
    retries: Annotated[int, Field(ge=0, lt=100)] = 1
    log_mib: Annotated[float, Field(ge=1)] = 64.0  # maximum size of stdout.log; its head and tail are kept


# Sections and keys of a run's configuration that cannot change a recorded number
NO_EFFECT_KEYS = (
    *("limits", "wandb", "keep_samples", "checkpoint.keep", "checkpoint.final_weights", "trainer.recipe_dir"),
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
    def started_nodes(self) -> int:
        """Return the number of nodes on which the launcher starts processes."""
        return self.cluster.nodes

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


def _check_divides(field: str, size: int, ranks: int, available: str) -> None:
    if ranks % size:
        raise RuleError(f"{field}: got {size} for {available}; use a divisor of {ranks}")


def _check_multiple(field: str, number: int, unit: int, shares: str, remedy: str = "") -> None:
    if number % unit:
        raise RuleError(f"{field}: got {number} for {shares}; use a multiple of {unit}{remedy}")


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

    @rule
    def _check_limits(self) -> None:
        if self.limits.start_s:
            raise RuleError(
                f"limits.start_s: got {self.limits.start_s:g}, which limits trainers of type 'command'; use "
                "limits.stalled_s"
            )

    @rule
    def _check_sharing(self) -> None:
        runs = self.cluster.runs_per_gpu
        if runs > 1 and self.engine_devices:
            got = f"cluster.runs_per_gpu: got {runs} with rollout.devices {self.rollout.devices}"
            raise RuleError(f"{got}, whose engines take whole GPUs; use 1, or rollout.devices: null")
        if runs > 1 and (share := self.rollout.gpu_memory_utilization):
            raise RuleError(
                f"rollout.gpu_memory_utilization: got {share} with cluster.runs_per_gpu {runs}, whose runs "
                "get equal shares; use null, or cluster.runs_per_gpu: 1"
            )

    @rule
    def _check_ranks(self) -> None:
        backend, ranks, ranks_per_node = self.policy.backend, self.cluster.ranks, self.cluster.ranks_per_node
        replica = math.prod(backend.shape.values())
        if ranks % replica:
            sizes = " x ".join(f"{name} {size}" for name, size in backend.shape.items())
            raise RuleError(
                f"policy.backend: got {sizes} = {replica} ranks per replica, for {ranks} ranks; use sizes "
                f"whose product divides {ranks}, or other cluster sizes"
            )
        local_ranks = f"{ranks_per_node} ranks per node, but such a group must fit one node"
        _check_divides("policy.backend.tensor_parallel", backend.tensor_parallel, ranks_per_node, local_ranks)
        if not self.rollout.devices:
            engine_ranks = self.rollout.tensor_parallel
            _check_divides("rollout.tensor_parallel", engine_ranks, ranks_per_node, local_ranks)
        available = backend.ranks_of_experts(ranks)
        expert_ranks = f"{available} ranks available to a layer's experts"
        _check_divides("policy.backend.expert_parallel", backend.expert_parallel, available, expert_ranks)

    @rule
    def _check_batches(self) -> None:
        algorithm, replicas = self.algorithm, self.data_parallel
        ranks, remedy = f"{replicas} data-parallel ranks", ", or other cluster sizes"
        if isinstance(algorithm, PolicyGradientSettings):
            unit = replicas * algorithm.minibatches_per_step
            shares = f"{ranks} and minibatches_per_step {algorithm.minibatches_per_step}"
            _check_multiple("algorithm.prompts_per_step", algorithm.prompts_per_step, unit, shares, remedy)
            if algorithm.selects_groups and algorithm.documents_per_step:
                unit *= algorithm.group_size
                shares = f"groups of {algorithm.group_size}, {shares}"
                _check_multiple("algorithm.documents_per_step", algorithm.documents_per_step, unit, shares)
        else:
            _check_multiple("algorithm.batch_size", algorithm.batch_size, replicas, ranks, remedy)
        if self.warm_start:
            _check_multiple("warm_start.batch_size", self.warm_start.batch_size, replicas, ranks)

    @rule
    def _check_precision(self) -> None:
        (_, filters), logprobs = self.trained_distribution, self.policy.logprobs
        if filters.drop_tokens and logprobs.impl != "logits":
            off = asdict(NO_FILTERS)
            name = next(name for name in off if getattr(filters, name) != off[name])
            one_pass = " with one_pass: false" if logprobs.one_pass else ""
            raise RuleError(
                f"rollout.{name}: got {getattr(filters, name)} with policy.logprobs.impl {logprobs.impl!r}, "
                f"which never holds the logits to filter; use {name}: {yaml_text(off[name])}, or impl: "
                f"logits{one_pass}"
            )
        if self.rollout.head_dtype == "bfloat16" and self.policy.dtype == "float32":
            raise RuleError(
                "rollout.head_dtype: got 'bfloat16' with policy.dtype 'float32'; use head_dtype: null, or "
                "policy.dtype: bfloat16"
            )
        punishment = getattr(self.algorithm, "overlong_punishment", None)
        if punishment and punishment.buffer > (longest := self.rollout.max_new_tokens):
            got = f"algorithm.overlong_punishment.buffer: got {punishment.buffer}"
            raise RuleError(f"{got}, more than rollout.max_new_tokens {longest}; use {longest} or less")
        value_dtype = getattr(self.algorithm, "value_head_dtype", "float32")
        if value_dtype != "float32" and self.policy.backend.type == "megatron":
            raise RuleError(
                f"algorithm.value_head_dtype: got {value_dtype!r} with policy.backend.type 'megatron', whose "
                "masters are float32; use float32"
            )

    @rule
    def _check_fault(self) -> None:
        if self.injected_fault and (need := self.unmet_fault_need):
            got = shortened(self.injected_fault.name)
            raise RuleError(f"injected_fault: got {got}, which {need}, or injected_fault: null")

    @rule
    def _check_validation(self) -> None:
        if self.validation is None:
            return
        ranks, temperature = f"{self.data_parallel} data-parallel ranks", self.validation.temperature
        _check_multiple("validation.num_prompts", self.validation.num_prompts, self.data_parallel, ranks)
        if self.rollout.engine == "recorded" and self.samples_completions:
            raise RuleError(
                "validation: got 'a validation by completions' with rollout.engine 'recorded', which samples "
                "none; use validation: null"
            )
        if not hasattr(self.task, "path"):
            generated = f"with task.type {self.task.type!r}, whose prompts are generated"
            self.validation.require_default("validation.path", generated, "")
        if temperature and self.rollout.engine == "vllm":
            check_vllm_temperature("validation.temperature", temperature, "0, or engine: torch")

    @rule
    def _check_algorithm(self) -> None:
        algorithm, task, one_pass = self.algorithm, self.task.type, self.policy.logprobs.one_pass
        if self.rollout.batch_invariant and not self.cluster.gpus_per_node:
            raise RuleError(
                "rollout.batch_invariant: got true with cluster.gpus_per_node: 0, but vLLM has no such "
                "kernels for CPUs; use batch_invariant: false, or GPUs"
            )
        conflict = "with policy.logprobs.one_pass, which needs a per-token loss, but a token's loss in"
        problem = ""
        if isinstance(algorithm, Grpo) and algorithm.loss == "gspo":
            problem = f"loss: got 'gspo' {conflict} GSPO depends on the whole sequence"
        elif algorithm.type == "dpo":
            problem = f"type: got 'dpo' {conflict} DPO depends on both completions of a pair"
        if one_pass and problem:
            raise RuleError(f"algorithm.{problem}; use one_pass: false")
        if isinstance(algorithm, PolicyGradientSettings) and task in ("completions", "preferences"):
            raise RuleError(
                f"task.type: got {task!r} with algorithm.type {algorithm.type!r}, which needs a task that "
                "scores completions; use arithmetic, word_problems, reasoning_gym, gsm8k or jsonl"
            )
        if algorithm.type == "dpo" and task not in ("arithmetic", "preferences"):
            raise RuleError(
                f"task.type: got {task!r} with algorithm.type 'dpo', which needs pairs of completions; use "
                "preferences or arithmetic"
            )
        if algorithm.type == "dpo" and (self.policy.micro_batch_size or 0) % 2:
            raise RuleError(
                f"policy.micro_batch_size: got {self.policy.micro_batch_size} with algorithm.type 'dpo', "
                "which keeps pairs together; use an even number of sequences"
            )

    @rule
    def _check_experts(self) -> None:
        policy, preset = self.policy, self.model.preset
        experts = self.model.architecture.get("num_experts")
        if preset is not None and experts is None:
            reason = f"with model.preset {preset!r}, which has no experts"
            policy.backend.require_default("policy.backend.expert_parallel", reason, "")
            policy.require_default("policy.router_aux_loss_coefficient", reason, "")
            policy.require_default("policy.replay_routing", reason, "")
        if experts is not None and experts % (ranks := policy.backend.expert_parallel):
            got = f"policy.backend.expert_parallel: got {ranks} with model.preset {preset!r}"
            raise RuleError(f"{got}, whose layers have {experts} experts; use a divisor of {experts}")
        if policy.replay_routing and not isinstance(self.algorithm, PolicyGradientSettings):
            raise RuleError(
                f"policy.replay_routing: got true with algorithm.type {self.algorithm.type!r}, which has no "
                "old log-prob pass to record routes in; use replay_routing: false"
            )

    def find_new_problem(self) -> str | None:
        """Return the rule that this run breaks but those of earlier versions may; None if there is none."""
        algorithm = self.algorithm
        if not isinstance(algorithm, PolicyGradientSettings) or not algorithm.kl_coefficient:
            return None
        if (algorithm.kl_in, algorithm.kl_estimator) != ("loss", "k1"):
            return None
        return (
            "algorithm.kl_estimator: got 'k1' with kl_in 'loss', where its expected gradient is zero; use "
            "kl_estimator: k2, k3 or k3+, or kl_in: reward"
        )

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
    devices, nodes = config.rollout.devices, config.cluster.nodes
    if not devices or nodes == 1:
        return []
    return [
        f"rollout.devices: got {devices} with cluster.nodes {nodes}, which is not supported yet; use nodes: "
        "1, or devices: null"
    ]


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


def set_microbatch_size(config: OwnRunConfig, num_sequences: int) -> OwnRunConfig:
    """Return `config` with micro-batches of `num_sequences` and without groups, as random batches have none.

    Rewards are then used as advantages.
    """
    micro_batch_settings = {"micro_batch_size": num_sequences, "micro_batch_tokens": None}
    policy = config.policy.model_copy(update=micro_batch_settings if has_microbatches(config) else {})
    config = config.model_copy(update={"policy": policy})
    if not isinstance(config.algorithm, Grpo):
        return config
    ungrouped = {"group_size": 1, "advantage_baseline": "none"}
    ungrouped |= {"normalize_advantages": False, "normalize_over": "group"}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=ungrouped)})


def has_microbatches(config: OwnRunConfig) -> bool:
    """Return True if an update accumulates gradients over micro-batches.

    A cell then has two, because the peak is in the second: gradients exist while activations are held.
    """
    return bool(config.policy.micro_batch_size or config.policy.micro_batch_tokens)


def microbatch_size(config: OwnRunConfig) -> int:
    """Return the sequences per micro-batch and rank in the run; 1 (a pair for DPO) with a token budget."""
    policy, algorithm = config.policy, config.algorithm
    sequences_per_pair = 2 if isinstance(algorithm, Dpo) else 1
    if has_microbatches(config):
        return policy.micro_batch_size or sequences_per_pair
    sequences = algorithm.batch_size * getattr(algorithm, "group_size", sequences_per_pair)
    minibatches = getattr(algorithm, "minibatches_per_step", 1)
    return max(sequences // config.data_parallel // minibatches, sequences_per_pair)


def largest_microbatch(
    config: OwnRunConfig, longest_sequence: int, max_positions: int | None
) -> tuple[int, int]:
    """Return the number and length in tokens of the sequences in a rank's largest expected micro-batch.

    A token budget is assumed to be filled by few sequences, up to the model's context length.
    """
    num_sequences, budget = microbatch_size(config), config.policy.micro_batch_tokens
    if not budget:
        return num_sequences, longest_sequence
    # A sequence longer than the budget gets its own micro-batch
    length = max(budget // num_sequences, longest_sequence)
    num_splits = math.ceil(length / (max_positions or length))
    return num_sequences * num_splits, math.ceil(length / num_splits)


def num_rows(config: OwnRunConfig, num_sequences: int) -> int:
    """Return the sequences per step and rank with micro-batches of `num_sequences`."""
    minibatches = getattr(config.algorithm, "minibatches_per_step", 1)
    return num_sequences * (1 + has_microbatches(config)) * minibatches
