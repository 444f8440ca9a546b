"""The trained model: its weights, where it runs, how it is optimised, how it samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from abrun.reasons import Code, Reason
from abrun.recipe.packages import missing_sampling_masks
from abrun.recipe.presets import ARCHITECTURES
from abrun.recipe.section import Count, FieldError, Fraction, NonNegative, PathText, Positive, Section
from abrun.redaction import shortened


class Shape(Section):
    """What of a preset's architecture is another size; null: the preset's own."""

    # Beyond the tokenizer's some hundred, of tokens that no text contains
    vocab_size: Annotated[int, Field(ge=128)] | None = None
    num_hidden_layers: Count | None = None
    intermediate_size: Count | None = None
    max_position_embeddings: Count | None = None


class Model(Section):
    """Which weights: a named preset with random weights, or a checkpoint (local folder or hub name)."""

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
    shape: Shape = Shape()  # with a preset
    path: PathText | None = None
    system_prompt: str | None = None  # the first turn of every prompt, of tokenizers with a chat template

    @property
    def architecture(self) -> dict[str, Any]:
        """The fields of a preset's configuration, with what `shape` changes of them; of a checkpoint none."""
        own = ARCHITECTURES[self.preset] if self.preset else {}
        return own | self.shape.model_dump(exclude_none=True)


# From the slowest to the fastest: neighbours share layers, where they talk most. Megatron's order, too.
DIMENSIONS = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")


class Layout(Section):
    """How a backend spreads a model and its sequences over ranks."""

    tensor_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1  # a layer's experts over so many ranks, which may be of several replicas
    sequence_parallel: bool = False  # what tensor-parallel ranks would all hold, cut over them by tokens

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that multiply to the ranks of one data-parallel replica."""
        return {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}

    @property
    def is_spread(self) -> bool:
        """Whether a replica of the policy takes more than one rank, or shares experts with others."""
        return self.expert_parallel > 1 or any(size > 1 for size in self.shape.values())

    @property
    def expert_groups(self) -> int:
        """Ranks that share a layer's experts; 1 where the backend makes these groups itself."""
        return self.expert_parallel

    def ranks_of_experts(self, ranks: int) -> int:
        """How many of a run's ranks all of a layer's experts can be spread over, copies included."""
        return ranks // self.tensor_parallel  # tensor-parallel ranks have the same tokens


class Dtensor(Layout):
    """PyTorch's own parallelism: FSDP2, tensor-parallel layers, sequences and experts over ranks."""

    type: Literal["dtensor"] = "dtensor"
    keep_gathered: bool = False  # OpenDtensor says what it is


class Megatron(Layout):
    """megatron-core: layers and sequences cut over ranks, stages in a pipeline, experts over ranks."""

    type: Literal["megatron"]
    pipeline_parallel: Count = 1
    distributed_optimizer: bool = True  # its state cut over the data-parallel ranks, not on each of them

    @property
    def shape(self) -> dict[str, int]:
        return super().shape | {"pipeline_parallel": self.pipeline_parallel}

    @property
    def expert_groups(self) -> int:
        return 1

    def ranks_of_experts(self, ranks: int) -> int:
        return ranks // self.pipeline_parallel


class Logprobs(Section):
    """How log-probs are computed from hidden states, and a loss of them; see abrun.kernels."""

    impl: Literal["logits", "chunked", "triton"] = "logits"
    chunk_size: Count | None = None  # vocabulary rows; None: as many as the memory budget allows
    memory_budget_mib: Count | None = None  # None: the kernel's own, 512
    one_pass: bool = False  # the loss and both gradients in one pass; for losses known token by token
    head_dtype: Literal["float32"] | None = None  # None: the policy's
    # What logits are rounded to before the softmax, with every impl; None: the head's dtype, as in stock code
    logits_dtype: Literal["float32", "bfloat16"] | None = None


class Optimizer(Section):
    """AdamW; weight decay on matrices only, not on norms and biases.

    The learning rate warms up linearly over `warmup_steps`, and then goes by its schedule: it stays, or falls
    to `min_learning_rate`, which the run's last step has.
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


Precision = Literal["float32", "bfloat16"]
Checkpointing = Literal["none", "selective", "full"]  # from the least that is computed again to the most


class Policy(Section):
    """The trained model: where it runs, at which precision, and how it is optimised."""

    backend: Annotated[Dtensor | Megatron, Field(discriminator="type")] = Dtensor()
    logprobs: Logprobs = Logprobs()
    optimizer: Optimizer = Optimizer()
    dtype: Precision = "float32"
    micro_batch_size: Count | None = None  # sequences a rank; None: the rank's whole share at once
    packing: bool = False  # sequences of a microbatch one after the other, without padding
    share_prompts: bool = False  # with packing, on dtensor: a microbatch has each prompt once
    micro_batch_tokens: Count | None = None  # OpenPolicy says what this is, and the next one
    activation_checkpointing: Checkpointing = "none"
    compile: bool = False  # each layer by torch.compile; on dtensor, where a replica is one rank
    # Norms, rotary embeddings and SwiGLU by Liger's kernels; on GPUs, with dtensor, where nothing is compiled
    # and no product cut
    liger: bool = False
    # Of a mixture of experts: the weight of the loss that balances experts over the global batch of an update
    router_aux_loss_coefficient: NonNegative = 0.0
    replay_routing: bool = False  # updates send tokens to the experts that the old log-probs' pass chose

    @property
    def head_dtype(self) -> Precision:
        """The dtype of the LM head's matmul in the trainer."""
        return self.logprobs.head_dtype or self.dtype

    @property
    def logits_dtype(self) -> Precision:
        """The dtype that the trainer rounds logits to."""
        return self.logprobs.logits_dtype or self.head_dtype

    @field_validator("backend", mode="before")
    @classmethod
    def _dtensor_need_not_be_named(cls, backend: Any) -> Any:
        return {"type": "dtensor", **backend} if isinstance(backend, dict) else backend

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _a_switch_is_all_or_nothing(cls, asked: Any) -> Any:
        return {True: "full", False: "none"}[asked] if isinstance(asked, bool) else asked


