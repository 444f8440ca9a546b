"""Samples that are dealt out over ranks and brought back: every kind of tensor, to the last bit."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Policy
from abrun.trainer.backends.microbatches import Microbatches
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.rl.batch import Sequences
from abrun.trainer.rl.sampling import pack_bits
from tests.spawn import run_ranks
from tests.trainer.backends.policies import CPU, WeightedLoss, gradients, make_backend
from tests.trainer.backends.test_dtensor import assert_same
from tests.trainer.backends.test_packing import of_prompts
from tests.trainer.backends.test_support import VOCAB
from tests.trainer.backends.test_value_model import SquaredError


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked(Sequences):
    """Every kind of tensor that a batch can have; `row` tells which of all ranks' rows it is."""

    row: Tensor  # [B] int64
    wide: Tensor  # [B, S] float64
    narrow: Tensor  # [B, S] bfloat16


def batch_of(lengths: list[int], first_row: int, together: int, spare: int) -> Marked:
    """Rows of these lengths (0: no completion), padded to `spare` more; any entry tells its row and place."""
    width, num_rows = max(max(lengths), 2) + spare, len(lengths)
    rows = torch.arange(first_row, first_row + num_rows)
    place = torch.arange(width).expand(num_rows, width)
    entry = rows[:, None] * 100 + place
    mask = torch.zeros(num_rows, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        if length:
            mask[row, length - 1] = True
            mask[row, 1 : length - 1] = entry[row, 1 : length - 1] % 3 > 0
    return Marked(
        token_ids=entry,
        token_mask=mask,
        rows_per_sample=together,
        routes=(entry[..., None] * torch.tensor([1, -1, 2])).to(torch.int16),
        support=(entry[..., None] + torch.arange(5)).to(torch.uint8),
        row=rows,
        wide=entry / 3,
        narrow=entry.bfloat16(),
    )


def dealt_out(rank: int, world_size: int, cases: list[tuple[list[list[int]], int, int]]) -> list[Any]:
    ranks, found = make_ranks(CPU, {}), []
    for lengths, together, max_tokens in cases:
        batch = batch_of(lengths[rank], rank * len(lengths[rank]), together, spare=3 * rank)
        each = Microbatches(batch, Policy(packing=True, micro_batch_tokens=max_tokens), ranks)
        seen, came = [], {}
        for part, packing in each:
            assert packing is not None
            seen.append((part.row.tolist(), packing.starts[-1]))
            for index, row in enumerate(part.row.tolist()):
                owner, place = divmod(row, len(lengths[0]))
                whole = batch_of(lengths[owner], owner * len(lengths[owner]), together, spare=3 * owner)
                length = max(lengths[owner][place], 2)
                for name in ("token_ids", "token_mask", "routes", "support", "wide", "narrow"):
                    own, expected = getattr(part, name)[index], getattr(whole, name)[place]
                    assert own.dtype == expected.dtype
                    assert torch.equal(own[:length], expected[:length]), (name, row)
                assert not part.token_mask[index, length:].any()
        for name in ("token_mask", "routes", "wide", "row"):
            came[name] = each.gather_rows([getattr(part, name) for part, _ in each])
            expected = getattr(batch, name)
            assert came[name].shape == expected.shape and came[name].dtype == expected.dtype
            for row, length in enumerate(lengths[rank]):
                stop = max(length, 2)
                assert (
                    torch.equal(came[name][row][:stop], expected[row][:stop]) if expected.ndim > 1 else True
                )
        assert torch.equal(came["row"], batch.row) and torch.equal(came["token_mask"], batch.token_mask)
        found.append(seen)
    return found


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_is_dealt_out_comes_back(world_size: int) -> None:
    draw = random.Random(world_size)
    cases = [([[7]] * world_size, 1, 1), ([[0, 0]] * world_size, 2, 9), ([[0, 30]] * world_size, 1, 4)]
    for _ in range(40):
        together = draw.choice([1, 2])
        num_rows = together * draw.randint(1, 6)
        longest = [draw.choice([2, 5, 30]) for _ in range(world_size)]
        lengths = [[draw.choice([0, draw.randint(2, most)]) for _ in range(num_rows)] for most in longest]
        cases.append((lengths, together, draw.choice([1, 8, 25, 60, 1000])))
    by_rank = run_ranks(dealt_out, world_size, cases)
    for number, (lengths, together, max_tokens) in enumerate(cases):
        of_ranks = [found[number] for found in by_rank]
        assert len({len(parts) for parts in of_ranks}) == 1
        rows = [row for parts in of_ranks for part, _ in parts for row in part]
        assert sorted(rows) == list(range(world_size * len(lengths[0])))
        of_row = [max(length, 2) for of_rank in lengths for length in of_rank]
        for part, num_tokens in (part for parts in of_ranks for part in parts):
            assert num_tokens == sum(of_row[row] for row in part)
            assert num_tokens <= max_tokens or len(part) == together
            assert all(row % together == place % together for place, row in enumerate(part))
            if together == 2:
                assert all(one + 1 == two for one, two in zip(part[::2], part[1::2], strict=True))


ROWS = 6  # of two ranks and of three


def everything(packing: dict[str, Any]) -> dict[str, Any]:
    """Of this rank's share: log-probs and values, and gradients of policy and value model by both."""
    kept = torch.rand(ROWS, 24, VOCAB, generator=torch.Generator().manual_seed(5)) < 0.3
    whole = of_prompts([(4, [3, 8, 1, 4]), (2, [2, 6])])
    width = whole.token_ids.shape[1]
    whole.token_mask[2] = False  # an empty completion
    whole.token_mask[3:, 4:] = False
    routes = torch.randint(1, 9, (ROWS, width, 4), generator=torch.Generator().manual_seed(6))
    routes[..., 1::2] = 1 + routes[..., ::2] % 8  # two different experts a layer
    routes = routes[[0, 0, 0, 0, 4, 4]]  # the same of the same prompt
    kept = kept[:, :width].scatter(-1, whole.token_ids[..., None], True) & whole.token_mask[..., None]
    whole = replace(whole, routes=routes.to(torch.int16), support=pack_bits(kept))
    settings = {"replay_routing": True, "router_aux_loss_coefficient": 0.1, **packing}
    backend = make_backend("experts", temperature=0.7, top_p=0.8, **settings)
    ppo = Ppo.model_validate({"type": "ppo"})
    critic, num_tokens = backend.make_value_model(ppo, seed=3), float(whole.token_mask.sum())
    batch = whole[backend.ranks.data_slice(ROWS)]
    if batch.token_mask.any():  # padded as its own rows need, as collate does
        (batch,) = batch.split(None)
    values = torch.where(batch.token_mask, critic.compute_values(batch), 0.0)
    found: dict[str, Any] = {"logprobs": backend.compute_logprobs(batch), "values": values}
    parts = backend.forward_backward(batch, WeightedLoss(num_tokens))
    losses = [parts.sums["loss"], critic.forward_backward(batch, SquaredError(num_tokens)).sums["loss"]]
    found["losses"] = torch.tensor(backend.ranks.all_reduce_sum_data(*(float(loss) for loss in losses)))
    found["gradients"] = gradients(backend) | {
        f"head.{name}": parameter.grad.full_tensor()  # pyright: ignore
        for name, parameter in critic.head.named_parameters()
    }
    return found


def everything_on_ranks(rank: int, world_size: int, max_tokens: int, shared: bool) -> dict[str, Any]:
    return everything({"packing": True, "micro_batch_tokens": max_tokens, "share_prompts": shared})


@pytest.mark.parametrize(
    ("world_size", "max_tokens", "shared"),
    [
        (2, 12, True),
        *(
            pytest.param(ranks, tokens, shared, marks=pytest.mark.slow)
            for ranks, tokens in ((2, 1), (2, 12), (3, 12), (3, 1000))
            for shared in (False, True)
            if (ranks, tokens, shared) != (2, 12, True)
        ),
    ],
)
def test_policy_and_value_model_of_several_ranks_are_those_of_one(
    world_size: int, max_tokens: int, shared: bool, group: None
) -> None:
    expected, by_rank = everything({}), run_ranks(everything_on_ranks, world_size, max_tokens, shared)
    for name in ("logprobs", "values"):
        width = expected[name].shape[1]
        rows = [pad(found[name], (0, width - found[name].shape[1])) for found in by_rank]
        torch.testing.assert_close(torch.cat(rows), expected[name], atol=2e-5, rtol=1e-5)
    for found in by_rank:
        torch.testing.assert_close(found["losses"], expected["losses"], atol=1e-6, rtol=1e-5)
        assert_same(found["gradients"], expected["gradients"], rtol=1e-4, atol=1e-6)
