"""A mixture of experts on the dtensor backend: what it exports, and its experts over several ranks."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from abrun.errors import RecipeError
from abrun.recipe.policy import Model, Policy
from abrun.trainer.backends import routing
from abrun.trainer.backends.dtensor import DtensorBackend, experts, fsdp
from abrun.trainer.backends.dtensor.experts import DispatchedExperts
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.families import experts_of
from abrun.trainer.models.weights import load_network
from abrun.trainer.rl.metrics import all_reduce
from tests.snapshot import Snapshot
from tests.spawn import run_ranks
from tests.trainer.backends.float64 import compute_in_float64, to_float64
from tests.trainer.backends.policies import (
    CPU,
    WeightedLoss,
    gradients,
    make_backend,
    parameters,
    plain_steps,
    rows,
    some_batch,
    tiny,
)
from tests.trainer.models.architectures import tiny_network

NUM_EXPERTS = 8
LEARNING_RATES = (0.01, 0.02)
OPTIMIZER = {"weight_decay": 0.3, "max_grad_norm": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Three steps of a policy with experts."""

    expert_parallel: int = 2
    exact: bool = True  # in float64, the experts one by one; else in float32, in grouped products
    idle: bool = False  # every token goes to experts 0 and 1
    num_experts: int = NUM_EXPERTS
    coefficient: float = 0.0  # of the routers' auxiliary loss
    layout: tuple[tuple[str, int], ...] = ()  # of a replica
    policy: tuple[tuple[str, Any], ...] = ()
    fault: str | None = None

    @property
    def alone(self) -> "Case":
        """What it is in one process."""
        return replace(self, expert_parallel=1, policy=(), layout=(), fault=None)


@dataclass(kw_only=True)
class Trainable:
    """Results of the steps."""

    losses: list[float]
    norms: list[float]  # of the gradient before clipping
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]

    def distance(self, other: "Trainable") -> dict[str, float]:
        """The largest relative difference of losses, norms, first gradients and weights."""
        return {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)),
            "norm": max(abs(a - b) / b for a, b in zip(self.norms, other.norms, strict=True)),
            "gradient": _distance(self.gradients, other.gradients),
            "weights": _distance(self.weights, other.weights),
        }


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[k] - one).norm() / one.norm().clamp(min=1e-12)) for k, one in expected.items())


def network_of(case: Case) -> Any:
    network = tiny("experts", num_experts=case.num_experts)
    if case.exact:
        network = to_float64(network)
    for module in network.modules():
        if case.idle and type(module).__name__.endswith("TopKRouter"):
            module.forward = partial(_to_the_first_experts, module)
    return network


def _to_the_first_experts(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    first = torch.arange(router.num_experts) < router.top_k
    _, chosen = torch.topk(logits.softmax(dim=-1) + first, router.top_k, dim=-1)
    weights = logits.softmax(dim=-1).gather(-1, chosen)
    return logits, weights / weights.sum(dim=-1, keepdim=True), chosen


def trained(case: Case) -> Trainable:
    """On this rank's rows of the global batches."""
    with pytest.MonkeyPatch.context() as patch:
        if case.exact:
            compute_in_float64(patch)
        if case.fault:
            FAULTS[case.fault](patch)
        backend = {"expert_parallel": case.expert_parallel, **dict(case.layout)}
        settings: dict[str, Any] = {"optimizer": OPTIMIZER, "backend": backend, **dict(case.policy)}
        policy = Policy.model_validate(settings | {"router_aux_loss_coefficient": case.coefficient})
        ranks = make_ranks(CPU, policy.backend.shape, expert_parallel=case.expert_parallel)
        backend = DtensorBackend(partial(network_of, case), policy, ranks)
        found = Trainable(losses=[], norms=[], gradients={}, weights={})
        for step, learning_rate in enumerate(LEARNING_RATES):
            batch = some_batch(step)
            share = batch[ranks.data_slice(len(batch))]
            parts = backend.forward_backward(share, WeightedLoss(float(batch.token_mask.sum())))
            found.losses += ranks.all_reduce_sum_data(float(parts.sums["loss"]))
            found.gradients = found.gradients or gradients(backend)
            found.norms.append(backend.optimizer_step(learning_rate))
        found.weights = parameters(backend)
        return found


def plainly_trained(case: Case) -> Trainable:
    """By torch's own AdamW on the network as it is, in one process, row by row."""
    network = network_of(case)
    found = plain_steps(network, OPTIMIZER, LEARNING_RATES, balance=case.coefficient)
    return Trainable(**found, weights={name: p.detach() for name, p in network.named_parameters()})


def _average_experts(patch: pytest.MonkeyPatch) -> None:
    def averaged(module: Any, *args: Any, **settings: Any) -> None:
        fsdp.shard(module, *args, **settings)
        module.set_gradient_divide_factor(2.0)

    patch.setattr(experts, "shard", averaged)


def _clip_by_own_norms(patch: pytest.MonkeyPatch) -> None:
    of_all = fsdp.clip_gradients

    def clipped(all_parameters: Any, max_norm: float) -> Tensor:
        meshes: dict[Any, list[Any]] = {}
        for parameter in all_parameters:
            meshes.setdefault(parameter.device_mesh, []).append(parameter)
        return torch.stack([of_all(one, max_norm) for one in meshes.values()]).norm()

    patch.setattr(fsdp, "clip_gradients", clipped)


def _balance_by_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routing.RouterLoad, "all_reduce", lambda load, group: load.detached())


