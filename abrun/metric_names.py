"""Table of all metrics of abrun: name, unit, how parts are combined, and their roles.

Metrics of other trainers have other names; their properties are guessed from prefixes and suffixes. Imports
only the standard library.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Algorithm = Literal["grpo", "ppo", "sft", "dpo"]
Combination = Literal[  # how parts of the global batch are combined into a step's value
    "token mean",
    "sequence mean",
    "document mean",  # all documents have equal weight, whatever their length
    "pair mean",
    "update mean",  # over the optimizer steps of a step
    "sum",
    "maximum",
    "minimum",
    "ratio",  # of two sums
    "largest rank",  # the slowest, or the fullest
]
Role = Literal[
    "step one",  # compared at the first step, and followed for divergence (abrun.verdict)
    "guard",  # has a limit that every treatment must keep
    "saving",  # reported as the treatment's cost
    "curve",  # shown in the live view: the first one that a run has
    "given",  # determined by recipe and seed; learning does not change it
]
Need = Literal[  # settings that a metric needs; see abrun.experiment.plan
    "metrics basic",
    "metrics full",
    "metrics full of GSPO",
    "an overlong punishment",
    "a KL penalty",
    "a KL penalty in the reward",
    "dynamic sampling",
    "validation",
    "validation by completions",
    "validation by loss",
    "validation by answers or pairs",
    "experts",
    "GPUs",
    "CPU cores",
]
Transform = Literal["identity", "log", "log_excess"]
Unit = Literal["", "nats", "s", "bytes", "tokens", "sequences", "tokens/s", "sequences/s"]

REWARD = "train/reward"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LEARNING_RATE = "train/lr"
TOKEN_MULT_PROB_ERROR = "train/token_mult_prob_error"
GEN_KL_ERROR = "train/gen_kl_error"
ADVANTAGES_MIN = "train/advantages/min"
ADVANTAGES_MAX = "train/advantages/max"
MEAN_PROMPT_LENGTH = "train/mean_prompt_length"
MEAN_GEN_TOKENS = "train/mean_gen_tokens_per_sample"
SIGNAL_SHARE = "train/signal_share"  # of groups, those whose rewards differ
OVERLONG_PENALTY = "train/overlong_penalty"  # taken off the reward, by length
STEP_TIME = "timing/train/total_step_time_s"
MEMORY = "memory/"
MEMORY_PEAK = "memory"  # in a claim: the largest peak of any phase
RETRIES, INACTIVE = "memory/allocator_retries", "memory/inactive_bytes"
FINAL_WEIGHTS = "final_weights"  # in a claim: the hash of all weights that a run ended with
# On CUDA the allocator's peak; on CPU, which has no such counter, the peak of live tensors. Never mixed.
PEAK_MEMORY = ("peak_allocated_bytes", "peak_live_tensor_bytes")
PEAK_MEMORY_DEVICES: tuple[Need, ...] = ("GPUs", "CPU cores")  # that have the one and the other

POLICY_GRADIENT: tuple[Algorithm, ...] = ("grpo", "ppo")
ALL_ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "ppo", "sft", "dpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Metric recorded by abrun's trainer; `<phase>` in the key stands for any phase."""

    key: str
    unit: Unit
    combined: Combination
    algorithms: tuple[Algorithm, ...]
    roles: tuple[Role, ...]
    needs: Need | None  # None: every run of those algorithms records it


def _metric(
    key: str,
    combined: Combination,
    *roles: Role,
    unit: Unit = "",
    algorithms: tuple[Algorithm, ...] = POLICY_GRADIENT,
    needs: Need | None = None,
) -> Metric:
    return Metric(key=key, unit=unit, combined=combined, algorithms=algorithms, roles=roles, needs=needs)


