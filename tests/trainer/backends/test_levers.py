"""What makes a step fast changes nothing but rounding, and a step reads one number back, at its end."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.models.llama import modeling_llama

from abrun.recipe.algorithms import Grpo, Ppo
from abrun.recipe.policy import Policy
from abrun.trainer.backends.dtensor import DtensorBackend, layers
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.backends.microbatches import Microbatches
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.grpo import PolicyLosses, PolicyObjective
from abrun.trainer.loop.ppo import PpoValueObjective
from abrun.trainer.models.checks import check_network
from abrun.trainer.models.families import facts_of
from abrun.trainer.rl.batch import ActorCriticBatch
from abrun.trainer.rl.metrics import MetricParts, all_reduce
from tests.spawn import run_ranks
from tests.trainer.backends.policies import CPU, WeightedLoss, gradients, make_backend, plain_logprobs, tiny
from tests.trainer.backends.test_dtensor import assert_same
from tests.trainer.backends.test_packing import of_prompts
from tests.trainer.backends.test_value_model import make_critic

EPS = torch.finfo(torch.float32).eps
# Prompts of groups of four, and the tokens of their completions.
GROUPS = [(1 + 5 * row % 7, [1 + (3 * row + each) % 9 for each in range(4)]) for row in range(10)]
TOGETHER: dict[str, Any] = {
    "backend": {"keep_gathered": True},
    "packing": True,
    "micro_batch_tokens": 60,
    "share_prompts": True,
    "logprobs": {"impl": "chunked", "one_pass": True},
}
CONTEXT = TOGETHER | {
    "backend": {"keep_gathered": True, "context_parallel": 2},
    "share_prompts": False,
    "activation_checkpointing": "full",
}
EVERYTHING = TOGETHER | {"compile": True}
SELECTIVE = EVERYTHING | {"activation_checkpointing": "selective"}


@pytest.fixture
def liger_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Liger that replaces the same names as the real one, and whose kernels refuse the CPU."""

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    class GpuNorm(modeling_llama.LlamaRMSNorm):
        forward = refuse

    class GpuMlp(modeling_llama.LlamaMLP):
        forward = refuse

    def apply_to_llama(*, model: Any, cross_entropy: bool, fused_linear_cross_entropy: bool) -> None:
        assert not (cross_entropy or fused_linear_cross_entropy)
        modeling_llama.apply_rotary_pos_emb = refuse
        modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP = GpuNorm, GpuMlp
        for layer in model.model.layers:
            layer.mlp.forward = refuse

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))  # restored at the end
    monkeypatch.setattr(layers, "STOCK_VALUES", {})
    patches = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply_to_llama})
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace(monkey_patch=patches))


@pytest.mark.parametrize("packing", [{}, {"packing": True}, TOGETHER], ids=["rows", "packed", "shared"])
def test_networks_are_checked_before_they_get_kernels_that_need_a_gpu(
    packing: dict[str, Any], liger_for_gpus: None, group: None
) -> None:
    """A policy, its reference, a value model, and a policy without Liger; their checks are on the CPU."""
    stock = modeling_llama.apply_rotary_pos_emb
    num_loads = 0

    def load_checked_network() -> Any:
        nonlocal num_loads
        network = tiny()
        check_network(network, facts_of(network))
        num_loads += 1
        return network

    def load(*, liger: bool) -> DtensorBackend:
        settings = Policy.model_validate({"liger": liger} | packing)
        return DtensorBackend(load_checked_network, settings, make_ranks(CPU, {}))

    policy = load(liger=True)
    load(liger=True)
    policy.make_value_model(Ppo.model_validate({"type": "ppo"}), seed=3)
    load(liger=False)
    assert num_loads == 4 and modeling_llama.apply_rotary_pos_emb is not stock
    with pytest.raises(RuntimeError, match="cpu tensor"):
        policy.compute_logprobs(of_prompts(GROUPS))