FAULTS = {"averaged": _average_experts, "own norms": _clip_by_own_norms, "by rank": _balance_by_rank}
FAULTY = [Case(fault=fault, coefficient=0.1 * (fault == "by rank")) for fault in FAULTS]


def on_ranks(rank: int, world_size: int, cases: list[Case]) -> list[Trainable]:
    return [trained(case) for case in cases]


def distances(cases: list[Case], world_size: int) -> list[dict[str, float]]:
    """Of each case on so many ranks from one process; the ranks agree among each other."""
    expected = {case: plainly_trained(case) for case in {case.alone for case in cases}}
    by_rank = run_ranks(on_ranks, world_size, cases, timeout_s=280)
    for of_rank in by_rank[1:]:
        for one, first in zip(of_rank, by_rank[0], strict=True):
            assert max(one.distance(first).values()) == 0
    return [found.distance(expected[case.alone]) for case, found in zip(cases, by_rank[0], strict=True)]


PACKED = (("packing", True), ("micro_batch_tokens", 25), ("activation_checkpointing", True))
CHUNKED = (("logprobs", {"impl": "chunked", "chunk_size": 40}), ("micro_batch_size", 3))
TWO_RANKS = [
    Case(policy=PACKED, coefficient=0.1),
    Case(idle=True),
    Case(exact=False, policy=CHUNKED, coefficient=0.1),
]
FOUR_RANKS = [
    Case(expert_parallel=size, exact=exact, policy=policy, idle=idle, coefficient=0.1 * (not idle))
    for size in (2, 4)
    for exact, policy, idle in (
        (True, (), False),
        (True, (("micro_batch_size", 1), ("activation_checkpointing", True)), True),
        (True, PACKED, False),
        (False, CHUNKED, False),
        (False, (*PACKED, ("logprobs", {"impl": "chunked", "one_pass": True})), False),
    )
]
FOUR_RANKS += [Case(num_experts=6), Case(num_experts=2)]  # of which two copies cannot have some each
CONTEXT, TENSOR = (("context_parallel", 2),), (("tensor_parallel", 2),)
SEQUENCE = (*TENSOR, ("sequence_parallel", True))
FOUR_RANKS += [
    Case(layout=CONTEXT, coefficient=0.1),
    Case(expert_parallel=4, layout=CONTEXT, coefficient=0.1, policy=PACKED),
    Case(expert_parallel=4, layout=(("context_parallel", 4),), idle=True),
    Case(exact=False, layout=TENSOR, coefficient=0.1),
    Case(exact=False, layout=TENSOR, coefficient=0.1, policy=PACKED),
    Case(exact=False, layout=SEQUENCE, coefficient=0.1),
    Case(exact=False, layout=SEQUENCE, coefficient=0.1, policy=PACKED),
    Case(exact=False, layout=SEQUENCE, idle=True, policy=(("activation_checkpointing", True),)),
]


def check_distances(cases: list[Case], found: list[dict[str, float]]) -> None:
    for case, distance in zip(cases, found, strict=True):
        if case.fault == "averaged":
            assert distance["gradient"] > 0.4 and distance["norm"] > 0.01, distance
        elif case.fault == "own norms":
            assert distance["gradient"] < 1e-12 and distance["norm"] > 1e-5, distance
            assert distance["weights"] > 1e-4, distance
        elif case.fault == "by rank":
            assert distance["gradient"] > 1e-3, distance
        elif case.exact:
            assert max(distance.values()) < 1e-11, (case, distance)
        else:
            assert max(distance.values()) < 1e-4 and distance["norm"] < 3e-6, (case, distance)


