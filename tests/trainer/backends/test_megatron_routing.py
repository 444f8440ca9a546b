"""Routers on the megatron backend are those of dtensor: measured, balanced, recorded and replayed alike."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.rl.batch import sequence_lengths
from abrun.trainer.rl.metrics import all_reduce
from tests.spawn import run_ranks
from tests.trainer.backends import policies
from tests.trainer.backends.megatron_policies import gradients, make_backend, network
from tests.trainer.backends.policies import CPU, Advised, WeightedLoss, some_batch
from tests.trainer.backends.test_dtensor import assert_same
from tests.trainer.backends.test_megatron_ranks import (
    CHUNKED,
    EXPERTS,
    ONE_PASS,
    PACKED,
    PIPELINE,
    SEQUENCE,
)
from tests.trainer.loop.runs import single_rank

LAYERS, NUM_EXPERTS, CHOSEN = 4, 8, 2
BALANCED = {"router_aux_loss_coefficient": 0.5, "replay_routing": True}
CHECKPOINTED = {"activation_checkpointing": True}
CONTEXT = {"context_parallel": 2}
Cut = tuple[dict[str, Any], dict[str, Any]]
ONE: dict[str, Cut] = {
    "rows": ({}, {"micro_batch_size": 3} | CHECKPOINTED),
    "packed": ({}, PACKED | {"logprobs": ONE_PASS}),
}
TWO: dict[str, Cut] = {
    "ep2": (EXPERTS, {"micro_batch_size": 3}),
    "ep2-tp2": (EXPERTS | SEQUENCE, {"logprobs": CHUNKED, "micro_batch_size": 3} | CHECKPOINTED),
    "cp2": (CONTEXT, {"logprobs": ONE_PASS, "micro_batch_size": 3}),
    "pp2": (PIPELINE, {"micro_batch_size": 3} | CHECKPOINTED),
}
MORE_OF_TWO: dict[str, Cut] = {
    "ep2-tp2-packed": (EXPERTS | SEQUENCE, PACKED),
    "ep2-cp2": (EXPERTS | CONTEXT, PACKED | CHECKPOINTED),
    "pp2-packed": (PIPELINE, PACKED),
    "dp2": ({}, {"micro_batch_size": 3}),
}
FOUR: dict[str, Cut] = {
    "ep2-tp2-cp2": (EXPERTS | SEQUENCE | CONTEXT, {"micro_batch_size": 3} | CHECKPOINTED),
    "cp2-pp2": (CONTEXT | PIPELINE, PACKED | CHECKPOINTED),
    "ep4-dp": ({"expert_parallel": 4}, {"micro_batch_size": 2}),
    "ep2-tp2-pp2": (EXPERTS | SEQUENCE | PIPELINE, {"micro_batch_size": 3} | CHECKPOINTED),
}


def real(batch: Advised) -> Tensor:
    return torch.arange(batch.token_ids.shape[1]) < sequence_lengths(batch.token_mask)[:, None]


def with_routes(batch: Advised) -> Advised:
    """Each token with experts that no router would choose."""
    draw = torch.Generator().manual_seed(5)
    places = (*batch.token_ids.shape, LAYERS, NUM_EXPERTS)
    routes = 1 + torch.rand(places, generator=draw).argsort(dim=-1)[..., :CHOSEN]
    routes = routes.flatten(2).to(torch.uint8) * real(batch)[..., None]
    return batch.with_fields(Advised, advantages=batch.advantages, routes=routes)


def updated(backend: Any, batch: Advised) -> dict[str, float]:
    """Metrics of an update on this rank's share of a batch."""
    loss = WeightedLoss(float(batch.token_mask.sum()))
    parts = backend.forward_backward(batch[backend.ranks.data_slice(len(batch))], loss)
    return all_reduce(parts, backend.ranks.data)


def measured(backend: Any, gradients_of: Any) -> dict[str, Any]:
    """Log-probs, routes, metrics and gradients of a batch, as it goes by itself and as it is told to go."""
    batch, found = some_batch(), {}
    share = backend.ranks.data_slice(len(batch))
    found["logprobs"], found["routes"] = backend.compute_logprobs_and_routes(batch[share])
    again = batch[share].with_fields(Advised, advantages=batch[share].advantages, routes=found["routes"])
    found["same"] = torch.equal(backend.compute_logprobs(again), found["logprobs"])
    found["told logprobs"] = backend.compute_logprobs(with_routes(batch)[share])
    for name, each in (("", batch), ("told ", with_routes(batch))):
        found[f"{name}metrics"] = updated(backend, each)
        found[f"{name}gradients"] = gradients_of(backend)
    return found | {"rows": share}