METRICS = (
    # what every algorithm trains on
    _metric(REWARD, "sequence mean", "step one", "curve"),
    _metric(LOSS, "update mean", "step one", "curve", algorithms=ALL_ALGORITHMS),
    _metric(GRAD_NORM, "update mean", "step one", algorithms=ALL_ALGORITHMS),
    _metric("train/entropy", "token mean", "step one", unit="nats", needs="metrics basic"),
    _metric(LEARNING_RATE, "update mean", "given", algorithms=ALL_ALGORITHMS),
    _metric("train/num_valid_samples", "sum", "given", unit="sequences", algorithms=ALL_ALGORITHMS),
    _metric("train/global_valid_toks", "sum", unit="tokens", algorithms=ALL_ALGORITHMS),
    # the policy, the rollout engine, and the ratio between them
    _metric("train/approx_entropy", "token mean", "step one", unit="nats", needs="metrics basic"),
    _metric(TOKEN_MULT_PROB_ERROR, "token mean", "step one", "guard", needs="metrics basic"),
    _metric(GEN_KL_ERROR, "token mean", "step one", unit="nats", needs="metrics basic"),
    _metric("train/policy_kl_error", "token mean", unit="nats", needs="metrics basic"),
    _metric("train/js_divergence_error", "token mean", unit="nats", needs="metrics basic"),
    _metric("train/sampling_importance_ratio", "token mean", "step one", needs="metrics basic"),
    _metric("train/probs_ratio", "token mean", "step one", needs="metrics basic"),
    _metric("train/probs_ratio_clamped", "token mean", needs="metrics basic"),
    _metric("train/probs_ratio_min", "minimum", needs="metrics basic"),
    _metric("train/probs_ratio_max", "maximum", needs="metrics basic"),
    _metric("train/clip_fraction", "token mean", needs="metrics basic"),
    _metric("train/mean_seq_mult_prob_error", "sequence mean", needs="metrics basic"),
    _metric("train/min_seq_mult_prob_error", "minimum", needs="metrics basic"),
    _metric("train/max_seq_mult_prob_error", "maximum", needs="metrics basic"),
    _metric("train/advantages/mean", "token mean", needs="metrics basic"),
    _metric(ADVANTAGES_MIN, "minimum", needs="metrics basic"),
    _metric(ADVANTAGES_MAX, "maximum", needs="metrics basic"),
    _metric("train/kl_penalty", "token mean", unit="nats", needs="a KL penalty"),
    _metric(
        "train/kl_penalty_sum_per_sequence", "sequence mean", unit="nats", needs="a KL penalty in the reward"
    ),
    _metric("train/reward_before_kl", "sequence mean", needs="a KL penalty in the reward"),
    _metric(OVERLONG_PENALTY, "sequence mean", needs="an overlong punishment"),
    # completions
    _metric(MEAN_GEN_TOKENS, "sequence mean", "step one", unit="tokens"),
    _metric("train/truncation_rate", "sequence mean"),
    _metric(MEAN_PROMPT_LENGTH, "sequence mean", "given", unit="tokens"),
    _metric(SIGNAL_SHARE, "ratio", algorithms=("grpo",)),  # of groups, those whose rewards differ
    _metric("train/dynamic_sampling_kept_share", "ratio", algorithms=("grpo",), needs="dynamic sampling"),
    _metric("train/dynamic_sampling_tries", "ratio", algorithms=("grpo",), needs="dynamic sampling"),
    # what level full adds
    _metric("train/old_logprobs", "document mean", unit="nats", needs="metrics full"),
    _metric("train/new_logprobs", "document mean", unit="nats", needs="metrics full"),
    _metric("train/ratio_new_old", "document mean", needs="metrics full"),
    _metric("train/kl_new_old", "document mean", unit="nats", needs="metrics full"),
    _metric("train/clipped_ratio_fraction", "document mean", needs="metrics full"),
    _metric("train/advantage", "document mean", needs="metrics full"),
    _metric("train/document_entropy", "document mean", unit="nats", needs="metrics full"),
    _metric("train/ratio_new_old_sum", "sum", needs="metrics full"),
    _metric("train/ratio_new_old_squared_sum", "sum", needs="metrics full"),
    _metric("train/num_tokens", "sum", unit="tokens", needs="metrics full"),
    _metric("train/num_segments", "sum", unit="sequences", needs="metrics full of GSPO"),
    _metric("train/max_advantage", "maximum", needs="metrics full"),
    _metric("train/min_advantage", "minimum", needs="metrics full"),
    # PPO's value model
    _metric("train/critic/loss", "update mean", "step one", algorithms=("ppo",)),
    _metric("train/critic/grad_norm", "update mean", algorithms=("ppo",)),
    _metric("train/critic/lr", "update mean", "given", algorithms=("ppo",)),
    _metric("train/critic/values_mean", "token mean", algorithms=("ppo",)),
    _metric("train/critic/returns_mean", "token mean", algorithms=("ppo",)),
    _metric("train/critic/explained_var", "ratio", algorithms=("ppo",)),
    _metric("train/critic/clip_fraction", "token mean", algorithms=("ppo",)),
    # DPO's pairs
    _metric("train/rewards/chosen", "pair mean", algorithms=("dpo",)),
    _metric("train/rewards/rejected", "pair mean", algorithms=("dpo",)),
    _metric("train/rewards/margin", "pair mean", algorithms=("dpo",)),
    _metric("train/rewards/accuracy", "pair mean", algorithms=("dpo",)),
    _metric("train/logprobs/chosen", "pair mean", unit="nats", algorithms=("dpo",)),
    _metric("train/logprobs/rejected", "pair mean", unit="nats", algorithms=("dpo",)),
    # a mixture of experts: how its routers share the tokens out
    _metric("train/moe/max_load", "maximum", algorithms=ALL_ALGORITHMS, needs="experts"),
    _metric(
        "train/moe/routing_entropy",
        "token mean",
        "step one",
        unit="nats",
        algorithms=ALL_ALGORITHMS,
        needs="experts",
    ),
    _metric("train/moe/aux_loss", "update mean", algorithms=ALL_ALGORITHMS, needs="experts"),
    # held-out prompts
    _metric(
        "validation/accuracy",
        "sequence mean",
        algorithms=ALL_ALGORITHMS,
        needs="validation by answers or pairs",
    ),
    _metric("validation/loss", "token mean", algorithms=("sft", "dpo"), needs="validation by loss"),
    _metric(
        "validation/avg_length",
        "sequence mean",
        unit="tokens",
        algorithms=ALL_ALGORITHMS,
        needs="validation by completions",
    ),
    _metric(
        "validation/truncation_rate",
        "sequence mean",
        algorithms=ALL_ALGORITHMS,
        needs="validation by completions",
    ),
    # what a step costs
    _metric(STEP_TIME, "largest rank", "guard", "saving", unit="s", algorithms=ALL_ALGORITHMS),
    _metric("timing/train/<phase>_s", "largest rank", unit="s", algorithms=ALL_ALGORITHMS),
    _metric(
        "timing/validation/total_s", "largest rank", unit="s", algorithms=ALL_ALGORITHMS, needs="validation"
    ),
    _metric("performance/tokens_per_sec_per_gpu", "ratio", unit="tokens/s", algorithms=ALL_ALGORITHMS),
    _metric("performance/samples_per_sec", "ratio", unit="sequences/s", algorithms=ALL_ALGORITHMS),
    *(
        _metric(
            f"{MEMORY}<phase>/{peak}",
            "largest rank",
            "guard",
            "saving",
            unit="bytes",
            algorithms=ALL_ALGORITHMS,
            needs=needs,
        )
        for peak, needs in zip(PEAK_MEMORY, PEAK_MEMORY_DEVICES, strict=True)
    ),
    _metric(
        f"{MEMORY}<phase>/peak_reserved_bytes",
        "largest rank",
        unit="bytes",
        algorithms=ALL_ALGORITHMS,
        needs="GPUs",
    ),
    _metric(RETRIES, "largest rank", algorithms=ALL_ALGORITHMS, needs="GPUs"),
    _metric(INACTIVE, "largest rank", unit="bytes", algorithms=ALL_ALGORITHMS, needs="GPUs"),
)


