"""Routers: balanced over the global batch, measured alike however it is cut, recorded and replayed."""

import contextlib
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from abrun.errors import RecipeError
from abrun.trainer.backends.dtensor import DtensorBackend, Routers
from abrun.trainer.backends.routing import RouterLoad
from abrun.trainer.models.families import SOFTMAX_ROUTERS, experts_of
from abrun.trainer.rl.batch import sequence_lengths
from abrun.trainer.rl.metrics import all_reduce
from tests.trainer.backends.policies import (
    WeightedLoss,
    gradients,
    make_backend,
    plain_imbalance,
    plain_loss,
    router_logits,
    routers,
    some_batch,
    tiny,
)
from tests.trainer.backends.test_dtensor import assert_same
from tests.trainer.backends.test_packing import GROUPS, of_prompts
from tests.trainer.models.architectures import tiny_network

CUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 3, "activation_checkpointing": True},
    {"packing": True, "micro_batch_tokens": 25},
    {"packing": True, "logprobs": {"impl": "chunked", "one_pass": True}, "micro_batch_size": 5},
    {"packing": True, "share_prompts": True, "micro_batch_size": 3},
]
each_cut = pytest.mark.parametrize("cut", CUTS, ids=["whole", "rows", "packed", "one pass", "prompts"])
MAX_LOAD, ENTROPY, AUX_LOSS = (f"train/moe/{name}" for name in ("max_load", "routing_entropy", "aux_loss"))