def of_megatron(cut: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    def taken(backend: Any) -> dict[str, Tensor]:
        found = gradients(backend)
        backend._parameters.module.zero_grad_buffer()
        return found

    return measured(make_backend("qwen3_moe", cut=cut, **BALANCED, **policy), taken)


def of_dtensor() -> dict[str, Any]:
    """On one rank, in rows."""

    def taken(backend: Any) -> dict[str, Tensor]:
        found = policies.gradients(backend)
        backend.module.zero_grad()
        return found

    load = partial(network, "qwen3_moe")
    return measured(DtensorBackend(load, Policy.model_validate(BALANCED), make_ranks(CPU, {})), taken)


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    rows, batch = found["rows"], some_batch()
    known = real(batch)[rows]
    assert found["same"]  # own routes replayed change nothing, to the bit
    assert torch.equal(found["routes"][known], expected["routes"][rows][known])
    assert not found["routes"][~known].any()
    for told in ("", "told "):
        logprobs = expected[f"{told}logprobs"][rows]
        torch.testing.assert_close(found[f"{told}logprobs"], logprobs, rtol=1e-5, atol=2e-5)
        assert found[f"{told}metrics"] == pytest.approx(expected[f"{told}metrics"], rel=1e-5, abs=1e-6)
        assert_same(found[f"{told}gradients"], expected[f"{told}gradients"], rtol=1e-4, atol=2e-6)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with single_rank():
        return of_dtensor()


@pytest.mark.parametrize("cut", ONE)
def test_routers_are_those_of_dtensor(cut: str, expected: dict[str, Any], group: None) -> None:
    check(of_megatron(*ONE[cut]), expected)


def on_ranks(rank: int, world_size: int, cuts: dict[str, Cut]) -> dict[str, dict[str, Any]]:
    return {name: of_megatron(*cut) for name, cut in cuts.items()}


def on_both(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [on_ranks(rank, world_size, TWO), faulty()]


@pytest.fixture(scope="module")
def on_two() -> list[list[dict[str, Any]]]:
    return run_ranks(on_both, 2)


@pytest.mark.parametrize("cut", TWO)
def test_routers_of_two_ranks_are_those_of_dtensor(
    cut: str, on_two: list[list[dict[str, Any]]], expected: dict[str, Any]
) -> None:
    assert {f"train/moe/{name}" for name in ("max_load", "routing_entropy", "aux_loss")} < expected[
        "metrics"
    ].keys()
    for of_rank in on_two:
        check(of_rank[0][cut], expected)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [MORE_OF_TWO, FOUR], ids=["two", "four"])
def test_more_cuts_are_those_of_dtensor(cuts: dict[str, Cut], expected: dict[str, Any]) -> None:
    for of_rank in run_ranks(on_ranks, 4 if cuts is FOUR else 2, cuts, timeout_s=280):
        for found in of_rank.values():
            check(found, expected)


# --- what such a comparison would miss, were it blind ---


def faulty() -> dict[str, dict[str, Tensor]]:
    """Gradients with a fault each, of tokens that are told where to go."""
    from abrun.trainer.backends.megatron.backend import Stages
    from abrun.trainer.backends.megatron.routing import StageRouters, _AttachLoss
    from abrun.trainer.backends.routing import RouterLoad

    told, places = StageRouters.start_microbatch, Stages.token_positions

    def of_other_stages(routing: StageRouters, batch: Any, *more: Any) -> Any:
        routes = None if batch.routes is None else batch.routes.roll(LAYERS // 2 * CHOSEN, dims=2)
        return told(routing, replace(batch, routes=routes), *more)

    def rows_first(stages: Stages, *batch: Any) -> Tensor:
        return places(stages, *batch).sort().values

    faults: dict[str, tuple[str, Any, str, Any]] = {
        "balanced by rank": ("cp2", RouterLoad, "all_reduce", lambda load, group: load.detached()),
        "balanced without a gradient": ("pp2", _AttachLoss, "apply", lambda values, loss: values),
        "routes of another stage": ("pp2", StageRouters, "start_microbatch", of_other_stages),
        "routes of other tokens": ("ep2", Stages, "token_positions", rows_first),
    }
    found = {}
    for fault, (cut, owner, name, value) in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            layout, policy = TWO[cut]
            backend = make_backend("qwen3_moe", cut=layout, **BALANCED, **policy)
            updated(backend, with_routes(some_batch()))
            found[fault] = gradients(backend)
    return found


def test_what_would_be_wrong_is_seen(on_two: list[list[dict[str, Any]]], expected: dict[str, Any]) -> None:
    gradients_of_all = expected["told gradients"].items()
    for fault, found in on_two[0][1].items():
        off = [float((found[name] - right).norm() / right.norm()) for name, right in gradients_of_all]
        assert max(off) > 1e-2, fault


@pytest.mark.parametrize("setting", [{"replay_routing": True}, {"router_aux_loss_coefficient": 0.1}], ids=str)
def test_a_model_without_routers_is_refused_in_one_line(setting: dict[str, Any], group: None) -> None:
    with pytest.raises(RecipeError, match=r"^policy\.\w+: got .* no routers .*; use [^\n]*$"):
        make_backend("qwen2", **setting)
