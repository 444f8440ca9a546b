"""The settings of a dump: how its run is configured to compute the loss of a micro-batch."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_constant", "document_sum", "sum"]
Correction = Literal[
    "none", "truncated", "icepop", "sequence_mask", "sequence_product", "sequence_product_mask"
]
# Names by which the field knows how token losses become one number
AGGREGATIONS: dict[Aggregation, str] = {
    "token_mean": "DAPO's mean over tokens",
    "sequence_mean": "GRPO's mean over sequences of their token means",
    "sequence_sum_constant": "Dr. GRPO's sum over tokens divided by a constant",
    "document_sum": "the mean over sequences of their token sums",
    "sum": "the sum over tokens",
}


class Settings(BaseModel):
    """Settings of a dump; docs/how-to/audit-a-step.md says what each means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # rewards and advantages
    reward_weights: tuple[float, ...] | None = None  # of the columns of reward_parts; None: 1 each
    estimator: Literal["group", "other"] = "group"  # other: advantages are taken as they are
    group_size: Annotated[int, Field(ge=1)] | None = None  # None: every group of the dump is complete
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    advantage_std: Literal["group", "leave_one_out", "batch", "none"] = "group"
    std_epsilon: AtLeastZero = 1e-6
    std_ddof: Literal[0, 1] = 1

    # per-token loss
    policy_loss: Literal["clipped", "cispo", "reinforce", "sft", "dpo"] = "clipped"
    ratio: Literal["token", "sequence", "on_policy"] = "token"  # sequence: GSPO; on_policy: 1
    log_ratio_limit: Positive | None = None
    clip_low: AtLeastZero | None = 0.2  # the ratio is at least 1 - clip_low; None: no bound
    clip_high: AtLeastZero | None = 0.2  # and at most 1 + clip_high
    dual_clip: Positive | None = None
    temperature: Positive = 1.0
    kl_coefficient: AtLeastZero = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_limited: bool = False  # r - c to +-20, its estimate to +-10
    kl_weighted: bool = False  # by the ratio
    importance_correction: Correction = "none"
    importance_low: AtLeastZero = 0.0
    importance_high: Positive = 1e30
    entropy_coefficient: AtLeastZero = 0.0
    auxiliary_coefficient: AtLeastZero = 0.0  # of auxiliary_loss, such as a router's balance

    # from tokens to a number. None: the micro-batch's own count
    aggregation: Aggregation = "token_mean"
    num_tokens: Positive | None = None
    num_sequences: Positive | None = None
    max_completion_tokens: Positive | None = None
    loss_scale: Positive = 1.0
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1

    # DPO
    beta: Positive = 0.1
    logprob_reduction: Literal["sum", "mean"] = "sum"
    label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    compute_dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None  # None: the tensors'


# A preset has all settings that tell algorithms apart, because `--as` replaces those of another one
GRPO = {"policy_loss": "clipped", "ratio": "token", "estimator": "group", "baseline": "group_mean"}
GRPO |= {"advantage_std": "group", "aggregation": "sequence_mean"}
REINFORCE = GRPO | {"policy_loss": "reinforce", "advantage_std": "none"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "dr_grpo": GRPO | {"advantage_std": "none", "aggregation": "sequence_sum_constant"},
    "dapo": GRPO | {"aggregation": "token_mean"},
    "gspo": GRPO | {"ratio": "sequence"},
    "cispo": GRPO | {"policy_loss": "cispo", "aggregation": "token_mean"},
    "rloo": REINFORCE | {"baseline": "leave_one_out"},
    "reinforce": REINFORCE | {"baseline": "none", "aggregation": "token_mean"},
    "ppo": GRPO | {"estimator": "other", "aggregation": "token_mean"},
    "sft": {"policy_loss": "sft", "aggregation": "token_mean"},
    "dpo": {"policy_loss": "dpo"},
}
