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


class ImportanceCorrection(Section):
    """Weights w = p_trainer / p_engine on the policy loss, within [low, high]; see abrun.rl.importance."""

    type: Literal["truncated", "icepop", "sequence_mask"]
    low: NonNegative = 0.0
    high: Positive

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(
                f"algorithm.importance_correction.low: got {self.low} above high, {self.high}; "
                "use a low bound below the high one"
            )
        return self


class DynamicSampling(Section):
    """Groups of equal rewards, which have no signal, are left out, and more prompts are drawn (DAPO).

    After `max_tries` times the draws that a batch takes without it, such groups fill the batch up.
    """

    max_tries: Count = 10


class Grpo(Section):
    """Group-relative policy optimisation (arXiv:2402.03300) and its family; see abrun.rl for the formulas.

    Dr.GRPO: normalize_advantages false, loss_reduction sequence_sum_constant. DAPO: clip_high 0.28,
    dynamic_sampling. RLOO: loss reinforce, advantage_baseline leave_one_out, normalize_advantages false,
    kl_in reward. REINFORCE++: advantage_baseline batch_mean, normalize_over batch, kl_in reward. GSPO: loss
    gspo, loss_reduction sequence_mean. CISPO: loss cispo.
    """

    type: Literal["grpo"]
    prompts_per_step: Count = 32
    group_size: Count = 8
    documents_per_step: Count | None = None  # draw again until there are so many completions
    dynamic_sampling: DynamicSampling | None = None
    epochs_per_step: Count = 1  # passes over the completions of a step
    minibatches_per_step: Count = 1  # optimizer steps in each of them
    advantage_baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    normalize_advantages: bool = True
    normalize_over: Literal["group", "batch"] = "group"
    loss: Literal["clipped", "gspo", "reinforce", "cispo"] = "clipped"
    ratio: Literal["old", "on_policy"] = "old"  # on_policy: to the policy itself, so 1 with its gradient
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    importance_correction: ImportanceCorrection | None = None
    loss_reduction: Literal["token_mean", "sequence_mean", "sequence_sum_constant", "document_mean"] = (
        "token_mean"
    )
    grad_divisor: Positive | None = None  # divides the gradient, and not the reported loss
    kl_coefficient: NonNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coefficient: NonNegative = 0.0
    metrics: Literal["none", "basic", "full"] = "basic"

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Self:
        normalized = self.normalize_advantages and self.normalize_over == "group"
        relative = self.advantage_baseline in ("group_mean", "leave_one_out")
        if self.group_size == 1 and (relative or normalized):
            raise ValueError(
                "algorithm.group_size: got 1 with advantages relative to their group, which are then all "
                "zero; use 2 or more, or set advantage_baseline: none and normalize_advantages: false, or "
                "batch_mean with normalize_over: batch"
            )
        return self

    @model_validator(mode="after")
    def _choices_fit_together(self) -> Self:
        num_updates = self.epochs_per_step * self.minibatches_per_step
        refusals = [
            (
                self.normalize_over == "batch" and not self.normalize_advantages,
                "normalize_over: got 'batch' with normalize_advantages false; use normalize_advantages: "
                "true, or normalize_over: group",
            ),
            (
                self.dual_clip is not None and self.loss not in ("clipped", "gspo"),
                f"dual_clip: got {self.dual_clip} with loss {self.loss!r}, which it does not bound; "
                "use loss: clipped or gspo, or dual_clip: null",
            ),
            (
                self.ratio == "on_policy" and num_updates > 1,
                f"ratio: got 'on_policy' with {num_updates} optimizer steps a rollout batch, of which only "
                "the first is on policy; use ratio: old, or epochs_per_step: 1 and minibatches_per_step: 1",
            ),
            (
                self.dynamic_sampling is not None
                and self.advantage_baseline not in ("group_mean", "leave_one_out"),
                f"dynamic_sampling: got it with advantage_baseline {self.advantage_baseline!r}, where a "
                "group of equal rewards has a signal; use group_mean or leave_one_out, or "
                "dynamic_sampling: null",
            ),
        ]
        for refused, message in refusals:
            if refused:
                raise ValueError(f"algorithm.{message}")
        return self

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError where a step's groups cannot be shared by the ranks, minibatch by minibatch."""
        parts, groups = ranks * self.minibatches_per_step, "ranks and minibatches_per_step"
        if self.prompts_per_step % parts:
            raise ValueError(
                f"algorithm.prompts_per_step: got {self.prompts_per_step} for {ranks} {groups} "
                f"{self.minibatches_per_step}; use a multiple of {parts}"
            )
        unit = parts * self.group_size
        if self.dynamic_sampling and self.documents_per_step and self.documents_per_step % unit:
            raise ValueError(
                f"algorithm.documents_per_step: got {self.documents_per_step} for groups of "
                f"{self.group_size}, {ranks} {groups} {self.minibatches_per_step}; use a multiple of {unit}"
            )


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

    @model_validator(mode="after")
    def _policy_gradient_is_possible(self) -> Self:
        if not isinstance(self.algorithm, Grpo):
            return self
        self.algorithm.check_ranks(self.cluster.ranks)
        if self.algorithm.loss == "gspo" and self.policy.logprobs.one_pass:
            raise ValueError(
                "algorithm.loss: got 'gspo' with policy.logprobs.one_pass, which needs a loss known token by "
                "token, and a token of GSPO depends on its whole sequence; use one_pass: false"
            )
        return self