def _switch_or_auto(value: object) -> object:
    if isinstance(value, bool) or value == "auto":
        return value
    raise FieldError(f"got {shortened(value)}; allowed: true, false or auto")


def _count_or_auto(value: object) -> object:
    if value is None or value == "auto" or (type(value) is int and 0 < value < 2**31):
        return value
    raise FieldError(f"got {shortened(value)}; allowed: a whole number from 1, null or auto")


class OpenDtensor(Dtensor):
    """That of a recipe, which may leave open what a launch decides."""

    # Weights and gradients stay whole on every rank from an update's first microbatch to its last: gathered
    # once and reduced once, for 6 bytes a parameter in bfloat16 (2 of weights, 4 of gradients). auto: where
    # all arms fit the devices' memory with it
    keep_gathered: Annotated[bool | Literal["auto"], BeforeValidator(_switch_or_auto)] = False


class OpenPolicy(Policy):
    """A recipe's policy may leave open what a launch decides; a run's never does."""

    backend: Annotated[OpenDtensor | Megatron, Field(discriminator="type")] = OpenDtensor()
    # With packing: at most so many a microbatch, or one sequence. auto: 32768, or the longest sequence, or as
    # many less as all arms' memory demands
    micro_batch_tokens: Annotated[Count | Literal["auto"] | None, BeforeValidator(_count_or_auto)] = None
    # What the backward pass computes again of each layer: nothing, what `compile` has compiled (all but
    # attention), all of it. auto: the least with which all arms fit the devices' memory
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which tokens a sampler draws from, of a distribution after its temperature; in this order."""

    min_p: float = 0.0  # those at least so many times as likely as the most likely one
    top_k: int | None = None  # the k most likely ones, and those as likely as the last of them
    top_p: float = 1.0  # the fewest most likely ones whose probabilities reach it

    @property
    def drop_tokens(self) -> bool:
        return self != NO_FILTERS


NO_FILTERS = Filters()
BESIDE_THE_TRAINER = 0.6  # the share that vLLM takes of a GPU, unless a step needs little
MOST_OF_A_CACHE = BESIDE_THE_TRAINER / 2  # what is little: the other half is for weights and activations


class Rollout(Section):
    """How completions are sampled."""

    engine: Literal["torch", "vllm"] = "torch"
    # With vllm: further GPUs of the node (or cores, where the run trains on cores) for engines of their own;
    # None: on those that train
    devices: Count | None = None
    tensor_parallel: Count = 1  # devices that share an engine; with vllm
    # With vllm; None: what a step needs, or 0.6 where that is much, or 0.9 of devices of its own
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    head_dtype: Precision | None = None  # of the engine's LM head; None: the trainer's
    # With vllm on GPUs: kernels whose results do not depend on the batch, for the whole process
    batch_invariant: bool = False
    temperature: Positive = 1.0
    # Which tokens are drawn from, in this order: those so many times as likely as the likeliest, the k most
    # likely, the fewest most likely ones that reach a probability
    min_p: Fraction = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # With filters: the trainer scores the set of tokens that the sampler kept, and not the one that it would
    # keep itself; a bit of memory for each token of the vocabulary and of a batch. null: if the engine
    # reports the set, as torch does, and vLLM from 0.28 (on CPU cores with Triton)
    exact_support: bool | None = None
    max_new_tokens: Count = 512
    batch_size: Count | None = None  # sequences generated at once on a rank; None: all

    @property
    def filters(self) -> Filters:
        return Filters(min_p=self.min_p, top_k=self.top_k, top_p=self.top_p)

    @property
    def records_support(self) -> bool:
        """Return whether the sets that filters kept go with the completions.

        With `exact_support: null` the installed vLLM decides.
        """
        if not self.filters.drop_tokens or self.exact_support is False:
            return False
        return self.engine == "torch" or self.exact_support is True or missing_sampling_masks() is None

    def support_refusal(self, packages: Mapping[str, str] | None = None) -> Reason | None:
        """Return why the installed vLLM cannot record the sets that the recipe demands; None if it can."""
        demanded = self.engine == "vllm" and self.exact_support and self.filters.drop_tokens
        missing = missing_sampling_masks(packages) if demanded else None
        return Code.EXACT_SUPPORT_UNAVAILABLE(problem=missing) if missing else None
