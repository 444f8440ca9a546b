"""The names that other trainers give to abrun's metrics.

Only metrics of the same definition and unit are here: a probability difference is not
`train/token_mult_prob_error`, and gigabytes are not bytes. Read from the sources of TRL f2cd577 (July 2026),
verl b178a3c (January 2026), NeMo-RL 7ea279a and SkyRL a956457 (August 2026).
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from abrun.errors import ComparisonError
from abrun.logs.log import listed, printable
from abrun.series import Series

FRAMEWORKS: dict[str, dict[str, str]] = {  # ours -> theirs
    "trl": {  # GRPO, RLOO and DPO, as transformers logs them: train/<name>. Others are named like ours
        "train/lr": "train/learning_rate",
        "train/kl_penalty": "train/kl",
        "train/clip_fraction": "train/clip_ratio/region_mean",
        "train/sampling_importance_ratio": "train/sampling/importance_sampling_ratio/mean",
        "train/mean_gen_tokens_per_sample": "train/completions/mean_length",
        "train/truncation_rate": "train/completions/clipped_ratio",
        "train/rewards/margin": "train/rewards/margins",
        "train/rewards/accuracy": "train/rewards/accuracies",
        "train/logprobs/chosen": "train/logps/chosen",
        "train/logprobs/rejected": "train/logps/rejected",
        "timing/train/total_step_time_s": "train/step_time",
    },
    "verl": {
        "train/reward": "critic/score/mean",  # before the KL penalty, which critic/rewards/mean holds
        "train/loss": "actor/pg_loss",
        "train/grad_norm": "actor/grad_norm",
        "train/lr": "actor/lr",
        "train/entropy": "actor/entropy",
        "train/kl_penalty": "actor/kl_loss",
        "train/clip_fraction": "actor/pg_clipfrac",
        "train/sampling_importance_ratio": "rollout_corr/rollout_is_mean",
        "train/gen_kl_error": "rollout_corr/k3_kl",
        "train/advantages/mean": "critic/advantages/mean",
        "train/advantages/min": "critic/advantages/min",
        "train/advantages/max": "critic/advantages/max",
        "train/mean_gen_tokens_per_sample": "response_length/mean",
        "train/truncation_rate": "response_length/clip_ratio",
        "train/mean_prompt_length": "prompt_length/mean",
        "train/critic/loss": "critic/vf_loss",
        "train/critic/grad_norm": "critic/grad_norm",
        "train/critic/values_mean": "critic/values/mean",
        "train/critic/returns_mean": "critic/returns/mean",
        "train/critic/explained_var": "critic/vf_explained_var",
        "train/critic/clip_fraction": "critic/vf_clipfrac",
        "performance/tokens_per_sec_per_gpu": "perf/throughput",
        "timing/train/total_step_time_s": "timing_s/step",
        "timing/train/generation_s": "timing_s/gen",
        "timing/train/reward_s": "timing_s/reward",
        "timing/train/logprobs_s": "timing_s/old_log_prob",
        "timing/train/reference_logprobs_s": "timing_s/ref",
        "timing/train/policy_training_s": "timing_s/update_actor",
        "timing/train/weight_sync_s": "timing_s/update_weights",
        "timing/train/checkpointing_s": "timing_s/save_checkpoint",
    },
    "nemo-rl": {  # whose train/ names are ours
        "timing/train/total_step_time_s": "timing/train/total_step_time",
        "timing/train/generation_s": "timing/train/generation",
        "timing/train/reward_s": "timing/train/reward_calculation",
        "timing/train/policy_training_s": "timing/train/policy_training",
        "timing/train/weight_sync_s": "timing/train/prepare_for_generation/transfer_and_update_weights",
        "timing/train/checkpointing_s": "timing/train/checkpointing",
    },
    "skyrl": {
        "train/reward": "reward/avg_raw_reward",
        "train/loss": "policy/final_loss",
        "train/grad_norm": "policy/grad_norm",
        "train/lr": "policy/policy_lr",
        "train/entropy": "policy/policy_entropy",
        "train/kl_penalty": "policy/policy_kl",
        "train/clip_fraction": "policy/loss_metrics/clip_ratio",
        "train/advantages/mean": "loss/avg_raw_advantages",
        "train/mean_gen_tokens_per_sample": "generate/avg_num_tokens",
        "train/critic/loss": "critic/critic_loss",
        "train/critic/grad_norm": "critic/grad_norm",
        "train/critic/values_mean": "critic/values_mean",
        "train/critic/clip_fraction": "critic/values_clipfrac",
        "timing/train/total_step_time_s": "timing/step",
        "timing/train/generation_s": "timing/generate",
        "timing/train/policy_training_s": "timing/policy_train",
        "timing/train/weight_sync_s": "timing/sync_weights",
        "timing/train/checkpointing_s": "timing/save_checkpoints",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Aliases:
    """Renamings: ours -> theirs."""

    explicit: Mapping[str, str]  # given by hand: some run has to have each
    presets: Mapping[str, str]


def parse(texts: Iterable[str]) -> Aliases:
    """Aliases of `--alias` options: names of presets and OURS=THEIRS. Raises ComparisonError."""
    explicit: dict[str, str] = {}
    presets: dict[str, str] = {}
    for text in texts:
        ours, equals, theirs = text.partition("=")
        if not equals and text in FRAMEWORKS:
            presets.update(FRAMEWORKS[text])
        elif ours and theirs:
            if explicit.get(ours, theirs) != theirs:
                raise ComparisonError(f"--alias: got {ours!r} twice; allowed: one name for each; drop one")
            explicit[ours] = theirs
        else:
            raise ComparisonError(
                f"--alias: got '{printable(text)}'; allowed: {', '.join(FRAMEWORKS)}, or OURS=THEIRS, "
                "such as train/reward=rewards/mean"
            )
    return Aliases(explicit=explicit, presets=presets)


def apply(metrics: Mapping[str, Series], aliases: Mapping[str, str]) -> dict[str, Series]:
    """Metrics with theirs renamed to ours; an alias whose metric is not there is left aside.

    One metric may get several of our names. A metric that already has the name gives way.
    """
    named = {ours: metrics[theirs] for ours, theirs in aliases.items() if theirs in metrics}
    renamed = {theirs for theirs in aliases.values() if theirs in metrics}
    return {**{name: one for name, one in metrics.items() if name not in renamed}, **named}


def apply_to_all(runs: Sequence[Mapping[str, Series]], aliases: Aliases) -> list[dict[str, Series]]:
    """The metrics of every run with theirs renamed to ours, alike in all runs.

    A preset does not replace a metric that some run recorded under our name. Raises ComparisonError for a
    name given by hand that no run has.
    """
    known = {name for metrics in runs for name in metrics}
    for ours, theirs in aliases.explicit.items():
        if known and theirs not in known:
            close = difflib.get_close_matches(theirs, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"recorded are {listed(sorted(known), 8)}"
            raise ComparisonError(
                f"--alias: got {ours}={printable(theirs)}, a metric that no run recorded; {hint}"
            )
    presets = {ours: theirs for ours, theirs in aliases.presets.items() if ours not in known}
    return [apply(metrics, {**presets, **aliases.explicit}) for metrics in runs]
