"""Table of the metrics that abrun's trainer records: key, unit, combination over the batch, and roles.

Other trainers name their metrics differently. Their properties are guessed from the names. This module
imports only the standard library.
"""

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

Algorithm = Literal["grpo", "ppo", "sft", "dpo"]
# How the parts of a global batch (tokens, sequences, ranks) are combined into the value of a step
Combination = Literal[
    "token mean",
    "sequence mean",
    "document mean",  # all documents have equal weight, whatever their length
    "pair mean",
    "update mean",  # mean over the optimizer updates within a step
    "sum",
    "maximum",
    "minimum",
    "ratio",  # ratio of two sums over the batch
    "largest rank",  # maximum over ranks: the slowest rank, or the one that needs the most memory
]
Role = Literal[
    "step one",  # compared at the first step, then followed step by step to measure divergence
    "guard",  # limited in every treatment, whatever is claimed
    "saving",  # reported as the treatment's cost
    "curve",  # plotted in the live view, which shows the first curve metric that a run records
    "configured",  # determined by recipe and seed; learning does not change it
]
# Conditions under which a metric is recorded; abrun.experiment.plan checks them
Need = Literal[
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
Better = Literal["higher", "lower"]
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
SIGNAL_SHARE = "train/signal_share"  # share of groups whose rewards differ
OVERLONG_PENALTY = "train/overlong_penalty"  # subtracted from the rewards of long completions
STEP_TIME = "timing/train/total_step_time_s"
# Running totals that some other trainers log: seconds since the start, and samples
ELAPSED_TIME, SAMPLES_SEEN = "timing/elapsed_s", "samples_seen"
NUM_SAMPLES = "train/num_valid_samples"  # of a step
MEMORY = "memory/"
MEMORY_PEAK = "memory"  # name in claims: the peak over all phases
RETRIES, INACTIVE = "memory/allocator_retries", "memory/inactive_bytes"
FINAL_WEIGHTS = "final_weights"  # name in claims: all weights at the end of a run
DIVERGENCE_RATE = "rate of divergence"  # name in claims: of runs, those that failed or ended with NaN
OF_RUNS = (MEMORY_PEAK, FINAL_WEIGHTS, DIVERGENCE_RATE)  # in claims: not recorded step by step
# Counters of peak memory: the allocator's on CUDA; on CPU, which has none, the peak of live tensors.
# Values of different counters are never compared.
PEAK_MEMORY = ("peak_allocated_bytes", "peak_live_tensor_bytes")
PEAK_MEMORY_DEVICES: tuple[Need, ...] = ("GPUs", "CPU cores")  # devices of each counter, in that order

# Functions of the sampler's log-probs: unknown on rollouts that were recorded without them
AGAINST_SAMPLER = (
    TOKEN_MULT_PROB_ERROR,
    "train/gen_kl_error",
    "train/policy_kl_error",
    "train/js_divergence_error",
    "train/sampling_importance_ratio",
    "train/approx_entropy",
    "train/mean_seq_mult_prob_error",
    "train/max_seq_mult_prob_error",
    "train/min_seq_mult_prob_error",
)

# Functions of the rollouts alone: equal in arms that train on the same recorded ones
FIXED_BY_ROLLOUTS = (
    REWARD,
    MEAN_PROMPT_LENGTH,
    MEAN_GEN_TOKENS,
    SIGNAL_SHARE,
    OVERLONG_PENALTY,
    "train/truncation_rate",
    NUM_SAMPLES,
    "train/global_valid_toks",
    "train/dynamic_sampling_kept_share",
    "train/dynamic_sampling_tries",
)

POLICY_GRADIENT: tuple[Algorithm, ...] = ("grpo", "ppo")
ALL: tuple[Algorithm, ...] = ("grpo", "ppo", "sft", "dpo")


@dataclass(frozen=True, slots=True)
class Metric:
    """Row of the table. `<phase>` in a key stands for the name of any phase of a step."""

    key: str
    combined: Combination
    roles: tuple[Role, ...] = ()
    unit: Unit = ""
    algorithms: tuple[Algorithm, ...] = POLICY_GRADIENT
    needs: Need | None = None  # None: recorded by every run of these algorithms
    better: Better | None = None  # direction of an improvement; None: neither


METRICS = (
    # inputs and results of every training step
    Metric(REWARD, "sequence mean", ("step one", "curve"), better="higher"),
    Metric(LOSS, "update mean", ("step one", "curve"), algorithms=ALL, better="lower"),
    Metric(GRAD_NORM, "update mean", ("step one",), algorithms=ALL),
    Metric("train/entropy", "token mean", ("step one",), unit="nats", needs="metrics basic"),
    Metric(LEARNING_RATE, "update mean", ("configured",), algorithms=ALL),
    Metric(NUM_SAMPLES, "sum", ("configured",), unit="sequences", algorithms=ALL),
    Metric("train/global_valid_toks", "sum", unit="tokens", algorithms=ALL),
    # log-probs of the policy and of the rollout engine, and their ratios
    *(
        replace(metric, needs="metrics basic")
        for metric in (
            Metric("train/approx_entropy", "token mean", ("step one",), unit="nats"),
            Metric(TOKEN_MULT_PROB_ERROR, "token mean", ("step one", "guard"), better="lower"),
            Metric(GEN_KL_ERROR, "token mean", ("step one",), unit="nats", better="lower"),
            Metric("train/policy_kl_error", "token mean", unit="nats", better="lower"),
            Metric("train/js_divergence_error", "token mean", unit="nats", better="lower"),
            Metric("train/sampling_importance_ratio", "token mean", ("step one",)),
            Metric("train/probs_ratio", "token mean", ("step one",)),
            Metric("train/probs_ratio_clamped", "token mean"),
            Metric("train/probs_ratio_min", "minimum"),
            Metric("train/probs_ratio_max", "maximum"),
            Metric("train/clip_fraction", "token mean"),
            Metric("train/mean_seq_mult_prob_error", "sequence mean", better="lower"),
            Metric("train/min_seq_mult_prob_error", "minimum", better="lower"),
            Metric("train/max_seq_mult_prob_error", "maximum", better="lower"),
            Metric("train/advantages/mean", "token mean"),
            Metric(ADVANTAGES_MIN, "minimum"),
            Metric(ADVANTAGES_MAX, "maximum"),
        )
    ),
    Metric("train/kl_penalty", "token mean", unit="nats", needs="a KL penalty"),
    Metric(
        "train/kl_penalty_sum_per_sequence", "sequence mean", unit="nats", needs="a KL penalty in the reward"
    ),
    Metric("train/reward_before_kl", "sequence mean", needs="a KL penalty in the reward", better="higher"),
    Metric(OVERLONG_PENALTY, "sequence mean", needs="an overlong punishment", better="lower"),
    # completions
    Metric(MEAN_GEN_TOKENS, "sequence mean", ("step one",), unit="tokens"),
    Metric("train/truncation_rate", "sequence mean", better="lower"),
    Metric(MEAN_PROMPT_LENGTH, "sequence mean", ("configured",), unit="tokens"),
    Metric(SIGNAL_SHARE, "ratio", algorithms=("grpo",)),
    Metric("train/dynamic_sampling_kept_share", "ratio", algorithms=("grpo",), needs="dynamic sampling"),
    Metric("train/dynamic_sampling_tries", "ratio", algorithms=("grpo",), needs="dynamic sampling"),
    # added by `algorithm.metrics: full`
    Metric("train/old_logprobs", "document mean", unit="nats", needs="metrics full"),
    Metric("train/new_logprobs", "document mean", unit="nats", needs="metrics full"),
    Metric("train/ratio_new_old", "document mean", needs="metrics full"),
    Metric("train/kl_new_old", "document mean", unit="nats", needs="metrics full"),
    Metric("train/clipped_ratio_fraction", "document mean", needs="metrics full"),
    Metric("train/advantage", "document mean", needs="metrics full"),
    Metric("train/document_entropy", "document mean", unit="nats", needs="metrics full"),
    Metric("train/ratio_new_old_sum", "sum", needs="metrics full"),
    Metric("train/ratio_new_old_squared_sum", "sum", needs="metrics full"),
    Metric("train/num_tokens", "sum", unit="tokens", needs="metrics full"),
    Metric("train/num_segments", "sum", unit="sequences", needs="metrics full of GSPO"),
    Metric("train/max_advantage", "maximum", needs="metrics full"),
    Metric("train/min_advantage", "minimum", needs="metrics full"),
    # PPO's value model
    Metric("train/critic/loss", "update mean", ("step one",), algorithms=("ppo",), better="lower"),
    Metric("train/critic/grad_norm", "update mean", algorithms=("ppo",)),
    Metric("train/critic/lr", "update mean", ("configured",), algorithms=("ppo",)),
    Metric("train/critic/values_mean", "token mean", algorithms=("ppo",)),
    Metric("train/critic/returns_mean", "token mean", algorithms=("ppo",)),
    Metric("train/critic/explained_var", "ratio", algorithms=("ppo",), better="higher"),
    Metric("train/critic/clip_fraction", "token mean", algorithms=("ppo",)),
    # DPO's pairs
    Metric("train/rewards/chosen", "pair mean", algorithms=("dpo",)),
    Metric("train/rewards/rejected", "pair mean", algorithms=("dpo",)),
    Metric("train/rewards/margin", "pair mean", algorithms=("dpo",), better="higher"),
    Metric("train/rewards/accuracy", "pair mean", algorithms=("dpo",), better="higher"),
    Metric("train/logprobs/chosen", "pair mean", unit="nats", algorithms=("dpo",)),
    Metric("train/logprobs/rejected", "pair mean", unit="nats", algorithms=("dpo",)),
    # routers of a mixture of experts: load and auxiliary loss
    Metric("train/moe/max_load", "maximum", algorithms=ALL, needs="experts"),
    Metric(
        "train/moe/routing_entropy", "token mean", ("step one",), unit="nats", algorithms=ALL, needs="experts"
    ),
    Metric("train/moe/aux_loss", "update mean", algorithms=ALL, needs="experts", better="lower"),
    # held-out prompts
    Metric(
        "validation/accuracy",
        "sequence mean",
        algorithms=ALL,
        needs="validation by answers or pairs",
        better="higher",
    ),
    Metric(
        "validation/loss", "token mean", algorithms=("sft", "dpo"), needs="validation by loss", better="lower"
    ),
    Metric(
        "validation/avg_length",
        "sequence mean",
        unit="tokens",
        algorithms=ALL,
        needs="validation by completions",
    ),
    Metric(
        "validation/truncation_rate",
        "sequence mean",
        algorithms=ALL,
        needs="validation by completions",
        better="lower",
    ),
    # time, throughput and memory of a step
    Metric(STEP_TIME, "largest rank", ("guard", "saving"), unit="s", algorithms=ALL, better="lower"),
    Metric("timing/train/<phase>_s", "largest rank", unit="s", algorithms=ALL, better="lower"),
    Metric(
        "timing/validation/total_s",
        "largest rank",
        unit="s",
        algorithms=ALL,
        needs="validation",
        better="lower",
    ),
    Metric("performance/tokens_per_sec_per_gpu", "ratio", unit="tokens/s", algorithms=ALL, better="higher"),
    Metric("performance/samples_per_sec", "ratio", unit="sequences/s", algorithms=ALL, better="higher"),
    *(
        Metric(
            f"{MEMORY}<phase>/{peak}",
            "largest rank",
            ("guard", "saving"),
            unit="bytes",
            algorithms=ALL,
            needs=needs,
            better="lower",
        )
        for peak, needs in zip(PEAK_MEMORY, PEAK_MEMORY_DEVICES, strict=True)
    ),
    Metric(
        f"{MEMORY}<phase>/peak_reserved_bytes",
        "largest rank",
        unit="bytes",
        algorithms=ALL,
        needs="GPUs",
        better="lower",
    ),
    Metric(RETRIES, "largest rank", algorithms=ALL, needs="GPUs", better="lower"),
    Metric(INACTIVE, "largest rank", unit="bytes", algorithms=ALL, needs="GPUs", better="lower"),
)


def metrics_with_role(role: Role) -> tuple[str, ...]:
    """Return the keys of all metrics with a role, in the order of the table."""
    return tuple(metric.key for metric in METRICS if role in metric.roles)


STEP_ONE = metrics_with_role("step one")
CURVES = metrics_with_role("curve")


@cache
def find_metric(name: str) -> Metric | None:
    """Return the row of a metric name; None if abrun's trainer records no such metric."""
    return next((metric for metric in METRICS if re.fullmatch(_key_pattern(metric.key), name)), None)


def unrecorded_metric_problem(metric: str, algorithm_type: str) -> str | None:
    """Return why a run of abrun's trainer with this algorithm does not record a metric; None if it may.

    The problem is one line, without the name of a field: `got 'train/rewrad', which ...; did you mean
    'train/reward'?`
    """
    definition = find_metric(metric)
    if definition and algorithm_type in definition.algorithms:
        return None
    claimable_keys = [
        row.key for row in METRICS if algorithm_type in row.algorithms and "configured" not in row.roles
    ]
    close_keys = [] if definition else difflib.get_close_matches(metric, claimable_keys, n=1)
    if close_keys:
        hint = f"did you mean {close_keys[0]!r}?"
    else:
        learning_keys = [key for key in claimable_keys if key.startswith(("train/", "validation/"))]
        hint = f"recorded are {', '.join(learning_keys)}, seconds and bytes"
    quoted = metric if len(metric) <= 100 else f"{metric[:97]}..."
    return f"got {quoted!r}, which {algorithm_type} runs do not record; {hint}"


def is_peak_memory(name: str) -> bool:
    """Return whether a metric is a phase's peak memory, by any counter of PEAK_MEMORY."""
    return any(peak_memory_phase(name, counter) is not None for counter in PEAK_MEMORY)


def peak_memory_phase(name: str, counter: str) -> str | None:
    """Return the phase whose peak memory a metric is, by this counter; None for any other metric."""
    match = re.fullmatch(f"{MEMORY}([^/]+)/{counter}", name)
    return match[1] if match else None


# --- properties of any trainer's metrics, guessed from their names ---


def default_transform(name: str) -> Transform:
    """Return the scale on which a metric is compared: rewards and shares as they are, the others as ratios.

    Gradient norms, times, throughput and memory are compared by their logarithm. The multiplicative
    probability error, which is at least 1, is compared by the logarithm of its excess over 1.
    """
    if name.endswith("mult_prob_error"):
        return "log_excess"
    if name.endswith("grad_norm") or name.startswith(("timing/", MEMORY, "performance/")):
        return "log"
    return "identity"


def default_reduction(name: str) -> Literal["mean", "median"]:
    """Return how steps are summarised: by the median if single spikes would dominate a mean."""
    has_spikes = name.endswith(("mult_prob_error", "grad_norm"))
    has_spikes = has_spikes or name.startswith(("timing/", "performance/"))
    return "median" if has_spikes else "mean"


@cache
def metric_unit(name: str) -> str:
    """Return the unit in which files have a metric; empty if it has no unit or an unknown one."""
    definition = find_metric(name)
    if definition:
        return definition.unit
    units_by_suffix = {"_bytes": "bytes", "_s": "s", "entropy": "nats"}
    return next((unit for suffix, unit in units_by_suffix.items() if name.endswith(suffix)), "")


def learning_sign(name: str, *, policy_gradient: bool) -> Literal[1, -1] | None:
    """Return 1 if learning raises a metric, -1 if it lowers it, None if neither or unknown.

    Rewards and accuracies rise. Losses fall, except with a policy gradient, whose loss does not measure
    learning. `policy_gradient`: the run records a reward.
    """
    mean_suffix = r"([/_](mean|avg)(@\d+)?|_before_kl)?"
    rising = r"rewards?|rewards/margin|accuracy|acc|score|success_rate|pass(_rate|@\d+)"
    if is_clock(name):  # TRL's `profiling/Time taken: GRPOTrainer._calculate_rewards` is a time
        return None
    if re.search(rf"(^|[/_])({rising}){mean_suffix}$", name):
        return 1
    is_loss = re.search(r"(^|[/_])(loss|nll|perplexity|ppl)([/_](mean|avg))?$", name)
    return -1 if is_loss and not policy_gradient and not re.search("critic|value|aux", name) else None


@cache
def better_direction(name: str) -> Better | None:
    """Return which direction of a metric is an improvement; None if neither is, or if it is unknown.

    The table says it for abrun's own metrics. Of other names, rewards, scores and throughput are better if
    higher; losses, error rates, seconds and bytes if lower.
    """
    definition = find_metric(name)
    if definition or name == MEMORY_PEAK:
        return definition.better if definition else "lower"
    if learning_direction := learning_sign(name, policy_gradient=False):
        return "higher" if learning_direction > 0 else "lower"
    higher = r"(^|[/_ ])(per[_ ]sec(ond)?([/_ ]per[/_ ]gpu)?|throughput|speed|fps|tps|tgs|mfu|hfu|t?flops"
    higher += r"|utili[sz]ation|exact_match|win_rate|f1|bleu)$"
    if re.search(higher, name, re.IGNORECASE):
        return "higher"
    is_cost = is_clock(name) or metric_unit(name) == "bytes"
    return "lower" if is_cost or re.search(r"(^|[/_ ])(error|error_rate|wer|mae|mse|rmse)$", name) else None


@cache
def is_clock(name: str) -> bool:
    """Return whether a metric measures time or utilization, which never repeat exactly between runs."""
    words = "time|timing|timestamp|runtime|walltime|elapsed|duration|latency|sec(ond)?s?|s|ms|throughput"
    words += "|minutes?|hours?|speed|fps|clock|wallclock|tps|tgs|mfu|hfu|t?flops|utili[sz]ation"
    return bool(re.search(rf"(^|[/_ ])({words}|per[_ ]sec(ond)?)([/_ :]|$)", name, re.IGNORECASE))


@cache
def is_memory(name: str) -> bool:
    """Return whether a metric measures memory."""
    if name == MEMORY_PEAK or metric_unit(name) == "bytes":
        return True
    is_named = re.search(r"(^|[/_. ])(memory|mem|vram|rss)([/_. :(A-Z]|$)", name) is not None
    is_named |= re.search(r"(^|[/_. (])(bytes|[kmgt]i?b)\)?$", name, re.IGNORECASE) is not None
    return is_named and not re.search("reward|score|accuracy|loss", name)


def is_learned(name: str) -> bool:
    """Return True unless a metric measures time or memory."""
    return not (is_clock(name) or is_memory(name))


@cache
def is_counter(name: str) -> bool:
    """Return whether a metric counts steps, epochs or samples, which the configuration decides."""
    counters = "epoch|step|global_step|total_steps|max_steps|num_tokens|num_input_tokens_seen|total_flos"
    counters += "|training_iteration|iterations(_since_restore)?|total_timesteps|episodes_total|n_updates"
    counters += "|(time|env_)?steps_(total|since_restore)"
    return re.fullmatch(rf"(.*/)?({counters})", name) is not None


def _key_pattern(key: str) -> str:
    return re.escape(key).replace("<phase>", "[a-z_]+")
