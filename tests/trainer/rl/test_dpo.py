"""The loss of preferences by hand, by finite differences, cut into pairs, and with garbage under the mask."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abrun.recipe.algorithms import Dpo
from abrun.trainer.loop.dpo import PreferenceObjective
from abrun.trainer.rl.batch import Pairs
from abrun.trainer.rl.losses import dpo_loss
from abrun.trainer.rl.metrics import merge

SUM: Any = "sum"
MASK = torch.tensor([[False, True, True], [False, True, False]])


def pairs(num_pairs: int = 4, length: int = 6, seed: int = 5) -> dict[str, Tensor]:
    """Random float64 log-probs of completions of 1 to 5 tokens, after a prompt of one."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2 * num_pairs, length)
    trainer = -torch.rand(shape, generator=draw, dtype=torch.float64) * 3
    lengths = torch.randint(2, length + 1, (2 * num_pairs, 1), generator=draw)
    place = torch.arange(length)
    return {
        "trainer": trainer,
        "reference": trainer + 0.5 * torch.randn(shape, generator=draw, dtype=torch.float64),
        "mask": (place > 0) & (place < lengths),
    }


def objective_of(mask: Tensor, **settings: Any) -> PreferenceObjective:
    """Of a global batch that is these rows."""
    return PreferenceObjective(
        settings=Dpo(type="dpo", **settings),
        num_pairs=len(mask) / 2,
        num_tokens=float(mask.sum()),
        num_chosen_tokens=float(mask[::2].sum()),
    )


def batch_of(tensors: dict[str, Tensor]) -> Pairs:
    return Pairs(
        token_ids=torch.zeros_like(tensors["mask"], dtype=torch.int64),
        token_mask=tensors["mask"],
        reference_logprobs=tensors["reference"],
        rows_per_sample=2,
    )


@pytest.mark.parametrize(("reduction", "chosen", "rejected"), [("sum", 0.75, -0.5), ("mean", 0.375, -0.5)])
def test_one_pair_by_hand(reduction: Any, chosen: float, rejected: float) -> None:
    """Two chosen tokens, one rejected: log-ratios 1 and 0.5, and -1; beta 0.5."""
    for garbage in (-9.0, math.nan, math.inf):
        trainer = torch.tensor([[garbage, -1.0, -2.0], [garbage, -4.0, garbage]], requires_grad=True)
        reference = torch.tensor([[garbage, -2.0, -2.5], [garbage, -3.0, garbage]])
        found = dpo_loss(trainer, reference, MASK, beta=0.5, logprob_reduction=reduction)
        assert (found.chosen_rewards.item(), found.rejected_rewards.item()) == (chosen, rejected)
        margin = chosen - rejected
        assert found.margins.item() == margin
        assert found.loss.item() == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-12)
        num_chosen = 2 if reduction == "mean" else 1
        assert (found.chosen_logprobs.item(), found.rejected_logprobs.item()) == (-3.0 / num_chosen, -4.0)
        # d loss / d margin = -sigmoid(-margin), and the margin is beta (c_w - c_l) and constants.
        (gradient,) = torch.autograd.grad(found.loss.sum(), trainer)
        slope = 0.5 / (1 + math.exp(margin))
        expected = [[0.0, -slope / num_chosen, -slope / num_chosen], [0.0, slope, 0.0]]
        torch.testing.assert_close(gradient, torch.tensor(expected))


def test_margins_of_any_size_have_a_finite_loss_and_gradient() -> None:
    for far in (-1e4, 1e4):
        trainer = torch.full((2, 3), -1.0)
        trainer[0] += far
        trainer.requires_grad_()
        found = dpo_loss(trainer, torch.full((2, 3), -1.0), MASK, beta=1.0, logprob_reduction=SUM)
        assert found.loss.item() == pytest.approx(max(-2 * far, 0.0))
        (gradient,) = torch.autograd.grad(found.loss.sum(), trainer)
        assert gradient[0, 1].item() == (-1.0 if far < 0 else 0.0)


