"""Sizes of a run's micro-batches, and of the step that stands for them in a memory measurement."""

import math

from abrun.recipe.algorithms import Dpo, Grpo
from abrun.recipe.run import OwnRunConfig


def set_microbatch_size(config: OwnRunConfig, num_sequences: int) -> OwnRunConfig:
    """Return `config` with micro-batches of `num_sequences` and without groups, as random batches have none.

    Rewards are then used as advantages.
    """
    micro_batch_settings = {"micro_batch_size": num_sequences, "micro_batch_tokens": None}
    policy = config.policy.model_copy(update=micro_batch_settings if has_microbatches(config) else {})
    config = config.model_copy(update={"policy": policy})
    if not isinstance(config.algorithm, Grpo):
        return config
    ungrouped = {
        "group_size": 1,
        "advantage_baseline": "none",
        "normalize_advantages": False,
        "normalize_over": "group",
    }
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=ungrouped)})


def has_microbatches(config: OwnRunConfig) -> bool:
    """Return True if an update accumulates gradients over micro-batches.

    A cell then has two, because the peak is in the second: gradients exist while activations are held.
    """
    return bool(config.policy.micro_batch_size or config.policy.micro_batch_tokens)


def microbatch_size(config: OwnRunConfig) -> int:
    """Return the sequences per micro-batch and rank in the run; 1 (a pair for DPO) with a token budget."""
    policy, algorithm = config.policy, config.algorithm
    sequences_per_pair = 2 if isinstance(algorithm, Dpo) else 1
    if has_microbatches(config):
        return policy.micro_batch_size or sequences_per_pair
    sequences = algorithm.batch_size * getattr(algorithm, "group_size", sequences_per_pair)
    minibatches = getattr(algorithm, "minibatches_per_step", 1)
    return max(sequences // config.data_parallel // minibatches, sequences_per_pair)


def largest_microbatch(
    config: OwnRunConfig, longest_sequence: int, max_positions: int | None
) -> tuple[int, int]:
    """Return the number and length in tokens of the sequences in a rank's largest expected micro-batch.

    A token budget is assumed to be filled by few sequences, up to the model's context length.
    """
    num_sequences, budget = microbatch_size(config), config.policy.micro_batch_tokens
    if not budget:
        return num_sequences, longest_sequence
    # A sequence longer than the budget gets its own micro-batch
    length = max(budget // num_sequences, longest_sequence)
    num_splits = math.ceil(length / (max_positions or length))
    return num_sequences * num_splits, math.ceil(length / num_splits)


def num_rows(config: OwnRunConfig, num_sequences: int) -> int:
    """Return the sequences per step and rank with micro-batches of `num_sequences`."""
    minibatches = getattr(config.algorithm, "minibatches_per_step", 1)
    return num_sequences * (1 + has_microbatches(config)) * minibatches
