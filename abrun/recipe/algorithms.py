"""Algorithm sections of a recipe: GRPO and its variants, PPO, SFT and DPO."""

import math
import reprlib
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from abrun.recipe.policy import Optimizer
from abrun.recipe.section import Count, FieldError, NonNegative, Positive, RuleError, Section, rule


def _refuse_document_mean(value: object) -> object:
    if value == "document_mean":
        raise FieldError(
            "got 'document_mean', which is ambiguous; allowed: 'document_sum', the sum over tokens "
            "divided by the number of documents (Fast-LLM's normalize_by_documents), or 'sequence_mean', the "
            "mean of per-sequence means"
        )
    return value


LossReduction = Annotated[
    Literal["token_mean", "sequence_mean", "sequence_sum_constant", "document_sum"],
    BeforeValidator(_refuse_document_mean),
]


def _check_grad_divisor(value: object) -> object:
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if numeric or value in ("documents", "documents_squared"):
        return value
    raise FieldError(
        f"got {reprlib.repr(value)}; allowed: a number above 0, 'documents' or 'documents_squared'"
    )


GradDivisor = Annotated[
    float | Literal["documents", "documents_squared"], BeforeValidator(_check_grad_divisor)
]


class ImportanceCorrection(Section):
    """Weights w = p_trainer / p_engine on the policy loss, within [low, high]; see trainer.rl.losses."""

    type: Literal["truncated", "icepop", "sequence_mask"]
    low: NonNegative = 0.0
    high: Positive

    @rule
    def _check_bounds(self) -> None:
        if self.low > self.high:
            raise RuleError(
                f"algorithm.importance_correction.low: got {self.low} above high, {self.high}; use a low "
                "bound below the high one"
            )


class DynamicSampling(Section):
    """Drops groups whose rewards are all equal, since they have no signal, and draws more prompts (DAPO).

    After `max_tries` times the usual number of draws, such groups fill the rest of the batch.
    """

    max_tries: Count = 10


class OverlongPunishment(Section):
    """Reward penalty that grows over the last `buffer` tokens before max_new_tokens."""

    buffer: Count  # tokens; at most rollout.max_new_tokens
    factor: Positive = 1.0  # the penalty at max_new_tokens


