"""Sections of the trained model: weights, parallelism, optimizer and rollouts."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, field_validator

from abrun.recipe.extras import missing_sampling_masks
from abrun.recipe.section import (
    Count,
    FieldError,
    Fraction,
    NonNegative,
    PathText,
    Positive,
    RuleError,
    Section,
    is_count,
    require,
    rule,
)
from abrun.runs.redaction import shortened, yaml_text

# Preset with random weights -> its configuration
ARCHITECTURES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
)


class Shape(Section):
    """Changed sizes of a preset's architecture; null: the preset's own size."""

    # Tokens beyond the tokenizer's (about 100) never occur in text
    vocab_size: Annotated[int, Field(ge=128)] | None = None
    num_hidden_layers: Count | None = None
    intermediate_size: Count | None = None
    max_position_embeddings: Count | None = None


class Model(Section):
    """Model weights: a named preset with random weights, or a checkpoint (local folder or hub name)."""

    preset: (
        Literal[
            "qwen2-tiny",
            "qwen2-tiny-128",
            "qwen3-moe-tiny",
            "qwen3-moe-tiny-128",
            "qwen2-wide-vocab",
            "qwen2.5-1.5b",
            "qwen3-8b",
        ]
        | None
    ) = None
    shape: Shape = Shape()  # only with a preset
    path: PathText | None = None
    system_prompt: str | None = None  # first turn of every prompt; needs a tokenizer with a chat template

    @rule
    def _check_source(self) -> None:
        if (self.preset is None) == (self.path is None):
            got = "neither" if self.preset is None else "both"
            raise RuleError(
                f"model: got {got} of preset and path; give exactly one (and set the other to null)"
            )
        for name, size in self.shape.model_dump(exclude_none=True).items():
            if self.preset is None:
                raise RuleError(
                    f"model.shape.{name}: got {size} with model.path, a checkpoint whose shape is fixed; use "
                    f"{name}: null, or a preset"
                )

    @property
    def architecture(self) -> dict[str, Any]:
        """Return the preset's configuration updated with `shape`; empty for a checkpoint."""
        preset_fields = ARCHITECTURES[self.preset] if self.preset else {}
        return preset_fields | self.shape.model_dump(exclude_none=True)


# From slowest- to fastest-varying rank: ranks that communicate most are neighbours. Same order as Megatron's
DIMENSIONS = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")


