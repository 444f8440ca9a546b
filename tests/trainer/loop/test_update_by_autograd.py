"""The gradients of a policy's updates are those of its loss as it is defined, however the step is cut.

The oracle is transformers' own forward pass in float64, one sequence after the other, with losses in plain
loops: it shares no code with the trainer.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.recipe.algorithms import Grpo
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.loop.grpo import GrpoAlgorithm
from abrun.trainer.loop.setup import make_setup
from abrun.trainer.models.weights import load_network
from abrun.trainer.rl.batch import RolloutBatch, collate, scatter_to_completions
from abrun.trainer.seeds import derive_seed
from tests.spawn import run_ranks
from tests.written_runs import run_config

Gradient = dict[str, Tensor]
GROUP_SIZE, NUM_GROUPS, LONGEST, STEP_SIZE, TEMPERATURE = 2, 4, 12, 0.03, 1.7
CUTS = {
    "whole": (),
    "microbatches": ("policy.micro_batch_size=3",),
    "packed": ("policy.packing=true", "policy.micro_batch_tokens=40"),
    "one pass": ("policy.logprobs={impl: chunked, one_pass: true}", "policy.micro_batch_size=3"),
    "one pass packed": (
        "policy.logprobs={impl: chunked, one_pass: true}",
        "policy.packing=true",
        "policy.micro_batch_tokens=40",
    ),
}
SETTINGS = (
    "steps=9",
    f"algorithm.prompts_per_step={NUM_GROUPS}",
    f"algorithm.group_size={GROUP_SIZE}",
    "algorithm.clip_low=0.05",
    "algorithm.clip_high=0.1",
    "algorithm.entropy_coefficient=0.05",
    "algorithm.kl_coefficient=0.2",
    f"rollout.max_new_tokens={LONGEST}",
    f"rollout.temperature={TEMPERATURE}",
)


@dataclass(frozen=True)
class Case:
    reduction: str
    divisor: Any
    epochs: int
    minibatches: int
    cut: str

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            *SETTINGS,
            *CUTS[self.cut],
            f"algorithm.loss_reduction={self.reduction}",
            f"algorithm.grad_divisor={'null' if self.divisor is None else self.divisor}",
            f"algorithm.epochs_per_step={self.epochs}",
            f"algorithm.minibatches_per_step={self.minibatches}",
        )


def a_batch() -> RolloutBatch:
    """Groups of two completions of different lengths, whose rewards differ."""
    draw = torch.Generator().manual_seed(5)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(3, 90, (length,), generator=draw).tolist()

    prompts = [prompt for prompt in (tokens(2, 9) for _ in range(NUM_GROUPS)) for _ in range(GROUP_SIZE)]
    completions = [tokens(1, LONGEST + 1) for _ in prompts]
    sequences = collate(prompts, completions, pad_id=0)
    return sequences.with_fields(
        RolloutBatch,
        inference_logprobs=scatter_to_completions(
            [[-4.0] * len(one) for one in completions], sequences.token_mask
        ),
        rewards=torch.rand(len(prompts), generator=draw),
    )


# --- the trainer ---


def updates_of_trainer(rank: int, world_size: int, cases: Sequence[Case]) -> list[tuple[Any, Any]]:
    """Each case's whole gradients, update by update, and its metrics."""
    return [_one_case(case, world_size) for case in cases]


