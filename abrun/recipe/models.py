"""What one training run sees: its resolved configuration, as strict models."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys refused, no type coercion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Grpo(Section):
    """Group-relative policy optimisation (arXiv:2402.03300), one optimizer step for each rollout batch."""

    type: Literal["grpo"]
    prompts_per_step: Count = 32
    group_size: Count = 8
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2
    advantage_baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    normalize_advantages: bool = True
    loss_reduction: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = "token_mean"
    kl_coefficient: NonNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: NonNegative = 0.0

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Self:
        if self.group_size == 1 and (self.normalize_advantages or self.advantage_baseline != "none"):
            raise ValueError(
                "algorithm.group_size: got 1 with advantages relative to their group, which are then all "
                "zero; use 2 or more, or set advantage_baseline: none and normalize_advantages: false"
            )
        return self


class Sft(Section):
    """Supervised fine-tuning on the task's reference completions."""

    type: Literal["sft"]
    batch_size: Count = 32


class Model(Section):
    """Which weights: a named preset with random weights, or a checkpoint (local folder or hub name)."""

    preset: Literal["qwen2-tiny", "qwen2-wide-vocab", "qwen2.5-1.5b"] | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            got = "neither" if self.preset is None else "both"
            raise ValueError(f"model: got {got} of preset and path; give exactly one (the other null)")
        return self


class Dtensor(Section):
    """PyTorch's own parallelism: FSDP2 over all ranks."""

    type: Literal["dtensor"] = "dtensor"


class Logprobs(Section):
    """How log-probs are computed from hidden states, and a loss of them; see abrun.kernels."""

    impl: Literal["logits", "chunked", "triton"] = "logits"
    chunk_size: Count | None = None  # vocabulary rows; None: as many as the memory budget allows
    memory_budget_mib: Count | None = None  # None: the kernel's own, 512
    one_pass: bool = False  # the loss and both gradients in one pass; for losses known token by token
    head_dtype: Literal["float32"] | None = None

    @model_validator(mode="after")
    def _settings_fit_the_path(self) -> Self:
        dense, fused = self.impl == "logits", "use impl: chunked or triton"
        refusals = [
            (
                dense and self.chunk_size is not None,
                f"chunk_size: got {self.chunk_size} with impl 'logits', which has no chunks; {fused}, "
                "or chunk_size: null",
            ),
            (
                dense and self.memory_budget_mib is not None,
                f"memory_budget_mib: got {self.memory_budget_mib} with impl 'logits', which has none; "
                f"{fused}, or memory_budget_mib: null",
            ),
            (
                dense and self.one_pass,
                "one_pass: got true with impl 'logits', whose dense path has one pass already; "
                f"{fused}, or one_pass: false",
            ),
            (
                self.one_pass and self.chunk_size is not None,
                f"chunk_size: got {self.chunk_size} with one_pass, which holds the whole vocabulary's "
                "logits of some tokens; use memory_budget_mib, or chunk_size: null",
            ),
        ]
        for refused, message in refusals:
            if refused:
                raise ValueError(f"policy.logprobs.{message}")
        return self


class Optimizer(Section):
    """AdamW; weight decay on matrices only, not on norms and biases; the learning rate warms up linearly."""

    learning_rate: Positive = 1e-6
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Positive = 1.0


class Policy(Section):
    """The trained model: where it runs, at which precision, and how it is optimised."""

    backend: Dtensor = Dtensor()
    logprobs: Logprobs = Logprobs()
    optimizer: Optimizer = Optimizer()
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_size: Count | None = None  # sequences a rank; None: the rank's whole share at once
    activation_checkpointing: bool = False


class Rollout(Section):
    """How completions are sampled."""

    engine: Literal["torch"] = "torch"
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Count = 512
    batch_size: Count | None = None  # sequences generated at once on a rank; None: all


class Arithmetic(Section):
    """Generated calculations with numbers from 0 to `max_operand`, such as `37+58=`, verified exactly."""

    type: Literal["arithmetic"]
    operations: list[Literal["add", "subtract", "multiply"]] = Field(default=["add"], min_length=1)
    num_operands: Annotated[int, Field(ge=2, le=20)] = 2
    max_operand: Annotated[int, Field(ge=1, lt=10**9)] = 99