class Layout(Section):
    """Parallelism of a backend: how a model and its sequences are sharded over ranks."""

    tensor_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1  # ranks that share a layer's experts; they may belong to several replicas
    sequence_parallel: bool = False  # shard activations outside attention and MLP over tensor-parallel ranks

    @rule
    def _check_sharding(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise RuleError(
                "policy.backend.sequence_parallel: got true with tensor_parallel 1, which shards nothing; "
                "use sequence_parallel: false, or tensor_parallel: 2 or more"
            )

    @property
    def shape(self) -> dict[str, int]:
        """Return the sizes whose product is the number of ranks of one data-parallel replica."""
        return {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}

    @property
    def is_spread(self) -> bool:
        """Return whether a replica has more than one rank or shares experts with other replicas."""
        return self.expert_parallel > 1 or any(size > 1 for size in self.shape.values())

    @property
    def expert_groups(self) -> int:
        """Return the number of ranks that share a layer's experts; 1 if the backend forms these groups."""
        return self.expert_parallel

    def ranks_of_experts(self, ranks: int) -> int:
        """Return the number of a run's ranks available for a layer's experts, including their copies."""
        return ranks // self.tensor_parallel  # tensor-parallel ranks process the same tokens


class Dtensor(Layout):
    """PyTorch-native parallelism: FSDP2, tensor, context and expert parallelism."""

    type: Literal["dtensor"] = "dtensor"
    keep_gathered: bool = False  # see RecipeDtensor


class Megatron(Layout):
    """megatron-core: tensor, context, pipeline and expert parallelism."""

    type: Literal["megatron"]
    pipeline_parallel: Count = 1

    @rule
    def _check_experts(self) -> None:
        if self.expert_parallel > 1 and self.tensor_parallel > 1 and not self.sequence_parallel:
            raise RuleError(
                f"policy.backend.sequence_parallel: got false with expert_parallel {self.expert_parallel} "
                f"and tensor_parallel {self.tensor_parallel}, which megatron-core refuses to train; use "
                "sequence_parallel: true"
            )

    @property
    def shape(self) -> dict[str, int]:
        return super().shape | {"pipeline_parallel": self.pipeline_parallel}

    @property
    def expert_groups(self) -> int:
        return 1

    def ranks_of_experts(self, ranks: int) -> int:
        return ranks // self.pipeline_parallel


class Logprobs(Section):
    """Computation of log-probs, and losses on them, from hidden states; see abrun.trainer.kernels."""

    impl: Literal["logits", "chunked", "triton"] = "logits"
    chunk_size: Count | None = None  # vocabulary rows per chunk; None: as many as fit 512 MiB
    one_pass: bool = False  # compute loss and both gradients in one pass; only for per-token losses
    head_dtype: Literal["float32"] | None = None  # None: policy.dtype
    # Logits are rounded to this dtype before the softmax, with every impl; None: the head's dtype, as usual
    logits_dtype: Literal["float32", "bfloat16"] | None = None

    @rule
    def _check_chunks(self) -> None:
        if self.impl == "logits":
            fused, name = "impl: chunked or triton", "policy.logprobs"
            self.require_default(f"{name}.chunk_size", "with impl 'logits', which has no chunks", fused)
            computed = "with impl 'logits', which already computes one pass"
            self.require_default(f"{name}.one_pass", computed, fused)
        if self.one_pass:
            tokens = "with one_pass, which chunks tokens and not the vocabulary"
            self.require_default("policy.logprobs.chunk_size", tokens, "")


class Optimizer(Section):
    """AdamW; weight decay on matrices only, not on norms and biases.

    The learning rate warms up linearly over `warmup_steps`. After that it stays constant or decays to
    `min_learning_rate` at the run's last step.
    """

    learning_rate: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_learning_rate: NonNegative = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Positive = 1.0

    @rule
    def _check_schedule(self) -> None:
        lowest = f"got min_learning_rate {self.min_learning_rate}"
        if self.min_learning_rate and self.schedule == "constant":
            raise FieldError(
                f"{lowest} with schedule 'constant', which never decays; use schedule: linear or cosine, or "
                "min_learning_rate: 0.0"
            )
        if self.min_learning_rate > self.learning_rate:
            raise FieldError(f"{lowest} above learning_rate {self.learning_rate}; use a smaller one")


Precision = Literal["float32", "bfloat16"]
Checkpointing = Literal["none", "selective", "full"]  # from least to most recomputation


class Policy(Section):
    """Training of the policy: backend, precision, batching and optimizer."""

    backend: Annotated[Dtensor | Megatron, Field(discriminator="type")] = Dtensor()
    logprobs: Logprobs = Logprobs()
    optimizer: Optimizer = Optimizer()
    dtype: Precision = "float32"
    micro_batch_size: Count | None = None  # sequences per rank; None: the rank's whole share at once
    packing: bool = False  # concatenate a micro-batch's sequences instead of padding them
    share_prompts: bool = False  # with packing, on dtensor: a micro-batch contains each prompt once
    # See RecipePolicy for these two
    micro_batch_tokens: Count | None = None
    activation_checkpointing: Checkpointing = "none"
    compile: bool = False  # torch.compile each layer; only on dtensor with one rank per replica
    # Liger kernels for norms, rotary embeddings and SwiGLU; on GPUs with dtensor, compile: false and
    # tensor_parallel: 1
    liger: bool = False
    # Weight of a mixture of experts' load-balancing loss
    router_aux_loss_coefficient: NonNegative = 0.0
    replay_routing: bool = False  # updates reuse the expert choices of the old log-probs' forward pass

    @rule
    def _check_kernels(self) -> None:
        backend = self.backend
        if self.logits_dtype == "bfloat16" and self.head_dtype == "float32":
            raise RuleError(
                "policy.logprobs.logits_dtype: got 'bfloat16' with a head in float32; use logits_dtype: "
                "float32, or null"
            )
        if self.compile and (backend.type != "dtensor" or backend.is_spread):
            ranks = " and several ranks per replica" if backend.type == "dtensor" else ""
            raise RuleError(
                f"policy.compile: got true with backend {backend.type!r}{ranks}; use compile: false, or "
                "type: dtensor without tensor, context and expert parallelism"
            )
        conflict, instead = "", "compile: false on dtensor"
        if self.compile:
            conflict = "compile: true, which generates its own kernels"
        elif backend.type != "dtensor":
            conflict = f"backend {backend.type!r}, which has its own kernels"
        elif backend.tensor_parallel > 1:
            sharded = f"tensor_parallel {backend.tensor_parallel}"
            conflict = f"{sharded}, but Liger kernels are untested on sharded layers"
            instead = "tensor_parallel: 1"
        if self.liger and conflict:
            raise RuleError(f"policy.liger: got true with {conflict}; use liger: false, or {instead}")
        if self.activation_checkpointing == "selective" and not self.compile:
            raise RuleError(
                "policy.activation_checkpointing: got 'selective' without compile; use compile: true, or "
                "'none' or 'full'"
            )

    @rule
    def _check_packing(self) -> None:
        tokens, size, backend = self.micro_batch_tokens, self.micro_batch_size, self.backend
        ranks = backend.context_parallel
        share = "policy.share_prompts"
        if not self.packing:
            self.require_default(share, "without packing", "packing: true")
        if backend.type != "dtensor":
            self.require_default(share, f"with backend {backend.type!r}", "type: dtensor")
        if ranks > 1:
            self.require_default(share, f"with context_parallel {ranks}", "context_parallel: 1")
        got = f"policy.micro_batch_tokens: got {shortened(tokens)}"
        if tokens is not None and not self.packing:
            raise RuleError(f"{got} without packing; use packing: true, or micro_batch_size")
        if tokens is not None and size is not None:
            both = f"with micro_batch_size {size}; give one of the two (the other null)"
            raise RuleError(f"{got} {both}")

    @property
    def head_dtype(self) -> Precision:
        """Return the dtype of the LM head's matmul in the trainer."""
        return self.logprobs.head_dtype or self.dtype

    @property
    def logits_dtype(self) -> Precision:
        """Return the dtype to which the trainer rounds logits."""
        return self.logprobs.logits_dtype or self.head_dtype

    @field_validator("backend", mode="before")
    @classmethod
    def _default_to_dtensor(cls, backend: Any) -> Any:
        return {"type": "dtensor", **backend} if isinstance(backend, dict) else backend

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _expand_switch(cls, setting: Any) -> Any:
        return {True: "full", False: "none"}[setting] if isinstance(setting, bool) else setting


CHECK_SWITCH = require(lambda value: isinstance(value, bool) or value == "auto", "true, false or auto")
CHECK_COUNT = require(
    lambda value: value in (None, "auto") or is_count(value), "a whole number from 1, null or auto"
)


class RecipeDtensor(Dtensor):
    """PyTorch-native parallelism: FSDP2, tensor, context and expert parallelism."""

    # Keep weights and gradients unsharded over an update's micro-batches, at 6 bytes per parameter in
    # bfloat16. auto: true if all arms fit with it
    keep_gathered: Annotated[bool | Literal["auto"], CHECK_SWITCH] = False


class RecipePolicy(Policy):
    """Training of the policy; `auto` leaves a setting to the launch."""

    backend: Annotated[RecipeDtensor | Megatron, Field(discriminator="type")] = RecipeDtensor()
    # Maximum tokens of a packed micro-batch; a longer sequence gets its own. auto: 32768, or less if needed
    # for all arms to fit
    micro_batch_tokens: Annotated[Count | Literal["auto"] | None, CHECK_COUNT] = None
    # Activations recomputed in the backward pass; selective: those of compiled code, which is all but
    # attention. auto: the least with which all arms fit
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Sampling filters, applied after the temperature in this order."""

    min_p: float = 0.0  # keep tokens with at least this fraction of the top token's probability
    top_k: int | None = None  # keep the k most likely tokens, and those tied with the last of them
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose total probability reaches it

    @property
    def drop_tokens(self) -> bool:
        return self != NO_FILTERS


NO_FILTERS = Filters()
# vLLM's share of a GPU that also trains, unless a step needs only a small cache
COLOCATED_MEMORY_SHARE = 0.6
# Largest share of a small cache; the other half is for weights and activations
MAX_SMALL_CACHE_SHARE = COLOCATED_MEMORY_SHARE / 2


# A class body cannot declare `from`, which is a keyword.
_FROM = Field(
    default=None,
    description="With recorded: an arm of the recipe that records; or an experiment, whose baseline is "
    "taken, a run, or a folder with a folder seed-N for each seed",
)
_fields: dict[str, Any] = {"from": (PathText | None, _FROM)}  # pyright: ignore[reportOperatorIssue]
_Source: Any = create_model("_Source", __base__=Section, __module__=__name__, **_fields)


# vLLM raises lower temperatures to the minimum and refuses higher ones
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


def check_vllm_temperature(field: str, temperature: float, instead: str) -> None:
    """Raise RuleError if vLLM cannot sample at this temperature."""
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RuleError(
            f"{field}: got {temperature} with engine 'vllm', which samples at {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE}; use a value in this range, or {instead}"
        )


class Rollout(_Source):
    """Sampling of completions."""

    # recorded: train on the rollouts that another run recorded, without sampling
    engine: Literal["torch", "vllm", "recorded"] = "torch"
    record: bool = False  # write each step's rollouts into the run directory
    # With vllm: additional GPUs or CPU cores of the node for engines; None: share the training devices
    devices: Count | None = None
    tensor_parallel: Count = 1  # with vllm: devices per engine
    # vllm's share of device memory. None: 0.9 on separate GPUs; on shared ones what a step needs, or 0.6 if
    # that is above 0.3; on CPU cores 1 GiB
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    head_dtype: Precision | None = None  # dtype of the engine's LM head; None: the trainer's
    # With vllm on GPUs: batch-invariant kernels, for the whole process
    batch_invariant: bool = False
    temperature: Positive = 1.0
    # Filters, applied in the order min_p, top_k, top_p; min_p: minimum share of the top token's probability
    min_p: Fraction = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # With filters, renormalize the trainer's log-probs over the tokens that the sampler kept. None: true if
    # the engine reports them (torch; vLLM from 0.28, on CPU cores with Triton)
    exact_support: bool | None = None
    max_new_tokens: Count = 512
    batch_size: Count | None = None  # sequences generated at once per rank; None: all

    @rule
    def _check_engine(self) -> None:
        unsupported = {
            "tensor_parallel": "which samples on every rank with unsharded weights",
            "devices": "which samples from the policy's own modules",
            "gpu_memory_utilization": "which reserves no memory",
            "batch_invariant": "which has no such kernels",
        }
        for name, reason in unsupported.items() if self.engine == "torch" else ():
            self.require_default(f"rollout.{name}", f"with engine 'torch', {reason}", "engine: vllm")
        if self.devices is not None and self.devices % self.tensor_parallel:
            got = f"rollout.tensor_parallel: got {self.tensor_parallel} with devices {self.devices}"
            raise RuleError(f"{got}; use a divisor of {self.devices}")
        if self.engine != "recorded":
            reason = f"with engine {self.engine!r}, which samples"
            self.require_default("rollout.from", reason, "engine: recorded")
        elif self.source is None:
            raise RuleError(
                "rollout.from: got null with engine 'recorded'; give an arm that records, or the path of "
                "recorded rollouts"
            )
        if (self.record or self.engine == "recorded") and self.records_support:
            raise RuleError(
                f"rollout.exact_support: got {yaml_text(self.exact_support)} with filters and recorded "
                "rollouts, which do not hold the kept sets; use exact_support: false"
            )
        if self.engine == "vllm":
            check_vllm_temperature("rollout.temperature", self.temperature, "engine: torch")

    @property
    def source(self) -> str | None:
        """Return the recording or experiment that recorded rollouts come from."""
        return getattr(self, "from")

    @property
    def filters(self) -> Filters:
        return Filters(min_p=self.min_p, top_k=self.top_k, top_p=self.top_p)

    @property
    def records_support(self) -> bool:
        """Return whether completions record the sets of tokens that filters kept.

        With `exact_support: null` this depends on the installed vLLM.
        """
        if not self.filters.drop_tokens or self.exact_support is not None:
            return bool(self.exact_support) and self.filters.drop_tokens
        return self.engine == "torch" or (self.engine == "vllm" and missing_sampling_masks() is None)

    def support_refusal(self, packages: Mapping[str, str] | None = None) -> str | None:
        """Return why the installed vLLM cannot record the required token sets; None if it can."""
        demanded = self.engine == "vllm" and self.exact_support and self.filters.drop_tokens
        if missing := missing_sampling_masks(packages) if demanded else None:
            return f"rollout.exact_support: got true {missing}; use engine: torch, or exact_support: false"
        return None
