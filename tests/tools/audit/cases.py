"""The steps of make_dumps: clean ones, and ones with an injected fault and the first wrong quantity."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16
SHAPE = {"rows": 8, "width": 14, "group": 4, "dtype": FLOAT32, "prompt": 0}
WEIGHTS = {"reward_weights": [1.0, 0.5]}
TRL = {"std_epsilon": 1e-4, **WEIGHTS}
NEMO = {
    "baseline": "leave_one_out",
    "advantage_std": "leave_one_out",
    "kl_limited": True,
    **WEIGHTS,
}
RLHF = {"std_epsilon": 1e-9, "log_ratio_limit": 20.0, **WEIGHTS}
VERL = {"dual_clip": 3.0, "log_ratio_limit": 20.0, **WEIGHTS}


@dataclass(frozen=True, kw_only=True)
class Case:
    framework: str
    algorithm: str
    settings: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    first: str | None = None  # the wrong quantity; None: a clean step
    says: str = ""  # words of its explanation
    faults: Callable[[Any], dict[str, Any]] = lambda batch: {}
    change: Callable[[dict[str, Any]], None] | None = (
        None  # of the dump's tensors, as a fault before the loss
    )
    logits: float | None = None  # the temperature of dumped logits


def clean() -> Iterator[tuple[str, Case]]:
    """Yield sound steps of every framework, algorithm, type and shape."""
    shapes = (
        {},
        {"rows": 12, "width": 9, "group": 3, "prompt": 4},
        {"rows": 6, "width": 40, "group": 2, "dtype": FLOAT64},
        {"rows": 4, "width": 70, "group": 4, "dtype": BFLOAT16},
        {"rows": 16, "width": 25, "group": 8, "prompt": 7},
    )
    kl = {"kl_coefficient": 0.05}
    truncated = {"importance_correction": "truncated", "importance_high": 1.05}
    band = {"importance_low": 0.97, "importance_high": 1.06}
    verl_kl = {"kl_limited": True, "kl_coefficient": 0.02}
    runs: list[tuple[str, str, dict[str, Any]]] = [
        ("trl", "grpo", TRL),
        ("trl", "grpo", TRL | kl | {"gradient_accumulation": 4, "loss_scale": 0.25}),
        ("trl", "dapo", TRL | {"clip_high": 0.28, "num_tokens": 333.0, "data_parallel_size": 2}),
        ("trl", "dr_grpo", TRL | {"max_completion_tokens": 64}),
        ("trl", "gspo", TRL | {"clip_low": 0.03, "clip_high": 0.04}),
        ("trl", "grpo", TRL | truncated),
        ("trl", "grpo", TRL | {"importance_correction": "sequence_product_mask", "importance_high": 1.2}),
        ("trl", "grpo", TRL | kl | {"kl_weighted": True, "auxiliary_coefficient": 0.01}),
        ("trl", "cispo", TRL | {"clip_low": None, "clip_high": 0.1}),
        ("verl", "grpo", VERL | verl_kl),
        ("verl", "dapo", VERL | {"clip_high": 0.28, "num_tokens": 500.0, "loss_scale": 8.0}),
        ("verl", "gspo", {"clip_low": 0.01, "clip_high": 0.02, **WEIGHTS}),
        ("verl", "dapo", VERL | truncated | verl_kl | {"kl_estimator": "k1"}),
        ("verl", "grpo", VERL | {"aggregation": "document_sum", "advantage_std": "none"}),
        ("skyrl", "grpo", {"aggregation": "sequence_mean", "log_ratio_limit": 20.0, **WEIGHTS}),
        ("skyrl", "dr_grpo", VERL | {"max_completion_tokens": 50}),
        ("skyrl", "dapo", VERL | {"dual_clip": 1.1}),
        ("skyrl", "gspo", {"clip_low": 0.02, "clip_high": 0.02, **WEIGHTS}),
        ("skyrl", "grpo", VERL | truncated),
        ("skyrl", "grpo", VERL | {"importance_correction": "sequence_product", "importance_high": 1.1}),
        ("openrlhf", "grpo", RLHF | {"num_sequences": 16.0, "loss_scale": 2.0}),
        ("openrlhf", "dapo", RLHF | {"dual_clip": 1.15}),
        ("openrlhf", "gspo", RLHF | {"log_ratio_limit": None, "clip_low": 0.02, "clip_high": 0.03}),
        ("openrlhf", "dapo", RLHF | band | {"importance_correction": "icepop"}),
        ("openrlhf", "dapo", RLHF | band | {"importance_correction": "sequence_mask"}),
        ("openrlhf", "sft", {"num_tokens": 210.0}),
        ("openrlhf", "dpo", {"beta": 0.2}),
        ("openrlhf", "dpo", {"beta": 0.05, "label_smoothing": 0.1}),
        ("nemo", "grpo", NEMO | {"aggregation": "token_mean"} | kl),
        ("nemo", "grpo", NEMO | {"kl_estimator": "k2"} | kl),
        ("nemo", "gspo", NEMO | {"clip_low": 0.02, "clip_high": 0.02}),
        ("nemo", "cispo", NEMO | {"clip_high": 0.25}),
        ("nemo", "grpo", NEMO | truncated | {"num_sequences": 64.0}),
        ("nemo", "grpo", NEMO | band | {"importance_correction": "icepop"}),
        ("nemo", "grpo", NEMO | band | {"importance_correction": "sequence_mask"}),
        ("nemo", "dapo", NEMO | {"ratio": "on_policy"}),
        ("nemo", "rloo", {"aggregation": "token_mean", **WEIGHTS}),
        ("torchtitan", "dapo", {"advantage_std": "none", "clip_high": 0.28, **WEIGHTS}),
        (
            "torchtitan",
            "dapo",
            {"advantage_std": "none", "log_ratio_limit": 10.0, "num_tokens": 777.0, **WEIGHTS},
        ),
        ("prime", "sft", {"num_tokens": 400.0}),
    ]
    for index, (framework, algorithm, settings) in enumerate(runs):
        for turn in range(2):
            shape = shapes[(index + 2 * turn) % len(shapes)]
            if framework == "skyrl" and shape.get("dtype") is FLOAT64:
                settings = settings | {"compute_dtype": "float32"}  # its exp is float32
            temperature = (None, 0.7)[index % 2] if turn else None
            yield (
                f"clean-{index}-{turn}",
                Case(
                    framework=framework,
                    algorithm=algorithm,
                    settings=settings,
                    shape=shape,
                    logits=temperature,
                ),
            )


def _rolled(rows: Any) -> Any:
    return torch.roll(rows, 1, dims=0)


def _change(**functions: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors |= {name: function(tensors) for name, function in functions.items()}

    return change


def _without_last(mask: Any) -> Any:
    kept = mask.clone()
    for row in kept:
        row[row.nonzero()[-1]] = False
    return kept


PROMPTS = {"prompt": 5, "width": 16}
FAULTS: dict[str, Case] = {
    # Snowflake Arctic-Platform #55: the mask falls back to all real tokens
    "prompts-in-mask": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL,
        shape=PROMPTS,
        first="mask",
        says="prompt tokens",
        faults=lambda batch: {"mask": batch.attention_mask},
    ),
    # the same, where the dump has the mask that was used
    "prompts-in-dumped-mask": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL,
        shape=PROMPTS,
        first="mask",
        says="prompt tokens",
        faults=lambda batch: {"mask": batch.attention_mask},
        change=_change(token_mask=lambda of: of["attention_mask"]),
    ),
    # TRL #976: the end token is not trained
    "end-token-masked": Case(
        framework="trl",
        algorithm="dapo",
        settings=TRL | {"num_tokens": 70.0},
        first="mask",
        says="last token",
        faults=lambda batch: {"mask": _without_last(batch.token_mask)},
    ),
    # verl #1758: the mask is off by one
    "mask-off-by-one": Case(
        framework="openrlhf",
        algorithm="dapo",
        settings=RLHF,
        shape=PROMPTS,
        first="mask",
        says="shifted",
        faults=lambda batch: {"mask": torch.roll(batch.token_mask, -1, dims=1)},
    ),
    # verl #2185: rewards of other rows
    "rewards-of-other-rows": Case(
        framework="verl",
        algorithm="grpo",
        settings=VERL,
        first="rewards",
        says="row before",
        faults=lambda batch: {"rewards": _rolled(batch.rewards)},
        change=_change(rewards=lambda of: _rolled(of["rewards"])),
    ),
    # PipelineRL #54: statistics of the first rollout alone
    "baseline-of-first": Case(
        framework="skyrl",
        algorithm="grpo",
        settings=VERL | {"advantage_std": "none"},
        first="baseline",
        says="first completion",
        change=_change(
            advantages=lambda of: (of["rewards"].view(-1, 4) - of["rewards"].view(-1, 4)[:, :1]).flatten()
        ),
    ),
    # slime #1414: groups shifted over rows
    "misgrouped": Case(
        framework="verl",
        algorithm="grpo",
        settings=VERL | {"advantage_std": "none"},
        first="baseline",
        says="groups are shifted",
        faults=lambda batch: {"index": _rolled(batch.group_ids)},
    ),
    # the field's commonest silent variant: RLOO's baseline under GRPO's name
    "leave-one-out": Case(
        framework="nemo",
        algorithm="grpo",
        settings=NEMO | {"aggregation": "token_mean"},
        first="baseline",
        says="baseline is leave_one_out; the settings say group_mean",
        change=None,
    ),
    # a standard deviation over the batch, not the group
    "std-of-batch": Case(
        framework="trl",
        algorithm="grpo",
        settings=TRL,
        first="advantages",
        says="advantage_std is batch",
        faults=lambda batch: {"scale": "batch"},
    ),
    # fla #1076 and others: the sign
    "advantages-negated": Case(
        framework="openrlhf",
        algorithm="grpo",
        settings=RLHF,
        first="advantages",
        says="wrong sign",
        change=_change(advantages=lambda of: -of["advantages"]),
    ),
    # miles #1829, SkyRL #1315: the ratio is 1 for ever
    "old-from-current": Case(
        framework="trl",
        algorithm="dapo",
        settings=TRL,
        first="ratio",
        says="ratio is on_policy",
        faults=lambda batch: {"old": batch.trainer_logprobs.detach()},
    ),
    # prime-rl #697: a temperature applied to finished log-probs
    "old-temperature": Case(
        framework="openrlhf",
        algorithm="dapo",
        settings=RLHF | {"temperature": 0.7},
        first="ratio",
        says="another temperature",
        faults=lambda batch: {"old": batch.old_logprobs / 0.7},
    ),
    # NeMo-RL #316, TRL #3029: log-probs without the temperature
    "temperature-missing": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL | {"temperature": 0.7},
        first="trainer_logprobs",
        says="not divided by the temperature",
        logits=1.0,
    ),
    # NeMo-RL #3297: the log-prob of another token
    "logprob-of-other-token": Case(
        framework="trl",
        algorithm="dapo",
        settings=TRL | {"temperature": 0.7},
        first="trainer_logprobs",
        says="next token",
        logits=0.7,
        change=_change(token_ids=lambda of: torch.roll(of["token_ids"], 1, dims=1)),
    ),
    # tianshou #433: the dual clip also for positive advantages
    "clip-range-swapped": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL | {"clip_low": 0.1, "clip_high": 0.28},
        first="clip",
        says="swapped",
    ),
    # RLinf #316: the setting never arrives
    "dual-clip-missing": Case(
        framework="skyrl",
        algorithm="dapo",
        settings=VERL | {"dual_clip": 1.1},
        first="clip",
        says="dual_clip is None",
    ),
    # Logic-RL #58: the KL is maximised
    "kl-sign": Case(
        framework="verl",
        algorithm="grpo",
        settings=VERL | {"kl_coefficient": 0.05},
        first="kl",
        says="wrong sign",
        faults=lambda batch: {"kl_factor": -1},
    ),
    "kl-estimator": Case(
        framework="nemo",
        algorithm="dapo",
        settings=NEMO | {"kl_coefficient": 0.05},
        first="kl",
        says="kl_estimator is k2; the settings say k3",
        faults=lambda batch: {"estimator": "k2"},
    ),
    # SkyRL #1340, open-instruct #530
    "kl-without-gradient": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL | {"kl_coefficient": 0.05},
        first="kl",
        says="no gradient",
        faults=lambda batch: {"kl": lambda c, r: (c.detach(), r)},
    ),
    # NeMo-RL #3792: a configured term is 0
    "kl-missing": Case(
        framework="verl",
        algorithm="grpo",
        settings=VERL | {"kl_coefficient": 0.05},
        first="kl",
        says="not in the loss",
        faults=lambda batch: {"kl_factor": 0},
    ),
    # Liger #1082
    "liger-importance-weights": Case(
        framework="trl",
        algorithm="dapo",
        settings=TRL | {"importance_correction": "truncated", "importance_high": 1.1, "kl_coefficient": 0.04},
        first="importance_weights",
        says="not applied",
        faults=lambda batch: {"liger": True, "num_items": batch.token_mask.sum()},
    ),
    # TRL #5814: exp of the sum
    "sequence-weight-sum": Case(
        framework="openrlhf",
        algorithm="dapo",
        settings=RLHF
        | {"importance_low": 0.97, "importance_high": 1.03, "importance_correction": "sequence_mask"},
        first="importance_weights",
        says="importance_correction is icepop",
        faults=lambda batch: {"kind": "icepop"},
    ),
    # slime #179: weights of the current policy
    "weights-missing": Case(
        framework="nemo",
        algorithm="grpo",
        settings=NEMO | {"importance_correction": "truncated", "importance_high": 1.05},
        first="importance_weights",
        says="not applied",
        faults=lambda batch: {"no_weights": True},
    ),
    # Dr. GRPO's normaliser under GRPO's name
    "dr-grpo-normaliser": Case(
        framework="trl",
        algorithm="grpo",
        settings=TRL | {"max_completion_tokens": 64},
        first="normaliser",
        says="Dr. GRPO",
        faults=lambda batch: {"loss_type": "dr_grpo"},
    ),
    # GRPO's under DAPO's
    "sequence-mean": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL,
        first="normaliser",
        says="GRPO's mean over sequences",
        faults=lambda batch: {"aggregation": "sequence_mean"},
    ),
    # Snowflake Arctic-Platform #55: the shim divides by the data-parallel size
    "arctic-dp-divisor": Case(
        framework="verl",
        algorithm="dapo",
        settings=VERL | {"data_parallel_size": 8, "num_tokens": 640.0, "loss_scale": 8.0},
        first="normaliser",
        says="divided by data_parallel_size (8)",
        faults=lambda batch: {"info": {"dp_size": 1.0}},
    ),
    # ms-swift #10117: divided once more by the gradient accumulation
    "divided-by-accumulation": Case(
        framework="openrlhf",
        algorithm="dapo",
        settings=RLHF | {"gradient_accumulation": 4, "num_tokens": 300.0},
        first="normaliser",
        says="divided by gradient_accumulation (4)",
        faults=lambda batch: {"info": {"dp_size": 0.25}},
    ),
    # Liger #1082, item 2, and TRL #5890: the micro-batch's own tokens, over the accumulation
    "liger-own-tokens": Case(
        framework="trl",
        algorithm="dapo",
        settings=TRL | {"gradient_accumulation": 4, "num_tokens": 300.0},
        first="normaliser",
        says="micro-batch's own",
        faults=lambda batch: {"liger": True},
    ),
    # open-instruct #1728: the sum became a mean
    "open-instruct-sum": Case(
        framework="openrlhf",
        algorithm="sft",
        settings={"aggregation": "sum"},
        first="normaliser",
        says="DAPO's mean over tokens; the settings say the sum over tokens",
    ),
    # and its mean of micro-batch means
    "open-instruct-microbatch-mean": Case(
        framework="openrlhf",
        algorithm="sft",
        settings={"num_tokens": 400.0, "gradient_accumulation": 4},
        first="normaliser",
        says="mean of micro-batch means",
        faults=lambda batch: {"info": {"batch_num_tokens": None, "dp_size": None}},
    ),
    # prime-rl #674, SkyRL #462: padding in the denominator
    "padding-in-denominator": Case(
        framework="torchtitan",
        algorithm="dapo",
        settings={"advantage_std": "none", **WEIGHTS},
        first="normaliser",
        says="padding",
        faults=lambda batch: {"tokens": float(batch.token_mask.numel())},
    ),
    # TRL #7009 and #6808: the auxiliary loss of a mixture of experts is dropped
    "auxiliary-loss-dropped": Case(
        framework="trl",
        algorithm="dapo",
        settings=TRL | {"auxiliary_coefficient": 0.01},
        first="loss",
        says="auxiliary loss is not in the loss",
        faults=lambda batch: {"liger": True, "num_items": batch.token_mask.sum()},
    ),
    # CosyVoice #1449: DPO's pairs swapped
    "pairs-swapped": Case(
        framework="openrlhf",
        algorithm="dpo",
        settings={"beta": 0.2},
        first="loss",
        says="swapped",
        faults=lambda batch: {"order": (1, 0)},
    ),
}
# What the run computes in these cases, where it is other settings than the dump's
RUN_SETTINGS = {
    "leave-one-out": {},
    "clip-range-swapped": {"clip_low": 0.28, "clip_high": 0.1},
    "dual-clip-missing": {"dual_clip": 30.0},
    "open-instruct-sum": {"aggregation": "token_mean"},
}
DUMPED_SETTINGS = {"leave-one-out": {"baseline": "group_mean"}}