def _one_case(case: Case, world_size: int) -> tuple[list[Gradient], dict[str, float]]:
    config = run_config(*case.overrides, *([f"cluster.cpu_ranks={world_size}"] * (world_size > 1)))
    setup = make_setup(config, 0, None, torch.device("cpu"))
    assert isinstance(config.algorithm, Grpo) and isinstance(setup.policy, DtensorBackend)
    module, found = setup.policy.module, []

    def step(learning_rate: float) -> float:
        """A step of fixed length down the gradient, in the place of AdamW's."""
        grads: Any = {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append({name.removeprefix("network."): grad.full_tensor() for name, grad in grads.items()})
        length = float(torch.stack([grad.norm() for grad in found[-1].values()]).norm())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter -= STEP_SIZE / length * grads[name]
        module.zero_grad()
        return length

    setup.policy.optimizer_step = step
    batch = a_batch()
    metrics = GrpoAlgorithm(setup, config.algorithm).update(batch[setup.ranks.data_slice(len(batch))], 1)
    return found, metrics


# --- the oracle ---


@functools.cache
def updates_by_definition(case: Case) -> tuple[list[Gradient], float]:
    """The gradients, and the mean of the updates' losses."""
    config, batch = run_config(*case.overrides), a_batch()
    network = load_network(config.model, weights=None, seed=derive_seed(0, "init")).double()
    advantages = []
    for start in range(0, len(batch), GROUP_SIZE):
        rewards = batch.rewards[start : start + GROUP_SIZE].double()
        advantages += [float(each) / (float(rewards.std()) + 1e-6) for each in rewards - rewards.mean()]
    with torch.no_grad():
        old = [_judged(network, batch, row)[0] for row in range(len(batch))]
    groups = range(len(batch) // GROUP_SIZE)
    parts = [[g for g in groups if g % case.minibatches == k] for k in range(case.minibatches)]
    found, losses = [], []
    for part in parts * case.epochs:
        rows = [g * GROUP_SIZE + i for g in part for i in range(GROUP_SIZE)]
        per_row = [_token_losses(network, batch, row, old[row], advantages[row]) for row in rows]
        num_tokens = sum(map(len, per_row))
        total: Any
        if case.reduction == "token_mean":
            total, divisor = sum(each.sum() for each in per_row), num_tokens
        elif case.reduction == "sequence_mean":
            total, divisor = sum(each.mean() for each in per_row), len(rows)
        elif case.reduction == "document_sum":
            total, divisor = sum(each.sum() for each in per_row), len(rows)
        else:
            total, divisor = sum(each.sum() for each in per_row), len(rows) * LONGEST
        losses.append(float(total.detach()) / divisor)
        rule: dict[Any, float] = {None: divisor, "documents": len(rows), "documents_squared": len(rows) ** 2}
        names, parameters = zip(*network.named_parameters(), strict=True)
        grads = torch.autograd.grad(total / rule.get(case.divisor, case.divisor), parameters)
        found.append(dict(zip(names, grads, strict=True)))
        length = torch.stack([grad.norm() for grad in grads]).norm()
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= STEP_SIZE / length * grad
    return found, sum(losses) / len(losses)


def _judged(network: Any, batch: RolloutBatch, row: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a sequence's completion tokens, under softmax(z / temperature)."""
    places = batch.token_mask[row].nonzero()[:, 0].tolist()
    logits = network(batch.token_ids[row : row + 1, : places[-1] + 1]).logits[0] / TEMPERATURE
    logprobs = [logits[t - 1].log_softmax(0) for t in places]
    chosen = [each[batch.token_ids[row, t]] for each, t in zip(logprobs, places, strict=True)]
    return torch.stack(chosen), torch.stack([-(each.exp() * each).sum() for each in logprobs])


def _token_losses(network: Any, batch: RolloutBatch, row: int, old: Tensor, advantage: float) -> Tensor:
    losses = []
    for logprob, entropy, before in zip(*_judged(network, batch, row), old, strict=True):
        ratio = (logprob - before).exp()
        bounded = ratio.clamp(0.95, 1.1)
        kl = (before - logprob).exp() - 1 - (before - logprob)  # k3: the reference is the initial policy
        losses.append(torch.maximum(-advantage * ratio, -advantage * bounded) - 0.05 * entropy + 0.2 * kl)
    return torch.stack(losses)


# --- both ---


def assert_agree(case: Case, found: list[Gradient], metrics: dict[str, float]) -> None:
    expected, loss = updates_by_definition(case)
    assert len(found) == len(expected) == case.epochs * case.minibatches
    for update, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        size = float(torch.stack([grad.norm() for grad in theirs.values()]).norm())
        off = float(torch.stack([(ours[name] - grad).norm() for name, grad in theirs.items()]).norm())
        assert off < 1e-3 * size, (case, update, off / size)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6), case


SOME = [  # each reduction, divisor, number of minibatches and cut
    Case("token_mean", None, epochs=1, minibatches=1, cut="whole"),
    Case("sequence_mean", 7.5, epochs=2, minibatches=2, cut="microbatches"),
    Case("sequence_mean", "documents", epochs=1, minibatches=1, cut="packed"),
    Case("sequence_sum_constant", "documents", epochs=2, minibatches=2, cut="one pass packed"),
    Case("document_sum", "documents_squared", epochs=2, minibatches=2, cut="one pass"),
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_one_rank(case: Case, group: None) -> None:
    assert_agree(case, *_one_case(case, 1))


def test_two_ranks() -> None:
    cases = SOME[3:4]
    for case, (found, metrics) in zip(cases, run_ranks(updates_of_trainer, 2, cases)[0], strict=True):
        assert_agree(case, found, metrics)