def test_experts_over_two_ranks_train_as_in_one_process() -> None:
    """Uneven lengths, a rank whose experts get no token, packed rows; and faults are seen."""
    cases = [*TWO_RANKS, *FAULTY]
    check_distances(cases, distances(cases, 2))


@pytest.mark.slow
def test_experts_over_four_ranks_train_as_in_one_process() -> None:
    cases = [*FOUR_RANKS, *FAULTY]
    check_distances(cases, distances(cases, 4))


def test_an_export_is_a_published_checkpoint(group: None, tmp_path: Path) -> None:
    """Of every expert a tensor each, though they train as one; what is loaded is what was saved."""
    check_export(make_backend("experts"), tmp_path)


def check_export(backend: DtensorBackend, folder: Path) -> None:
    batch = some_batch()
    count = len(batch) // backend.ranks.size
    share = rows(batch, backend.ranks.rank * count, (backend.ranks.rank + 1) * count)
    backend.forward_backward(share, WeightedLoss(float(batch.token_mask.sum())))
    backend.optimizer_step(0.01)
    trained = parameters(backend)
    backend.save(folder)
    backend.ranks.barrier()
    stored = load_file(folder / "model.safetensors")
    weights = dict(backend.gather_weights())
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    fused = trained["model.layers.1.mlp.experts.gate_up_proj"]  # [E, gate rows and up rows, H]
    for expert in range(NUM_EXPERTS):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up = fused[expert].chunk(2)
        assert torch.equal(stored[f"{prefix}.gate_proj.weight"], gate)
        assert torch.equal(stored[f"{prefix}.up_proj.weight"], up)
        down = trained["model.layers.1.mlp.experts.down_proj"][expert]
        assert torch.equal(stored[f"{prefix}.down_proj.weight"], down)
    loaded = load_network(Model(path=str(folder)), weights=None, seed=0)
    for network in (loaded, AutoModelForCausalLM.from_pretrained(folder)):
        found: dict[str, Any] = dict(network.named_parameters())
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], weight) for name, weight in trained.items())


def test_what_two_ranks_hold_sample_and_restore(tmp_path: Path, group: None) -> None:
    network, batch = tiny("experts"), some_batch()
    alone = make_backend("experts", packing=True)  # without padding, as ranks that share sequences
    _, routes = alone.compute_logprobs_and_routes(batch)
    loss = WeightedLoss(float(batch.token_mask.sum()))
    metrics = all_reduce(alone.forward_backward(batch, loss), alone.ranks.data)
    token_ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = network(token_ids).logits[:, -1]
    whole = sum(parameter.numel() for parameter in network.parameters())
    for found in run_ranks(on_two_ranks, 2, tmp_path):
        torch.testing.assert_close(found["logits"], expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(found["reference"], found["logprobs"])
        assert found["num_held"] <= 0.52 * 3 * whole
        assert torch.equal(found["routes"], routes) and int(routes.max()) == NUM_EXPERTS
        assert found["routing metrics"] == pytest.approx(metrics, rel=1e-5)
        assert found["differs"] == [] and found["restored"].keys() == found["state"].keys()


def on_two_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"expert_parallel": 2, "optimizer": OPTIMIZER}
    backend, batch, found = make_backend("experts", **settings), some_batch(), {}
    share = rows(batch, rank * 4, rank * 4 + 4)
    token_ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), backend.decoding() as decoder:
        for _ in range(1 + rank):  # no collective: one may do more
            found["logits"], _ = decoder(token_ids, torch.ones_like(token_ids), torch.arange(4)[None], None)
    found["logprobs"] = backend.compute_logprobs(share)
    found["reference"] = make_backend("experts", trainable=False, expert_parallel=2).compute_logprobs(share)
    loss = WeightedLoss(float(batch.token_mask.sum()))
    for _ in range(2):
        backend.forward_backward(share, loss)
        backend.optimizer_step(0.01)
    found["state"] = {name: tensor.clone() for name, tensor in backend.local_state().items()}
    found["num_held"] = sum(tensor.numel() for tensor in found["state"].values())
    second = make_backend("experts", **settings)
    second.load_local_state(found["state"])
    for one in (backend, second):
        one.forward_backward(share, loss)
        one.optimizer_step(0.02)
    found["restored"] = second.local_state()
    found["differs"] = [
        name
        for name, tensor in backend.local_state().items()
        if not torch.equal(tensor, found["restored"][name])
    ]
    check_export(make_backend("experts", **settings), folder)
    return found | replayed_over_two_ranks(some_batch())