def with_role(role: Role) -> tuple[str, ...]:
    """The metrics that have a role, in the order of the table."""
    return tuple(metric.key for metric in METRICS if role in metric.roles)


STEP_ONE = with_role("step one")
CURVES = with_role("curve")


@cache
def find_metric(name: str) -> Metric | None:
    """What a name stands for; None: abrun's trainer records no such metric."""
    return next((metric for metric in METRICS if re.fullmatch(_pattern(metric.key), name)), None)


def unknown_metric(metric: str, algorithm_type: str) -> str | None:
    """Why a claim on a metric cannot be evaluated on runs of abrun's own trainer; None: it can.

    One line without the field's name: `got 'train/rewrad', which ...; did you mean 'train/reward'?`
    """
    found = find_metric(metric)
    if found and algorithm_type in found.algorithms:
        return None
    worth_a_claim = [
        one.key for one in METRICS if algorithm_type in one.algorithms and "given" not in one.roles
    ]
    close = difflib.get_close_matches(metric, worth_a_claim, n=1) if not found else ()
    learned = ", ".join(key for key in worth_a_claim if key.startswith(("train/", "validation/")))
    hint = f"did you mean {close[0]!r}?" if close else f"recorded are {learned}, seconds and bytes"
    shown = metric if len(metric) <= 100 else f"{metric[:97]}..."
    return f"got {shown!r}, which {algorithm_type} runs do not record; {hint}"