class PolicyGradientSettings(Section):
    """Settings shared by PPO and the GRPO family."""

    prompts_per_step: Count = 32
    group_size: Count = 8  # completions per prompt
    # Minimum number of completions per step, for which draws continue with the next prompts; with
    # dynamic_sampling the number, rounded up to whole groups
    documents_per_step: Count | None = None
    epochs_per_step: Count = 1  # passes over the completions of a step
    minibatches_per_step: Count = 1  # optimizer steps in each of them
    normalize_advantages: bool = True
    # Denominator of the importance ratio: log-probs recomputed before the first update, or the current ones
    # without gradient (ratio = 1). `auto`: on_policy if a step has one update
    ratio: Literal["auto", "old", "on_policy"] = "auto"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    importance_correction: ImportanceCorrection | None = None
    loss_reduction: LossReduction = "token_mean"
    # Mask all tokens of truncated completions; their rewards still count
    overlong_filtering: bool = False
    overlong_punishment: OverlongPunishment | None = None
    # Divisor of the gradient instead of the loss reduction's own; the reported loss is unchanged
    grad_divisor: GradDivisor | None = None
    kl_coefficient: NonNegative = 0.0
    # loss: KL penalty in the loss; reward: subtracted from the sequence's reward; reward_to_go: each token's
    # and all later tokens' KL subtracted from its reward
    kl_in: Literal["loss", "reward", "reward_to_go"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    entropy_coefficient: NonNegative = 0.0
    metrics: Literal["none", "basic", "full"] = "basic"

    @rule
    def _check_step(self) -> None:
        if self.kl_in != "loss" and self.kl_estimator == "k3+":
            raise RuleError(
                f"algorithm.kl_estimator: got 'k3+' with kl_in {self.kl_in!r}, but it differs from k3 only "
                "in its gradient, which a reward does not have; use kl_estimator: k3, or kl_in: loss"
            )
        if self.ratio == "on_policy" and self.num_updates > 1:
            raise RuleError(
                f"algorithm.ratio: got 'on_policy' with {self.num_updates} optimizer steps per rollout "
                "batch, of which only the first is on policy; use ratio: old, or epochs_per_step: 1 and "
                "minibatches_per_step: 1"
            )
        documents, draw = self.documents_per_step, self.prompts_per_step * self.group_size
        if documents is not None and documents < draw and not self.selects_groups:
            raise RuleError(
                f"algorithm.documents_per_step: got {documents}, less than the {draw} completions of one "
                f"draw (prompts_per_step {self.prompts_per_step} x group_size {self.group_size}); use {draw} "
                "or more, or smaller draws"
            )

    @property
    def groups_per_step(self) -> int:
        """Return the number of groups that a step needs."""
        if self.documents_per_step is None:
            return self.prompts_per_step
        return math.ceil(self.documents_per_step / self.group_size)

    @property
    def fetches_per_step(self) -> int:
        """Return the number of draws of prompts_per_step prompts that a step needs."""
        return math.ceil(self.groups_per_step / self.prompts_per_step)

    @property
    def selects_groups(self) -> bool:
        """Return whether a step trains on a selection of the drawn groups."""
        return False

    @property
    def num_updates(self) -> int:
        """Return the number of optimizer steps that a step takes on its completions."""
        return self.epochs_per_step * self.minibatches_per_step

    @property
    def on_policy(self) -> bool:
        """Return whether the training pass's log-probs are also the step's initial ones (ratio 1)."""
        return self.ratio == "on_policy" or (self.ratio == "auto" and self.num_updates == 1)

    @property
    def batch_size(self) -> int:
        """Return the number of prompts in a global batch."""
        return self.prompts_per_step


class Grpo(PolicyGradientSettings):
    """Group-relative policy optimisation (arXiv:2402.03300) and its family.

    Dr.GRPO: normalize_advantages false, loss_reduction sequence_sum_constant. DAPO: clip_high 0.28,
    dynamic_sampling, overlong_punishment. NeMo-RL's GRPO: advantage_baseline and normalize_over
    leave_one_out. RLOO: loss reinforce, advantage_baseline leave_one_out, normalize_advantages false,
    kl_in reward. REINFORCE++: advantage_baseline batch_mean, normalize_over batch, kl_in reward_to_go. GSPO:
    loss gspo, loss_reduction sequence_mean. CISPO: loss cispo.
    """

    type: Literal["grpo"]
    dynamic_sampling: DynamicSampling | None = None
    advantage_baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    # Std of rewards in the group, in the global batch, or over the group's other completions
    normalize_over: Literal["group", "batch", "leave_one_out"] = "group"
    loss: Literal["clipped", "gspo", "reinforce", "cispo"] = "clipped"

    @rule
    def _check_groups(self) -> None:
        baseline_of_group = self.advantage_baseline in ("group_mean", "leave_one_out")
        scaled_by_group = self.normalize_advantages and self.normalize_over == "group"
        if self.group_size == 1 and (baseline_of_group or scaled_by_group):
            raise RuleError(
                "algorithm.group_size: got 1 with group-relative advantages, which would all be zero; use 2 "
                "or more, or set advantage_baseline: none and normalize_advantages: false, or batch_mean "
                "with normalize_over: batch"
            )
        conflict, instead = "", ""
        if baseline_of_group:
            conflict = f"advantage_baseline {self.advantage_baseline!r} of a group's sequences"
            instead = "advantage_baseline: batch_mean or none"
        elif scaled_by_group:
            conflict = "normalize_over 'group'"
            instead = "normalize_over: batch, or normalize_advantages: false"
        if self.kl_in == "reward_to_go" and conflict:
            raise RuleError(
                "algorithm.kl_in: got 'reward_to_go', which gives each token its own reward, with "
                f"{conflict}; use {instead}, or kl_in: reward"
            )
        if not self.normalize_advantages:
            self.require_default(
                "algorithm.normalize_over", "with normalize_advantages false", "normalize_advantages: true"
            )
        if self.normalize_over == "leave_one_out" and self.advantage_baseline != "leave_one_out":
            raise RuleError(
                "algorithm.normalize_over: got 'leave_one_out' with advantage_baseline "
                f"{self.advantage_baseline!r}; use advantage_baseline: leave_one_out, or normalize_over: "
                "group"
            )
        if self.normalize_over == "leave_one_out" and self.group_size < 3:
            raise RuleError(
                f"algorithm.group_size: got {self.group_size} with normalize_over 'leave_one_out', but the "
                "std of a single other completion is undefined; use 3 or more, or normalize_over: group"
            )
        if self.loss not in ("clipped", "gspo"):
            without = f"with loss {self.loss!r}, which has no dual clip"
            self.require_default("algorithm.dual_clip", without, "loss: clipped or gspo")
        if self.dynamic_sampling is not None and not baseline_of_group:
            raise RuleError(
                f"algorithm.dynamic_sampling: set with advantage_baseline {self.advantage_baseline!r}, where "
                "groups of equal rewards do have a signal; use group_mean or leave_one_out, or "
                "dynamic_sampling: null"
            )

    @property
    def selects_groups(self) -> bool:
        return self.dynamic_sampling is not None


class Ppo(PolicyGradientSettings):
    """Proximal policy optimisation with a value model and GAE (arXiv:1707.06347, arXiv:1506.02438).

    The value model is updated before the policy. With `value_backbone: shared` it is a head on the policy's
    hidden states, and `value_coefficient` times its gradient adds to the policy's in the backbone.
    """

    type: Literal["ppo"]
    group_size: Count = 1
    loss: Literal["clipped"] = "clipped"
    # reward: each token's KL, computed when it is sampled, is subtracted from its reward
    kl_in: Literal["loss", "reward"] = "loss"
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    value_backbone: Literal["own", "shared"] = "own"
    value_coefficient: NonNegative | None = None  # only with value_backbone: shared; None: 0.1
    value_head_dtype: Literal["float32", "bfloat16"] = "float32"
    value_clip_range: Positive | None = 0.5  # None: no clipping
    value_optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    # A token's value is predicted from the state before it. False: from the state after it, so the baseline
    # depends on the token.
    right_shift: bool = True

    @rule
    def _check_value_coefficient(self) -> None:
        if self.value_coefficient is not None and self.value_backbone == "own":
            raise RuleError(
                f"algorithm.value_coefficient: got {self.value_coefficient} with value_backbone 'own', where "
                "the optimizer (Adam) almost cancels a loss factor; use value_optimizer.learning_rate and "
                "value_coefficient: null, or value_backbone: shared"
            )


class Sft(Section):
    """Supervised fine-tuning on the task's reference completions."""

    type: Literal["sft"]
    batch_size: Count = 32


class Dpo(Section):
    """Direct preference optimisation (arXiv:2305.18290) on the task's pairs of completions."""

    type: Literal["dpo"]
    batch_size: Count = 32  # pairs
    beta: Positive = 0.1
    logprob_reduction: Literal["sum", "mean"] = "sum"  # over a completion's tokens
    sft_coefficient: NonNegative = 0.0  # weight of the SFT loss (mean NLL of the chosen tokens)