class WordProblems(Section):
    """Generated stories, their numbers up to `max_number`, verified on the final answer of the solution."""

    type: Literal["word_problems"]
    topics: list[Literal["shopping", "ages", "travel", "sharing", "two_step"]] = Field(
        default=["shopping", "ages", "travel", "sharing", "two_step"], min_length=1
    )
    max_number: Annotated[int, Field(ge=3, lt=10**6)] = 20


def _module_and_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError(f"got {value[:60]!r}; allowed: module:function, such as my_rewards:judge")
    return value


Verifier = Annotated[str, AfterValidator(_module_and_function)]


class Gsm8k(Section):
    """JSON lines with `question` and an `answer` that ends in `#### 42`."""

    type: Literal["gsm8k"]
    path: str
    verifier: Verifier | None = None  # see Jsonl


class Jsonl(Section):
    """JSON lines with a prompt and a reference answer, compared mathematically or by a verifier of your own.

    `verifier: module:function` names a function (prompt, completion, answer) -> reward, any finite number.
    The trainer imports it, from the installed packages or the directory where abrun was started.
    """

    type: Literal["jsonl"]
    path: str
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    verifier: Verifier | None = None  # None: math-verify


class Validation(Section):
    """Completions of held-out prompts, before the first step, after every `every`-th and after the last.

    The prompts are the same in every arm and for every seed, and no training (a warm start included) sees
    them.
    """

    every: Count
    num_prompts: Count = 64
    path: str | None = None  # a file of the task's format; None: hold out of the task itself. The last lines
    temperature: NonNegative = 0.0  # 0: the most likely token; otherwise sampled, with the rollouts' top_p


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
    """Mirror of the metrics; WANDB_MODE and the other WANDB_ variables hold as usual."""

    project: str = "abrun"
    entity: str | None = None


class Run(Section):
    """What any run has, whoever trains it."""

    steps: Count
    cluster: Cluster = Cluster()


class OwnTrainer(Section):
    """The trainer that comes with abrun."""

    type: Literal["abrun"] = "abrun"


class RunConfig(Run):
    """Everything one run of abrun's own trainer sees. Resolved, it is what its `config.json` holds."""

    trainer: OwnTrainer = OwnTrainer()
    algorithm: Annotated[Grpo | Sft, Field(discriminator="type")]
    model: Model
    policy: Policy = Policy()
    rollout: Rollout = Rollout()
    task: Annotated[Arithmetic | WordProblems | Gsm8k | Jsonl, Field(discriminator="type")]
    validation: Validation | None = None
    warm_start: WarmStart | None = None
    checkpoint: Checkpoint = Checkpoint()
    wandb: Wandb | None = None
    planted_fault: Literal["flipped_advantages"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        ranks = self.cluster.ranks
        batch = ("prompts_per_step", "batch_size")[self.algorithm.type == "sft"]
        if getattr(self.algorithm, batch) % ranks:
            raise ValueError(
                f"algorithm.{batch}: got {getattr(self.algorithm, batch)} for {ranks} ranks; "
                f"use a multiple of {ranks}, or other cluster sizes"
            )
        if self.warm_start and self.warm_start.batch_size % ranks:
            raise ValueError(
                f"warm_start.batch_size: got {self.warm_start.batch_size} for {ranks} ranks; "
                f"use a multiple of {ranks}"
            )
        if self.rollout.top_p < 1 and self.policy.logprobs.impl != "logits":
            raise ValueError(
                f"rollout.top_p: got {self.rollout.top_p} with policy.logprobs.impl "
                f"{self.policy.logprobs.impl!r}, which never holds the logits to filter; "
                f"use top_p: 1.0, or impl: logits{' with one_pass: false' * self.policy.logprobs.one_pass}"
            )
        if self.planted_fault and self.algorithm.type != "grpo":
            raise ValueError("planted_fault: only algorithm.type grpo has advantages to flip; drop it")
        return self

    @model_validator(mode="after")
    def _validation_fits(self) -> Self:
        validation, ranks = self.validation, self.cluster.ranks
        if validation and validation.num_prompts % ranks:
            raise ValueError(
                f"validation.num_prompts: got {validation.num_prompts} for {ranks} ranks; "
                f"use a multiple of {ranks}"
            )
        if validation and validation.path is not None and not hasattr(self.task, "path"):
            raise ValueError(
                f"validation.path: got {validation.path!r} with task.type {self.task.type!r}, whose prompts "
                "are generated; use path: null"
            )
        return self
