"""What a training step does: the algorithms and their fields."""

import math
import reprlib
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from abrun.recipe.policy import Optimizer
from abrun.recipe.section import Count, FieldError, NonNegative, Positive, Section


def _no_document_mean(value: object) -> object:
    if value == "document_mean":
        raise FieldError(
            "got 'document_mean', which two things were called; allowed: 'document_sum', the sum over tokens "
            "divided by the number of documents (Fast-LLM's normalize_by_documents), or 'sequence_mean', the "
            "mean of per-sequence means"
        )
    return value


LossReduction = Annotated[
    Literal["token_mean", "sequence_mean", "sequence_sum_constant", "document_sum"],
    BeforeValidator(_no_document_mean),
]


def _number_or_rule(value: object) -> object:
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if numeric or value in ("documents", "documents_squared"):
        return value
    raise FieldError(
        f"got {reprlib.repr(value)}; allowed: a number above 0, 'documents' or 'documents_squared'"
    )


GradDivisor = Annotated[float | Literal["documents", "documents_squared"], BeforeValidator(_number_or_rule)]


class ImportanceCorrection(Section):
    """Weights w = p_trainer / p_engine on the policy loss, within [low, high]; see abrun.rl.importance."""

    type: Literal["truncated", "icepop", "sequence_mask"]
    low: NonNegative = 0.0
    high: Positive


class DynamicSampling(Section):
    """Groups of equal rewards, which have no signal, are left out, and more prompts are drawn (DAPO).

    After `max_tries` times the draws that a batch takes without it, such groups fill the batch up.
    """

    max_tries: Count = 10


class OverlongPunishment(Section):
    """A penalty on the reward that grows over the last `buffer` tokens before max_new_tokens.

    See abrun.rl.advantages.overlong_penalties.
    """

    buffer: Count  # tokens; at most rollout.max_new_tokens
    factor: Positive = 1.0  # the penalty at max_new_tokens


class PolicyGradientSettings(Section):
    """What GRPO's family and PPO share; see abrun.rl for the formulas."""

    prompts_per_step: Count = 32
    group_size: Count = 8  # completions a prompt
    # Draw again until there are so many completions; all that were drawn are trained on, but for a
    # dynamic_sampling, which chooses so many. Losses are divided by the count that a step has got.
    documents_per_step: Count | None = None
    epochs_per_step: Count = 1  # passes over the completions of a step
    minibatches_per_step: Count = 1  # optimizer steps in each of them
    normalize_advantages: bool = True
    # Of the policy's probabilities to those of old, which a pass of its own finds before the first update; or
    # on_policy: to themselves, so 1 with its gradient, without that pass where nothing else needs it. auto:
    # on_policy where a step has one update.
    ratio: Literal["auto", "old", "on_policy"] = "auto"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    importance_correction: ImportanceCorrection | None = None
    loss_reduction: LossReduction = "token_mean"
    # Completions that were cut off at max_new_tokens have a reward, and no tokens that are trained on or
    # counted (DAPO, arXiv:2503.14476, section 3.4).
    overlong_filtering: bool = False
    # DAPO's soft overlong punishment (same section): lowers the rewards of long completions
    overlong_punishment: OverlongPunishment | None = None
    # Divides the gradient in the place of the reduction's own count, and leaves the reported loss alone: a
    # number, or the documents of the optimizer step, or their square. With value_backbone: shared the value
    # loss's gradient too. See abrun.rl.losses.gradient_factor.
    grad_divisor: GradDivisor | None = None
    kl_coefficient: NonNegative = 0.0
    # reward: a sequence's, off its reward. reward_to_go: off each token's reward, its own and all later ones.
    kl_in: Literal["loss", "reward", "reward_to_go"] = "loss"
    # In the loss: k2 and k3+ descend KL(policy || reference), k3 KL(reference || policy), k1 nothing
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    entropy_coefficient: NonNegative = 0.0
    metrics: Literal["none", "basic", "full"] = "basic"

    @property
    def draws_again(self) -> bool:
        """Whether a step may draw prompts more than once."""
        return self.documents_per_step is not None or self.chooses_groups

    @property
    def chooses_groups(self) -> bool:
        """Whether a step trains on some groups of what it draws."""
        return False

    @property
    def num_updates(self) -> int:
        """Return the number of optimizer steps that a step takes on its completions."""
        return self.epochs_per_step * self.minibatches_per_step

    @property
    def on_policy(self) -> bool:
        """Whether log-probs of the training pass are also those of the start of the step."""
        return self.ratio == "on_policy" or (self.ratio == "auto" and self.num_updates == 1)

    @property
    def batch_size(self) -> int:
        """Prompts of a global batch."""
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
    # std of the group's rewards, of the global batch's, or of those of the group's other completions
    normalize_over: Literal["group", "batch", "leave_one_out"] = "group"
    loss: Literal["clipped", "gspo", "reinforce", "cispo"] = "clipped"

    @property
    def chooses_groups(self) -> bool:
        return self.dynamic_sampling is not None


class Ppo(PolicyGradientSettings):
    """Proximal policy optimisation with a value model and GAE (arXiv:1707.06347, arXiv:1506.02438).

    The value model is updated before the policy, minibatch by minibatch, in as many epochs. With
    `value_backbone: shared` it is a head on the policy's hidden states: the head has `value_optimizer`, and
    the gradient of its loss, times `value_coefficient`, adds to the policy's in the backbone.
    """

    type: Literal["ppo"]
    group_size: Count = 1
    loss: Literal["clipped"] = "clipped"
    kl_in: Literal["loss", "reward"] = "loss"  # reward: of each token, as it is drawn
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    value_backbone: Literal["own", "shared"] = "own"
    value_coefficient: NonNegative | None = None  # with a shared backbone, where None is 0.1
    value_head_dtype: Literal["float32", "bfloat16"] = "float32"
    value_clip_range: Positive | None = 0.5  # None: the plain squared error
    value_optimizer: Optimizer = Optimizer(learning_rate=1e-5)
    # A token's value is the one computed before it. False: after it, so that the baseline knows the token.
    right_shift: bool = True


class Sft(Section):
    """Supervised fine-tuning on the task's reference completions."""

    type: Literal["sft"]
    batch_size: Count = 32


class Dpo(Section):
    """Direct preference optimisation (arXiv:2305.18290) on the task's pairs of completions."""

    type: Literal["dpo"]
    batch_size: Count = 32  # pairs
    beta: Positive = 0.1
    logprob_reduction: Literal["sum", "mean"] = "sum"  # of a completion's tokens
    sft_coefficient: NonNegative = 0.0  # adds minus the mean log-prob of the chosen tokens