def test_garbage_under_the_mask_changes_nothing() -> None:
    tensors, found = pairs(), []
    for garbage in (0.0, math.nan, math.inf, -math.inf):
        here = {key: values.clone() for key, values in tensors.items()}
        for key in ("trainer", "reference"):
            here[key][~tensors["mask"]] = garbage
        trainer = here["trainer"].requires_grad_()
        objective = objective_of(tensors["mask"], sft_coefficient=0.5)
        losses = objective.losses(batch_of(here), trainer, None)
        (gradient,) = torch.autograd.grad(losses.shares.sum(), trainer)
        sums = objective.metrics(batch_of(here), trainer.detach(), None, losses).sums
        found.append(
            (losses.shares.tolist(), gradient.tolist(), {key: value.item() for key, value in sums.items()})
        )
    assert all(one == found[0] for one in found[1:])
    assert math.isfinite(sum(found[0][2].values()))


def test_metrics_and_loss_against_plain_loops() -> None:
    tensors, beta, coefficient = pairs(5, seed=6), 0.7, 0.2
    mask = tensors["mask"].tolist()

    def total(key: str, row: int) -> float:
        return math.fsum(v for v, kept in zip(tensors[key][row].tolist(), mask[row], strict=True) if kept)

    margins, chosen, losses = [], [], []
    for i in range(5):
        chosen.append(beta * (total("trainer", 2 * i) - total("reference", 2 * i)))
        rejected = beta * (total("trainer", 2 * i + 1) - total("reference", 2 * i + 1))
        margins.append(chosen[-1] - rejected)
        losses.append(math.log1p(math.exp(-margins[-1])))
    imitation = -sum(total("trainer", row) for row in range(0, 10, 2)) / sum(map(sum, mask[::2]))
    objective = objective_of(tensors["mask"], beta=beta, sft_coefficient=coefficient)
    batch = batch_of(tensors)
    of_tokens = objective.losses(batch, tensors["trainer"], None)
    found = objective.metrics(batch, tensors["trainer"], None, of_tokens).sums
    expected = {
        "train/loss": sum(losses) / 5 + coefficient * imitation,
        "train/rewards/chosen": sum(chosen) / 5,
        "train/rewards/rejected": (sum(chosen) - sum(margins)) / 5,
        "train/rewards/margin": sum(margins) / 5,
        "train/rewards/accuracy": sum(margin > 0 for margin in margins) / 5,
        "train/logprobs/chosen": sum(total("trainer", row) for row in range(0, 10, 2)) / 5,
        "train/logprobs/rejected": sum(total("trainer", row) for row in range(1, 10, 2)) / 5,
    }
    assert {key: value.item() for key, value in found.items()} == pytest.approx(expected, rel=1e-12)
    assert 0 < expected["train/rewards/accuracy"] < 1  # the example should have right and wrong pairs


@given(
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    reduction=st.sampled_from(["sum", "mean"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_any_cut_into_whole_pairs_gives_the_same_loss_gradient_and_metrics(
    cuts: list[int], reduction: Any, seed: int
) -> None:
    tensors = pairs(sum(cuts), seed=seed)
    objective = objective_of(tensors["mask"], logprob_reduction=reduction, sft_coefficient=0.3)
    results = []
    for sizes in ([sum(cuts)], cuts):
        trainer = tensors["trainer"].clone().requires_grad_()
        pieces = {key: values.split([2 * n for n in sizes]) for key, values in tensors.items()}
        pieces["trainer"] = trainer.split([2 * n for n in sizes])
        parts = []
        for index in range(len(sizes)):
            piece = {key: values[index] for key, values in pieces.items()}
            batch = batch_of(piece)
            of_tokens = objective.losses(batch, piece["trainer"], None)
            of_tokens.shares.sum().backward()
            with torch.no_grad():
                parts.append(objective.metrics(batch, piece["trainer"].detach(), None, of_tokens))
        assert trainer.grad is not None
        results.append(
            [*trainer.grad.flatten().tolist(), *(float(value) for value in merge(parts).sums.values())]
        )
    assert results[0] == pytest.approx(results[1], rel=1e-12, abs=1e-15)


def test_a_batch_of_pairs_is_not_cut_inside_a_pair() -> None:
    batch = batch_of(pairs(3))
    assert [len(part) for part in batch.split(4)] == [4, 2]
    with pytest.raises(AssertionError, match="would be split"):
        next(batch.split(3))
