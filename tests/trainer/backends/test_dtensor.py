"""The dtensor backend against plain autograd and torch.optim.AdamW on the Hugging Face model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.trainer.backends import head
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from tests.conftest import TRITON_ON_CPU, needs_interpreter
from tests.spawn import run_ranks
from tests.trainer.backends.policies import (
    CPU,
    WeightedLoss,
    gradients,
    make_backend,
    parameters,
    plain_logprobs,
    plain_loss,
    plain_steps,
    rows,
    some_batch,
    tiny,
)
from tests.trainer.pairwise import pairwise

LEARNING_RATES = (0.01, 0.02, 0.005)
OPTIMIZER = {"weight_decay": 0.3, "max_grad_norm": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
IMPLS = [
    pytest.param({"impl": "logits"}, id="logits"),
    pytest.param({"impl": "chunked", "chunk_size": 40}, id="chunked"),
    pytest.param({"impl": "triton"}, id="triton", marks=needs_interpreter),
]
ONE_PASS = [
    pytest.param({"impl": "chunked", "one_pass": True}, id="chunked-one-pass"),
    pytest.param({"impl": "triton", "one_pass": True}, id="triton-one-pass", marks=needs_interpreter),
]
KINDS = ("llama", "tied", "experts", "gemma2", "granite", "cohere")
ONE_PASS_ON_TWO_RANKS = ("chunked", "triton") if TRITON_ON_CPU else ("chunked",)


def is_slow(kind: str, logprobs: dict[str, Any], *_: Any) -> bool:
    """In Triton's interpreter, of the heads that are nearly others."""
    return logprobs["impl"] == "triton" and kind in ("tied", "granite", "cohere")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def plain_gradients(network: nn.Module, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    network.zero_grad()
    plain_loss(network, some_batch(), temperature).backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def plain_training(kind: str = "llama") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms and weights after three steps of torch's own AdamW."""
    network = tiny(kind)
    norms = plain_steps(network, OPTIMIZER, LEARNING_RATES)["norms"]
    return norms, dict(network.state_dict())


def train(backend: DtensorBackend) -> list[float]:
    """Three steps on the global batches; returns the gradient norms."""
    norms = []
    for step, learning_rate in enumerate(LEARNING_RATES):
        batch = some_batch(step)
        backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
        norms.append(backend.optimizer_step(learning_rate))
    return norms


@pytest.mark.parametrize(
    "kind, logprobs, micro_batch_size",
    pairwise(KINDS, [*IMPLS, *ONE_PASS], [None, 3], slow=is_slow),
)
def test_gradients_are_those_of_plain_autograd(
    kind: str, logprobs: dict[str, Any], micro_batch_size: int | None, group: None
) -> None:
    """Soft-capped (Gemma 2), divided (Granite) and multiplied (Cohere) logits included."""
    backend = make_backend(kind, temperature=0.7, logprobs=logprobs, micro_batch_size=micro_batch_size)
    batch = some_batch()
    parts = backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    network = tiny(kind)
    expected = plain_gradients(network, 0.7)
    assert_same(gradients(backend), expected, rtol=1e-4, atol=1e-6)
    assert float(parts.sums["loss"]) == pytest.approx(plain_loss(network, batch, 0.7).item(), rel=1e-5)


def test_a_small_budget_cuts_the_pass_into_slices_of_tokens(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = some_batch(size=256)
    num_tokens = float(batch.token_mask.sum())
    losses, found = [], []
    for budget_mib in (1, 512):
        monkeypatch.setattr(head, "DEFAULT_MEMORY_BUDGET_BYTES", budget_mib * 2**20)
        losses.append(WeightedLoss(num_tokens))
        backend = make_backend(logprobs={"impl": "chunked", "one_pass": True})
        parts = backend.forward_backward(batch, losses[-1])
        found.append(gradients(backend) | {"loss": parts.sums["loss"]})
    size, length = batch.token_ids.shape
    *slices, of_metrics = losses[0].shapes
    assert len(slices) > 1 and sum(n for (n,) in slices) == size * (length - 1)
    assert of_metrics == (size, length)
    assert losses[1].shapes == [(size * (length - 1),), (size, length)]
    assert_same(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("logprobs", [*IMPLS, *ONE_PASS])
def test_a_microbatch_without_tokens_adds_nothing(logprobs: dict[str, Any], group: None) -> None:
    batch, found = some_batch(size=3), []
    batch.token_mask[1] = False
    for micro_batch_size in (None, 1):
        backend = make_backend(logprobs=logprobs, micro_batch_size=micro_batch_size)
        backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
        found.append(gradients(backend))
    assert_same(*found, rtol=1e-4, atol=1e-6)


def test_a_kernel_that_cannot_run_here_is_refused_before_any_rollout(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RecipeError, match=r"policy\.logprobs\.impl: 'triton' needs a CUDA device") as caught:
        make_backend(logprobs={"impl": "triton"})
    assert len(str(caught.value).splitlines()) == 1 and "chunked" in str(caught.value)


def test_gradients_accumulate_over_calls_until_the_step(group: None) -> None:
    backend = make_backend(optimizer={"max_grad_norm": 100.0})
    batch = some_batch()
    loss = WeightedLoss(float(batch.token_mask.sum()))
    for part in (rows(batch, 0, 3), rows(batch, 3, 8)):
        backend.forward_backward(part, loss)
    assert_same(gradients(backend), plain_gradients(tiny()), rtol=1e-4, atol=1e-6)
    backend.optimizer_step(0.0)
    assert all(parameter.grad is None for parameter in backend.module.parameters())


@pytest.mark.parametrize("kind, logprobs", pairwise(KINDS, IMPLS, slow=is_slow))
def test_logprobs_are_those_of_the_stock_forward_pass(
    kind: str, logprobs: dict[str, Any], group: None
) -> None:
    """Soft-capped (Gemma 2), divided (Granite) and multiplied (Cohere) logits included."""
    batch = some_batch()
    with torch.no_grad():
        expected, entropy = plain_logprobs(tiny(kind), batch, 1.3)
    for micro_batch_size in (None, 3):
        backend = make_backend(kind, temperature=1.3, logprobs=logprobs, micro_batch_size=micro_batch_size)
        found = backend.compute_logprobs(batch)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        found_entropy = backend.module(batch.token_ids, batch.token_mask, "value").entropies
    torch.testing.assert_close(found_entropy, entropy, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_the_sampler_sees_the_stock_logits(kind: str, group: None) -> None:
    backend = make_backend(kind, temperature=1.3)
    token_ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), backend.decoding() as decoder:
        logits, _ = decoder(token_ids, torch.ones_like(token_ids), torch.arange(4)[None], None)
        expected = tiny(kind)(token_ids).logits[:, -1]  # over no temperature
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, logprobs, cut",
    pairwise(["llama", "experts"], IMPLS[:2], [{}, {"packing": True, "micro_batch_tokens": 25}]),
)
def test_three_steps_are_those_of_torch_adamw(
    kind: str, logprobs: dict[str, Any], cut: dict[str, Any], group: None
) -> None:
    backend = make_backend(kind, optimizer=OPTIMIZER, logprobs=logprobs, **cut)
    norms = train(backend)
    expected_norms, expected = plain_training(kind)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert min(norms) > 2 * OPTIMIZER["max_grad_norm"], "clipping should matter"
    assert_same(parameters(backend), expected, rtol=1e-4, atol=1e-5)


def test_two_ranks_gather_as_often_as_needed_and_decode_without_each_other(group: None) -> None:
    batch, whole = some_batch(), sum(parameter.numel() for parameter in tiny().parameters())
    backend = make_backend()
    backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    grads = gradients(backend)
    for found in run_ranks(on_two_ranks, 2):
        for key in ("each", "kept", "kept, checkpointed", *ONE_PASS_ON_TWO_RANKS):
            assert_same(found[key], grads, rtol=1e-4, atol=1e-6)
        # Two microbatches; two layers, gathered for either pass, and all else, gathered for both.
        assert found["collectives, each"] == {"foreach_all_gather": 2 * 5, "foreach_reduce": 2 * 3}
        for key in ("kept", "kept, checkpointed"):
            assert found[f"collectives, {key}"] == {"foreach_all_gather": 3, "foreach_reduce": 3}
        assert found["gathered_logits"] == found["gathered_logits_again"]
        # Each rank holds half of the weights and of the optimizer's two moments.
        assert found["num_held"] <= 0.52 * 3 * whole


@contextlib.contextmanager
def counted_collectives() -> Iterator[dict[str, int]]:
    counts: dict[str, int] = {"foreach_all_gather": 0, "foreach_reduce": 0}
    with pytest.MonkeyPatch.context() as patched:
        for name in counts:
            original = getattr(_fsdp_param_group, name)

            def counting(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
                counts[name] += 1
                return original(*args, **options)

            patched.setattr(_fsdp_param_group, name, counting)
        yield counts


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    batch = some_batch()
    share, loss = rows(batch, rank * 4, rank * 4 + 4), WeightedLoss(float(batch.token_mask.sum()))
    found: dict[str, Any] = {}
    for key, settings in (("each", {}), ("kept", KEPT), ("kept, checkpointed", KEPT | CHECKPOINTED)):
        backend = make_backend(**{"micro_batch_size": 2, **settings})
        with counted_collectives() as counts:
            backend.forward_backward(share, loss)
        found[key], found[f"collectives, {key}"] = gradients(backend), counts
    for impl in ONE_PASS_ON_TWO_RANKS:
        backend = make_backend(logprobs={"impl": impl, "one_pass": True}, micro_batch_size=3)
        backend.forward_backward(share, loss)
        found[impl] = gradients(backend)
    backend.optimizer_step(0.01)
    found["num_held"] = sum(tensor.numel() for tensor in backend.local_state().values())
    token_ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for key in ("gathered_logits", "gathered_logits_again"):
            with backend.decoding() as decoder:
                asked = token_ids, torch.ones_like(token_ids), torch.arange(3)[None], None
                if key == "gathered_logits" and rank == 1:
                    decoder(*asked)  # no collective: one may do more
                logits, _ = decoder(*asked)
                found[key] = logits.tolist()
    return found


CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
KEPT: dict[str, Any] = {"backend": {"type": "dtensor", "keep_gathered": True}}


@pytest.mark.parametrize("kind", ["llama", "tied", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_kept_gathered_train_to_the_bit_as_those_gathered_each_time(
    kind: str, dtype: str, group: None
) -> None:
    found = {}
    for name, kept in (("each time", {}), ("once", KEPT)):
        backend = make_backend(kind, optimizer=OPTIMIZER, micro_batch_size=3, dtype=dtype, **kept)
        norms = train(backend)
        after = backend.compute_logprobs(some_batch())
        found[name] = norms, after, {name: weight.clone() for name, weight in backend.gather_weights()}
    (norms, after, weights), expected = found["once"], found["each time"]
    assert norms == expected[0] and torch.equal(after, expected[1])
    assert_same(weights, expected[2], rtol=0, atol=0)


def test_activation_checkpointing_gives_the_same_gradients_by_a_second_forward(group: None) -> None:
    calls = {}
    found = {}
    for checkpointing in (False, True):
        backend = make_backend(activation_checkpointing=checkpointing)
        count = [0]
        backend.module.network.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        batch = some_batch()
        backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
        calls[checkpointing], found[checkpointing] = count[0], gradients(backend)
    assert calls == {False: 1, True: 2}
    assert_same(found[True], found[False])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize(
    "more", [{}, {"packing": True, "micro_batch_tokens": 40}, KEPT | {"packing": True}], ids=str
)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_layers_train_as_others_and_any_length_takes_the_same_code(
    kind: str, more: dict[str, Any], checkpointing: str, group: None
) -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    found, shapes = {}, {some_batch(step).token_ids.shape for step in range(3)}
    for compiled in (False, True):
        counters.clear()
        again = checkpointing if compiled else "none"
        settings = {"activation_checkpointing": again, **more}
        backend = make_backend(kind, optimizer=OPTIMIZER, compile=compiled, **settings)
        norms = train(backend)
        graphs = counters["stats"]["unique_graphs"]
        for size in (6, 3, 2):
            other = some_batch(seed=2 + size, size=size)
            shapes.add(other.token_ids.shape)
            backend.forward_backward(other, WeightedLoss(float(other.token_mask.sum())))
        backend.optimizer_step(LEARNING_RATES[-1])
        assert counters["stats"]["unique_graphs"] == graphs <= 5 * compiled and (graphs > 0) == compiled
        backend.compute_logprobs(some_batch())
        graphs = counters["stats"]["unique_graphs"]
        token_ids = torch.tensor([[5, 6, 7]])
        with backend.decoding() as decoder, torch.no_grad():
            logits, _ = decoder(token_ids, torch.ones_like(token_ids), torch.arange(3)[None], None)
        assert counters["stats"]["unique_graphs"] == graphs
        found[compiled] = norms, logits, {name: weight.clone() for name, weight in backend.gather_weights()}
    assert len(shapes) == 6 and len({length for _, length in shapes}) > 3
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-3)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-2, atol=1e-2)
    assert_same(found[True][2], found[False][2], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("logprobs", [{}, {"impl": "chunked", "one_pass": True}], ids=str)
def test_bfloat16_computes_near_and_keeps_float32_weights(logprobs: dict[str, Any], group: None) -> None:
    batch = some_batch()
    exact, near = make_backend(), make_backend(dtype="bfloat16", logprobs=logprobs)
    difference = (exact.compute_logprobs(batch) - near.compute_logprobs(batch))[batch.token_mask].abs()
    assert 0 < float(difference.mean()) < 0.05
    for backend in (exact, near):
        backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    assert {p.dtype for p in near.module.parameters()} == {torch.float32}
    expected = gradients(exact)
    for name, gradient in gradients(near).items():
        assert gradient.dtype == torch.float32
        cosine = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.98, name
    assert near.optimizer_step(0.01) > 0
    state = near.local_state()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_a_float32_head_is_nearer_in_bfloat16(group: None) -> None:
    batch = some_batch()

    def logprobs(**policy: Any) -> Tensor:
        network = tiny()
        with torch.no_grad():  # all logits far from 0, and so rounded by more than the layers before them
            network.lm_head.weight[:, 0] = 30.0
        backend = DtensorBackend(lambda: network, Policy.model_validate(policy), make_ranks(CPU, {}))
        return backend.compute_logprobs(batch)[batch.token_mask]

    exact, errors = logprobs(), {}
    for head_dtype in (None, "float32"):
        near = logprobs(dtype="bfloat16", logprobs={"impl": "logits", "head_dtype": head_dtype})
        errors[head_dtype] = float((near - exact).abs().mean())
    assert errors["float32"] < errors[None] / 2


def test_logprobs_have_no_gradient_and_none_outside_the_mask(group: None) -> None:
    backend, batch = make_backend(), some_batch()
    logprobs = backend.compute_logprobs(batch)
    assert logprobs.shape == batch.token_ids.shape and not logprobs.requires_grad
    assert (logprobs[~batch.token_mask] == 0).all() and (logprobs[batch.token_mask] < 0).all()
    assert all(parameter.grad is None for parameter in backend.module.parameters())


def test_a_parameter_that_never_had_a_gradient_is_restored_without_moments(group: None) -> None:
    """As an expert that no token has met."""

    def with_an_idle_weight() -> DtensorBackend:
        network = tiny()
        network.model.layers[1].idle = nn.Parameter(torch.ones(3, 4))
        return DtensorBackend(lambda: network, Policy(), make_ranks(CPU, {}))

    first, second, batch = with_an_idle_weight(), with_an_idle_weight(), some_batch()
    train(first)
    state = {name: tensor.clone() for name, tensor in first.local_state().items()}
    assert "weights/network.model.layers.1.idle" in state
    assert not any(name.startswith("optimizer/") and "idle" in name for name in state)
    train(second)
    second.load_local_state(state)
    for backend in (first, second):
        backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
        backend.optimizer_step(0.01)
    for name, tensor in first.local_state().items():
        assert torch.equal(tensor, second.local_state()[name]), name


def test_on_one_rank_weights_go_out_as_they_lie_there(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 340 weights before every rollout each would cost a turn through DTensor's bookkeeping."""
    backend = make_backend()
    whole = {name: parameter.full_tensor() for name, parameter in backend.module.network.named_parameters()}
    monkeypatch.setattr(DTensor, "redistribute", None)
    found = dict(backend.gather_weights())
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    assert not any(weight.requires_grad for weight in found.values())


def test_weights_hold_persistent_buffers(group: None) -> None:
    """A router's correction bias is none of the parameters, and part of the checkpoint."""
    network = tiny()
    network.model.layers[0].register_buffer("bias", torch.arange(3.0))
    network.model.layers[0].register_buffer("cache", torch.arange(3.0), persistent=False)
    weights = dict(DtensorBackend(lambda: network, Policy(), make_ranks(CPU, {})).gather_weights())
    assert weights["model.layers.0.bias"].tolist() == [0, 1, 2] and "model.layers.0.cache" not in weights


def test_a_frozen_reference_has_no_gradient_and_no_optimizer(group: None) -> None:
    backend = make_backend(trainable=False)
    assert not any(parameter.requires_grad for parameter in backend.module.parameters())
    assert all(name.startswith("weights/") for name in backend.local_state())
    expected = make_backend().compute_logprobs(some_batch())
    assert torch.equal(backend.compute_logprobs(some_batch()), expected)
    assert all(isinstance(p, DTensor) for p in backend.module.parameters()), "nothing stays gathered"


def test_a_head_with_a_bias_is_refused(group: None) -> None:
    network: Any = tiny()
    network.lm_head = nn.Linear(32, 99, bias=True)
    with pytest.raises(RecipeError, match="with a bias"):
        DtensorBackend(lambda: network, Policy(), make_ranks(CPU, {}))
