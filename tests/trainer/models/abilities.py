"""What a run can do with a family, tried out on a tiny random network."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.checks import check_decoding, check_network
from abrun.trainer.models.families import facts_of
from abrun.trainer.rl.batch import collate
from tests.trainer.backends.megatron_policies import make_backend
from tests.trainer.backends.policies import CPU, Advised, WeightedLoss, plain_logprobs
from tests.trainer.models.architectures import tiny_network
from tests.trainer.models.families import STREAMS, Family

POLICIES: dict[str, dict[str, Any]] = {
    "packed": {"packing": True},
    "shared prompts": {"packing": True, "share_prompts": True},
    "context parallel": {"backend": {"context_parallel": 2}},
    "tensor parallel": {"backend": {"tensor_parallel": 2}},
    "Megatron": {"backend": {"type": "megatron"}},
}

EXPECTED = {  # by Family.abilities
    "all": {*POLICIES, "torch engine"},
    "streams": {*STREAMS, "torch engine"},
    "rows": {"torch engine"},
}


def abilities(rank: int, world_size: int, families: tuple[Family, ...]) -> list[set[str]]:
    """Try each family on two ranks: return what is not refused; other log-probs than the network's raise."""
    return [_abilities(family) for family in families]


def _abilities(family: Family) -> set[str]:
    network = _network(family)
    batch = _batch()
    network.config.use_cache = False
    with torch.no_grad():
        expected, _ = plain_logprobs(network.eval(), batch)
    _train_a_step(family, batch, expected)
    abilities: set[str] = set()
    for name, settings in POLICIES.items():
        try:
            policy = _policy(family, settings)
        except RecipeError:
            continue
        _assert_same(policy.compute_logprobs(batch), expected, f"{family.kind}, {name}")
        abilities.add(name)
    try:
        check_decoding(network, facts_of(network))
        abilities.add("torch engine")
    except RecipeError:
        pass
    return abilities


def _network(family: Family) -> Any:
    network = tiny_network(family.kind, **family.settings)
    check_network(network, facts_of(network))
    return network


def _policy(family: Family, settings: dict[str, Any]) -> Any:
    policy = Policy.model_validate(settings)
    load, ranks = partial(_network, family), make_ranks(CPU, policy.backend.shape)
    if policy.backend.type == "dtensor":
        return DtensorBackend(load, policy, ranks)
    return make_backend(load=load)


def _train_a_step(family: Family, batch: Advised, expected: Tensor) -> None:
    policy = _policy(family, {})
    _assert_same(policy.compute_logprobs(batch), expected, family.kind)
    policy.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    assert policy.optimizer_step(0.1) > 0
    moved = (policy.compute_logprobs(batch) - expected).abs().max()
    assert moved.isfinite() and moved > 1e-4, f"{family.kind} does not train"


def _batch() -> Advised:
    """Three prompts, the first two of which have two completions each."""
    draw = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 99, (length,), generator=draw).tolist()

    prompts = [tokens(5), tokens(3), tokens(4)]
    rows = collate([prompts[i] for i in (0, 0, 1, 1, 2)], [tokens(n) for n in (4, 6, 3, 8, 2)], pad_id=0)
    return rows.with_fields(Advised, advantages=torch.randn(rows.token_ids.shape, generator=draw))


def _assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, atol=1e-4, rtol=1e-4, msg=lambda message: f"{what}: {message}"
    )