def policy_step() -> tuple[ActorCriticBatch, PolicyObjective]:
    """The update of a step of GRPO whose ratios are clipped in part, with all terms of a loss.

    One completion is filtered, as an overlong one is. `returns` are numbers that tell the tokens apart.
    """
    sequences = of_prompts(GROUPS)
    sequences.token_mask[5] = False
    mask = sequences.token_mask
    noise = torch.randn(3, *mask.shape, generator=torch.Generator().manual_seed(1)) * 0.2
    with torch.no_grad():
        nearly = plain_logprobs(tiny(), of_prompts(GROUPS))[0]
    old, inference, reference = torch.where(mask, nearly + noise, 0.0)
    batch = sequences.with_fields(
        ActorCriticBatch,
        old_logprobs=old,
        inference_logprobs=inference,
        reference_logprobs=reference,
        importance_weights=torch.where(mask, (old - inference).exp().clamp(max=1.1), 0.0),
        loss_weights=mask / mask.sum(dtype=torch.float64),
        advantages=sequences.advantages,
        old_values=torch.zeros(mask.shape),
        returns=torch.arange(float(mask.numel())).view(mask.shape),
    )
    settings = Grpo.model_validate(
        {
            "type": "grpo",
            "prompts_per_step": len(GROUPS),
            "group_size": 4,
            "kl_coefficient": 0.1,
            "entropy_coefficient": 0.02,
            "ratio": "old",
            "importance_correction": {"type": "truncated", "high": 1.1},
            "metrics": "full",
        }
    )
    num_tokens, num_sequences = float(mask.sum()), float(mask.any(dim=1).sum())
    return batch, PolicyObjective(settings=settings, num_tokens=num_tokens, num_sequences=num_sequences)


@dataclass(frozen=True)
class Watched:
    """An objective, and the log-prob and the entropy that it was told of each token, by its number."""

    objective: PolicyObjective
    told: Tensor  # [2, all tokens]

    @property
    def entropies(self) -> EntropyMode:
        return self.objective.entropies

    def losses(self, batch: ActorCriticBatch, logprobs: Tensor, entropy: Tensor | None) -> PolicyLosses:
        return self.objective.losses(batch, logprobs, entropy)

    def metrics(
        self, batch: ActorCriticBatch, logprobs: Tensor, entropy: Tensor | None, losses: PolicyLosses
    ) -> MetricParts:
        numbers = batch.returns[batch.token_mask].long()
        assert entropy is not None
        self.told[:, numbers] += torch.stack([logprobs, entropy])[:, batch.token_mask]
        return self.objective.metrics(batch, logprobs, entropy, losses)


def found_with(policy: dict[str, Any]) -> dict[str, Any]:
    """By this rank's share of the step: log-probs and entropies, gradients, loss and all metrics."""
    batch, objective = policy_step()
    backend = make_backend(**policy)
    watched = Watched(objective, torch.zeros(2, batch.token_mask.numel()))
    rows = backend.ranks.data_slice(len(batch))
    share = batch[rows]
    parts = backend.forward_backward(share, watched)
    return {
        "gradients": gradients(backend),
        "tokens": watched.told,
        "rows": rows,
        "logprobs": backend.compute_logprobs(share),
        "metrics": all_reduce(parts, backend.ranks.data),
    }