def is_peak_memory(name: str) -> bool:
    """Whether it is a phase's peak of one of the counters that guards and savings read."""
    return any(phase_of(name, counter) is not None for counter in PEAK_MEMORY)


def phase_of(name: str, counter: str) -> str | None:
    """The phase whose peak a metric is, by a counter of PEAK_MEMORY; None: it is none."""
    found = re.fullmatch(f"{MEMORY}([^/]+)/{counter}", name)
    return found[1] if found else None


# --- what holds for other trainers' metrics as well ---


def default_transform(name: str) -> Transform:
    """Rewards and shares are compared as they are, scales (norms, seconds, bytes) as ratios."""
    if name.endswith("mult_prob_error"):
        return "log_excess"
    if name.endswith("grad_norm") or name.startswith(("timing/", MEMORY, "performance/")):
        return "log"
    return "identity"


def default_reduction(name: str) -> Literal["mean", "median"]:
    """The median for metrics whose single spikes would carry a mean."""
    spiky = name.endswith(("mult_prob_error", "grad_norm")) or name.startswith(("timing/", "performance/"))
    return "median" if spiky else "mean"


@cache
def unit_of(name: str) -> str:
    """The unit in files; empty where there is none, or none is known."""
    found = find_metric(name)
    if found:
        return found.unit
    by_ending = {"_bytes": "bytes", "_s": "s", "entropy": "nats"}
    return next((unit for ending, unit in by_ending.items() if name.endswith(ending)), "")


def direction(name: str, *, policy_gradient: bool) -> Literal[1, -1] | None:
    """Which way learning moves a metric; None: neither, or it is not known.

    Rewards and accuracies rise. A loss falls where it is what is learned: that of a policy gradient is no
    measure of learning (`policy_gradient`: the run has a reward).
    """
    of_mean = r"([/_](mean|avg)(@\d+)?|_before_kl)?"
    better = r"rewards?|rewards/margin|accuracy|acc|score|success_rate|pass(_rate|@\d+)"
    if is_clock(name):  # TRL's `profiling/Time taken: GRPOTrainer._calculate_rewards`
        return None
    if re.search(rf"(^|[/_])({better}){of_mean}$", name):
        return 1
    falls = re.search(r"(^|[/_])(loss|nll|perplexity|ppl)([/_](mean|avg))?$", name)
    return -1 if falls and not policy_gradient and not re.search("critic|value|aux", name) else None


@cache
def is_clock(name: str) -> bool:
    """Whether it is read off a clock or the machine, of which no two runs get the same numbers."""
    words = "time|timing|timestamp|runtime|walltime|elapsed|duration|latency|seconds?|s|ms|throughput"
    words += "|clock|wallclock|tps|tgs|mfu|hfu|t?flops|utili[sz]ation"
    return bool(re.search(rf"(^|[/_ ])({words}|per[_ ]sec(ond)?)([/_ :]|$)", name, re.IGNORECASE))


def _pattern(key: str) -> str:
    return re.escape(key).replace("<phase>", "[a-z_]+")
