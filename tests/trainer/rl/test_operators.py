"""What is computed of a step's tokens loops over neither rows nor positions: its operators are as many."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from abrun.trainer.backends.microbatches import make_packing, shared_prefix_lengths
from abrun.trainer.rl.advantages import (
    generalized_advantages,
    group_advantages,
    reward_to_go_advantages,
    token_rewards,
    value_loss,
    value_loss_metrics,
    value_statistics,
)
from abrun.trainer.rl.batch import collate, scatter_support, scatter_to_completions, sequence_lengths
from abrun.trainer.rl.losses import dpo_loss, importance_weights, kl_penalty, loss_weights
from abrun.trainer.rl.metrics import preference_metrics
from tests.trainer.rl.test_metrics import Tensors, full_parts_of, random_batch
from tests.trainer.rl.test_policy_losses import LOSSES
from tests.trainer.rl.test_values import alone


class Operators(TorchDispatchMode):
    """Counts those that are called under it."""

    num_calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return function(*args, **kwargs or {})


def policy_side(batch: Tensors) -> None:
    mask, rewards = batch["mask"], batch["old"][:, 0]
    kinds: Any = (
        ("group_mean", "group"),
        ("leave_one_out", "leave_one_out"),
        ("leave_one_out", "batch"),
        ("batch_mean", "batch"),
    )
    for baseline, over in kinds:
        group_advantages(rewards, 4, baseline=baseline, normalize=True, normalize_over=over)
    for correction in ("truncated", "icepop", "sequence_mask"):
        importance_weights(batch["old"], batch["inference"], mask, correction=correction, low=0.9, high=1.1)
    for reduction in ("token_mean", "sequence_mean", "sequence_sum_constant", "document_sum"):
        counts = {"num_tokens": 9.0, "num_sequences": 3.0, "max_completion_tokens": 7}
        loss_weights(mask, loss_reduction=reduction, **counts)
    for loss in LOSSES.values():
        loss(batch["trainer"], batch["old"], batch["advantages"], mask)
    kl_penalty(batch["trainer"], batch["reference"], mask, estimator="k3")
    full_parts_of(batch, 9.0, 3.0)
    dpo = dpo_loss(batch["trainer"], batch["reference"], mask, beta=0.1, logprob_reduction="mean")
    preference_metrics(dpo, num_pairs=3.0)


def value_side(batch: Tensors) -> None:
    mask, rewards, values = batch["mask"], batch["old"][:, 0], batch["trainer"]
    of_tokens = token_rewards(rewards, mask, batch["entropy"])
    _, returns = generalized_advantages(of_tokens, values, mask, gamma=0.9, gae_lambda=0.95)
    reward_to_go_advantages(
        rewards, mask, batch["entropy"], baseline="batch_mean", normalize=True, all_reduce_sum=alone
    )
    value_statistics(values, returns, mask, alone)
    found = value_loss(values, batch["old"], returns, mask, clip_range=0.2)
    value_loss_metrics(found, mask, mask.double(), num_tokens=9.0, num_updates=1)


def collation(batch: Tensors) -> None:
    num_rows, length = batch["mask"].shape
    prompts = [[7] * (1 + row % 3) for row in range(num_rows)]
    completions = [[8] * (length - row % 3) for row in range(num_rows)]
    found = collate(prompts, completions, pad_id=0)
    scatter_to_completions([[-1.0] * len(each) for each in completions], found.token_mask)
    sizes = [len(each) for each in completions]
    scatter_support(torch.ones(sum(sizes), 2).byte().split(sizes), found.token_mask)


def packing(batch: Tensors) -> None:
    """Of groups of four that share their prompts."""
    num_rows, length = batch["mask"].shape
    mask = torch.arange(length) >= 2 + torch.arange(num_rows)[:, None] // 4 % 2
    token_ids = torch.arange(num_rows)[:, None] // 4 + torch.arange(length)
    lengths, shared = sequence_lengths(mask).tolist(), shared_prefix_lengths(token_ids, mask).tolist()
    assert sum(map(bool, shared)) == num_rows * 3 // 4
    make_packing(lengths, length, torch.device("cpu"))
    make_packing(lengths, length, torch.device("cpu"), shared=shared)


@pytest.mark.parametrize("computed", [policy_side, value_side, collation, packing])
def test_any_batch_takes_as_many_operators(computed: Callable[[Tensors], None]) -> None:
    """Along positions GAE goes in rounds that double, and so do the rewards to go, which are GAE, too."""
    counts = {}
    for shape in ((8, 65), (40, 65), (8, 128), (8, 1024)):
        batch = random_batch(*shape)
        with Operators() as operators:
            computed(batch)
        counts[shape] = operators.num_calls
    assert counts[8, 65] == counts[40, 65] == counts[8, 128] > 5
    rounds = 2 * (math.log2(1024) - math.log2(128)) if computed is value_side else 0
    assert counts[8, 1024] - counts[8, 128] <= 10 * rounds
