"""The step that memory-profile measures and predicts: its microbatches, and what they are made of."""

from abrun.recipe.algorithms import Dpo, Grpo
from abrun.recipe.run import OwnRunConfig


def of_size(config: OwnRunConfig, num_sequences: int) -> OwnRunConfig:
    """With microbatches of so many sequences; a random batch has no groups: rewards are then advantages."""
    sizes = {"micro_batch_size": num_sequences, "micro_batch_tokens": None}
    policy = config.policy.model_copy(update=sizes if is_cut(config) else {})
    config = config.model_copy(update={"policy": policy})
    if not isinstance(config.algorithm, Grpo):
        return config
    alone = {
        "group_size": 1,
        "advantage_baseline": "none",
        "normalize_advantages": False,
        "normalize_over": "group",
    }
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=alone)})


def is_cut(config: OwnRunConfig) -> bool:
    """Whether an update has several microbatches: two are measured, as the second one's activations meet the
    first one's gradients."""
    return bool(config.policy.micro_batch_size or config.policy.micro_batch_tokens)


def own_sequences(config: OwnRunConfig) -> int:
    """Of a rank's microbatch as the run itself has it; one that fills a budget of tokens is one long one."""
    policy, algorithm = config.policy, config.algorithm
    pair = 2 if isinstance(algorithm, Dpo) else 1
    if policy.micro_batch_tokens or policy.micro_batch_size:
        return policy.micro_batch_size or pair
    sequences = algorithm.batch_size * getattr(algorithm, "group_size", pair)
    return max(sequences // config.data_parallel // getattr(algorithm, "minibatches_per_step", 1), pair)


def num_rows(config: OwnRunConfig, num_sequences: int) -> int:
    """Sequences of a rank's step with microbatches of `num_sequences`."""
    return num_sequences * (1 + is_cut(config)) * getattr(config.algorithm, "minibatches_per_step", 1)