def replayed_over_two_ranks(batch: Any) -> dict[str, Any]:
    """Of ranks that share their sequences and the experts: what they record, and replay."""
    return replayed(batch, {"expert_parallel": 2, "context_parallel": 2})


def replayed(batch: Any, backend: dict[str, Any]) -> dict[str, Any]:
    settings = {"replay_routing": True, "packing": True, "micro_batch_size": 3}
    policy = Policy.model_validate({"backend": backend} | settings)
    ranks = make_ranks(CPU, policy.backend.shape, expert_parallel=policy.backend.expert_parallel)
    split = DtensorBackend(partial(tiny, "experts"), policy, ranks)
    logprobs, routes = split.compute_logprobs_and_routes(batch)
    again = batch.with_fields(type(batch), advantages=batch.advantages, routes=routes)
    assert torch.equal(split.compute_logprobs(again), logprobs)
    parts = split.forward_backward(again, WeightedLoss(float(batch.token_mask.sum())))
    return {"routes": routes, "routing metrics": all_reduce(parts, ranks.data)}


SPREAD_AND_CUT = {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}


def on_four_ranks(rank: int, world_size: int) -> dict[str, Any]:
    batch = some_batch()
    return replayed(batch[slice(4 * (rank // 2), 4 * (rank // 2) + 4)], SPREAD_AND_CUT)


@pytest.mark.slow
def test_routes_are_recorded_and_replayed_where_sequences_are_cut_between_blocks(group: None) -> None:
    batch = some_batch()
    alone = make_backend("experts", packing=True)
    _, routes = alone.compute_logprobs_and_routes(batch)
    for rank, found in enumerate(run_ranks(on_four_ranks, 4, timeout_s=280)):
        assert torch.equal(found["routes"], routes[4 * (rank // 2) : 4 * (rank // 2) + 4])


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss", "mixtral", "nemotron_h", "olmoe"])
def test_families_experts_make_the_same_of_tokens_that_travel(kind: str, group: None) -> None:
    """Biases, shared experts, routers with groups: the weights of a token's experts stay with its sender."""
    found, mesh = [], init_device_mesh("cpu", (1,))
    for travel in (False, True):
        network = tiny_network(kind)
        layers = experts_of(network)
        assert layers
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for parameter in network.parameters():
                nn.init.normal_(parameter, std=0.2)
        for one in layers:
            DispatchedExperts(one, mesh) if travel else None
        logits = network(torch.arange(20).view(2, 10) + 5, use_cache=False).logits
        logits.square().mean().backward()
        grads = {
            name: fsdp.full_tensor(p.grad) for name, p in network.named_parameters() if p.grad is not None
        }
        found.append(grads | {"logits": logits.detach()})
    assert _distance(*found) < 1e-4


@pytest.mark.parametrize(
    ("kind", "size", "family"),
    [
        ("llama", 2, "LlamaForCausalLM"),
        ("experts", 3, "Qwen3MoeForCausalLM"),
    ],
)
def test_what_cannot_be_spread_is_one_line(kind: str, size: int, family: str, snapshot: Snapshot) -> None:
    network = tiny(kind)
    with pytest.raises(RecipeError) as raised:
        experts.check_expert_counts(network, [one.num_experts for one in experts_of(network)], size)
    assert str(raised.value).startswith(f"policy.backend.expert_parallel: got {size} with {family}, ")
    snapshot(raised.value)


@pytest.mark.parametrize(("number", "size", "dim"), [(8, 32, 0), (6, 32, 1), (6, 30, None)])
def test_copies_of_a_group_have_some_experts_each_or_some_rows_of_each(
    number: int, size: int, dim: int | None
) -> None:
    layer: Any = nn.Module()
    layer.num_experts, layer.weight = number, nn.Parameter(torch.zeros(number, size, 3))
    if dim is not None:
        assert experts.fsdp_shard_dim(layer, 4) == dim
        return
    with pytest.raises(RecipeError, match=r"^policy\.backend\.expert_parallel: the 6 experts"):
        experts.fsdp_shard_dim(layer, 4)