def updated(backend: DtensorBackend, batch: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of an update on a batch."""
    parts = backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    return all_reduce(parts, backend.ranks.data), gradients(backend)


def test_the_auxiliary_loss_is_transformers_own() -> None:
    network, batch = tiny("experts"), some_batch()
    lengths = sequence_lengths(batch.token_mask)
    real = torch.arange(batch.token_ids.shape[1]) < lengths[:, None]
    with torch.no_grad():
        logits: Any = router_logits(network, batch.token_ids)
        expected = load_balancing_loss_func(tuple(logits), 8, 2, real)
        seen = [(one.softmax(-1), one.topk(2).indices) for one in logits]
        load = RouterLoad.from_choices(seen, real.flatten().double())
        found = load.balance_loss(load.counts, load.num_tokens)
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
        assert float(plain_imbalance(network, batch)) == pytest.approx(float(expected), rel=1e-5)


@each_cut
def test_a_balanced_update_has_the_gradient_of_the_global_batch(cut: dict[str, Any], group: None) -> None:
    batch, network = of_prompts(GROUPS), tiny("experts")
    metrics, found = updated(make_backend("experts", router_aux_loss_coefficient=0.5, **cut), batch)
    balance_loss = plain_imbalance(network, batch)
    loss = plain_loss(network, batch)
    (loss + 0.5 * balance_loss).backward()
    expected = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)  # it is no part of the reported loss
    assert metrics[AUX_LOSS] == pytest.approx(balance_loss.item(), rel=1e-5)
    counts, entropies = torch.zeros(2, 8), []
    for row, length in zip(batch.token_ids, sequence_lengths(batch.token_mask).tolist(), strict=True):
        with torch.no_grad():
            logits = router_logits(network, row[None, :length])
        for layer, one in enumerate(logits):
            for weights in one.softmax(dim=-1):
                counts[layer, weights.topk(2).indices] += 1
                entropies.append(-sum(float(p) * math.log(float(p)) for p in weights))
    assert metrics[ENTROPY] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
    assert metrics[MAX_LOAD] == pytest.approx(float((counts.amax(1) / counts.mean(1)).max()))
    _, without = updated(make_backend("experts", **cut), batch)
    name = "model.layers.0.mlp.gate.weight"
    assert float((without[name] - expected[name]).norm() / expected[name].norm()) > 0.01


def test_a_model_without_experts_has_no_such_metrics(group: None) -> None:
    metrics, _ = updated(make_backend(), some_batch())
    assert metrics.keys() == {"loss"}


@each_cut
def test_own_routes_replayed_change_nothing(cut: dict[str, Any], group: None) -> None:
    batch = of_prompts(GROUPS)
    backend = make_backend("experts", replay_routing=True, **cut)
    logprobs, routes = backend.compute_logprobs_and_routes(batch)
    assert routes.shape == (*batch.token_ids.shape, 2 * 2) and routes.dtype == torch.uint8
    assert torch.equal(logprobs, backend.compute_logprobs(batch))
    replayed = batch.with_fields(type(batch), advantages=batch.advantages, routes=routes)
    assert torch.equal(backend.compute_logprobs(replayed), logprobs)
    metrics, found = updated(backend, replayed)
    expected_metrics, expected = updated(make_backend("experts", **cut), batch)
    assert metrics == expected_metrics
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert float(found["model.layers.0.mlp.gate.weight"].norm()) > 0


@pytest.mark.parametrize("recorded", [*CUTS[:3], CUTS[4]], ids=["whole", "rows", "packed", "prompts"])
@each_cut
def test_other_routes_are_those_of_a_router_that_is_told(
    recorded: dict[str, Any], cut: dict[str, Any], group: None
) -> None:
    """Recorded in one cut by weights before an update, and replayed in another cut by those after it."""
    batch = of_prompts(GROUPS)
    backend = make_backend("experts", **recorded)
    _, routes = backend.compute_logprobs_and_routes(batch)
    network, told = tiny("experts"), iter(())

    def tell(router: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(hidden, router.weight)
            chosen = next(told)
            weights = logits.softmax(dim=-1).gather(-1, chosen)
            return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

        return forward

    for router in routers(network):
        router.forward = tell(router)
        router.weight.data.neg_()  # would choose other experts by now
    lengths = sequence_lengths(batch.token_mask).tolist()
    told = iter(
        [
            row[:length].view(length, 2, 2)[:, layer].long() - 1
            for row, length in zip(routes, lengths, strict=True)
            for layer in range(2)
        ]
    )
    plain_loss(network, batch).backward()
    expected = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    backend = make_backend("experts", **cut)
    for router in routers(backend.module):
        router.weight.to_local().data.neg_()
    replayed = batch.with_fields(type(batch), advantages=batch.advantages, routes=routes)
    _, found = updated(backend, replayed)
    assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert float((backend.compute_logprobs(replayed) - backend.compute_logprobs(batch)).abs().max()) > 1e-3


@pytest.mark.parametrize("setting", [{"replay_routing": True}, {"router_aux_loss_coefficient": 0.1}], ids=str)
def test_a_family_without_such_routers_is_refused_in_one_line(setting: dict[str, Any], group: None) -> None:
    (name,) = setting
    with pytest.raises(RecipeError, match=rf"^policy\.{name}: got .* with LlamaForCausalLM, .*use {name}: "):
        make_backend(**setting)


@pytest.mark.parametrize("kind", [kind for kind in SOFTMAX_ROUTERS if kind in CONFIG_MAPPING])
def test_families_whose_routers_are_known(kind: str) -> None:
    """One choice a router, among probabilities; every layer of experts has one; replayed to the bit."""
    with contextlib.redirect_stderr(io.StringIO()):
        network = tiny_network(kind).eval()
    tokens = torch.arange(20).view(2, 10) + 5
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
        expected = network(tokens, use_cache=False).logits
        routing = Routers(network)
        with routing.record() as seen:
            assert torch.equal(network(tokens, use_cache=False).logits, expected)
        assert len(seen) == routing.num_layers == len(experts_of(network)) > 0
        for probabilities, chosen in seen:
            assert probabilities.shape == (20, routing.num_experts) and chosen.shape == (20, routing.top_k)
            torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(20))
        with routing.replay(torch.cat([1 + chosen for _, chosen in seen], dim=1)):
            assert torch.equal(network(tokens, use_cache=False).logits, expected)