def found_on_ranks(rank: int, world_size: int, policy: dict[str, Any]) -> dict[str, Any]:
    return found_with(policy)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(TOGETHER, id="without compile"),
        pytest.param(CONTEXT, id="context", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, id="everything", marks=pytest.mark.slow),
        pytest.param(SELECTIVE, id="selective", marks=pytest.mark.slow),
    ],
)
def test_all_levers_together_change_only_rounding(policy: dict[str, Any], group: None) -> None:
    """Over two ranks, against none of them on one.

    A number here comes of some fifty roundings in a row, each of half an EPS of what it rounds at most: what
    they add up to is allowed to be 64 EPS of a gradient's norm and of a metric, and 16 EPS of the largest
    log-prob or entropy (8), through which no backward pass goes. A loss of terms that cancel has 8 EPS of 1.
    """
    expected, by_rank = found_with({}), run_ranks(found_on_ranks, 2, policy, timeout_s=600)
    one, other = (found["tokens"] for found in by_rank)
    atol = 16 * EPS * float(expected["tokens"].max())
    tokens = torch.where(one != 0, one, other)  # ranks of a context are both told of all
    torch.testing.assert_close(tokens, expected["tokens"], rtol=0, atol=atol)
    names = {name for name, _ in tiny().named_parameters()}
    for found in by_rank:
        own = expected["logprobs"][found["rows"]]
        torch.testing.assert_close(found["logprobs"], own, rtol=0, atol=atol)
        assert found["gradients"].keys() == expected["gradients"].keys() == names
        for name, gradient in expected["gradients"].items():
            error = (found["gradients"][name] - gradient).norm() / gradient.norm()
            assert error <= 64 * EPS, f"{name}: {float(error)}"
        assert found["metrics"].keys() == expected["metrics"].keys()
        assert 0.05 < expected["metrics"]["train/clip_fraction"] < 0.5
        for name, metric in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(metric, rel=64 * EPS, abs=8 * EPS), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_selective_keeps_less_and_computes_again(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes kept for the backward pass, and matrix products of both; by torch's partition of a compiled
    layer's graph, whose parts are then called as they are."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    batch = of_prompts([(9, [30, 20]), (5, [40])])
    loss = WeightedLoss(float(batch.token_mask.sum()))
    kept: dict[str, int] = {}
    products: dict[str, int] = {}
    found = {}
    torch.compiler.reset()
    for name in ("none", "selective", "full"):
        compiled = name == "selective"  # which keeps a tenth less than an eager layer by itself
        backend = make_backend(packing=True, compile=compiled, activation_checkpointing=name)
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.forward_backward(batch, loss)
            found[name], kept[name] = gradients(backend), sum(sizes.values())
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                backend.forward_backward(batch, loss)
        products[name] = sum(event.name in ("aten::mm", "aten::bmm") for event in profiled.events() or ())
    torch.compiler.reset()
    assert 0.8 * kept["none"] > kept["selective"] > 1.2 * kept["full"] > 0
    assert products["none"] < products["selective"] < products["full"]
    for name in ("selective", "full"):
        assert_same(found[name], found["none"], rtol=1e-4, atol=1e-6)


# What makes the CPU wait for a GPU. Some of it is no operator on the CPU itself, and is counted where called.
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
UNSEEN = {"tolist", "numpy", "cpu"}
ADAMW = "aten::_fused_adamw_"


def waits_of(function: Callable[[], Any]) -> list[str]:
    """Which of those a function calls in their order, and the optimizer's operator; nothing inside of one."""
    with pytest.MonkeyPatch.context() as patched:
        for name in UNSEEN:
            patched.setattr(Tensor, name, record_function(name)(getattr(Tensor, name)))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            function()
    recorded: Any = profiled.profiler  # whose `events` take seconds to tell what is inside of what
    names, found, until = {*READS, *UNSEEN, ADAMW}, [], 0
    events = [event for event in recorded.kineto_results.events() if event.name() in names]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.start_ns() >= until:
            found.append(event.name())
            until = event.end_ns()
    return found


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"micro_batch_size": 20}, id="padded"),
        pytest.param(
            {"packing": True, "micro_batch_tokens": 200, "activation_checkpointing": "full"}, id="packed"
        ),
        pytest.param(TOGETHER | {"micro_batch_tokens": 150}, id="together"),
        pytest.param(SELECTIVE, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_a_step_reads_one_number_back_when_it_is_done(
    policy: dict[str, Any], group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its microbatches are known before; then come all passes, clipping and AdamW, which is one operator for
    matrices and one for vectors, and at last the gradient's norm. So with the value model."""
    batch, of_policy = policy_step()
    backend, critic = make_critic(policy=policy)
    of_values = PpoValueObjective(clip_range=0.2, num_tokens=of_policy.num_tokens)

    def update() -> None:
        critic.forward_backward(batch, of_values)
        critic.optimizer_step(1e-6)
        backend.forward_backward(batch, of_policy)
        backend.optimizer_step(1e-6)

    made = Microbatches(batch, backend.settings, backend.ranks)
    assert len(made) >= 2
    monkeypatch.setattr("abrun.trainer.backends.policy.Microbatches", lambda *_: made)
    update()  # which compiles, and makes the optimizer's state
    assert waits_of(update) == 2 * [ADAMW, ADAMW, "aten::_local_scalar_dense"]


@pytest.mark.parametrize("size", [20, 2])
def test_rows_are_cut_by_lengths_that_are_read_back_once(size: int) -> None:
    batch, _ = policy_step()
    assert waits_of(lambda: list(batch.split(size))) == ["tolist"]
