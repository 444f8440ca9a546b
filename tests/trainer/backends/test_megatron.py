"""The megatron backend on one rank, against autograd and torch.optim.AdamW on the Hugging Face model."""

import importlib.metadata
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from abrun.errors import RecipeError
from abrun.recipe.extras import megatron_refusal
from abrun.recipe.policy import Policy
from abrun.trainer.backends.megatron import library
from abrun.trainer.backends.ranks import make_ranks
from tests.trainer.backends.megatron_policies import gradients, make_backend, network, weights_of
from tests.trainer.backends.policies import (
    CPU,
    WeightedLoss,
    plain_logprobs,
    plain_loss,
    plain_steps,
    some_batch,
    tiny,
)
from tests.trainer.backends.test_dtensor import assert_same
from tests.trainer.loop.runs import train_here
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.pairwise import pairwise
from tests.written_runs import make_run, run_config

LEARNING_RATES = (0.01, 0.02, 0.005)
OPTIMIZER = {"weight_decay": 0.3, "max_grad_norm": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize(
    "kind, logprobs, cut, checkpointing",
    pairwise(
        KINDS,
        [{}, {"impl": "chunked", "chunk_size": 40}, {"impl": "chunked", "one_pass": True}],
        [{}, {"micro_batch_size": 3}, {"packing": True, "micro_batch_tokens": 20}],
        [False, True],
    ),
)
def test_gradients_are_those_of_plain_autograd(
    kind: str, logprobs: dict[str, Any], cut: dict[str, Any], checkpointing: bool, group: None
) -> None:
    settings = {**cut, "logprobs": logprobs, "activation_checkpointing": checkpointing}
    backend, batch = make_backend(kind, temperature=0.7, **settings), some_batch()
    parts = backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    plain = network(kind)
    loss = plain_loss(plain, batch, 0.7)
    loss.backward()
    assert float(parts.sums["loss"]) == pytest.approx(float(loss), rel=1e-5)
    expected: Any = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same(gradients(backend), expected, rtol=1e-4, atol=1e-6)


def test_a_padding_token_that_was_sampled_trains_no_embedding(group: None) -> None:
    """As Hugging Face's embeddings have it, so that both backends agree."""
    batch = some_batch()
    batch.token_ids[2, 3] = 0
    backend, plain = make_backend("llama"), network("llama")
    backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    plain_loss(plain, batch).backward()
    found, expected = gradients(backend)["model.embed_tokens.weight"], plain.model.embed_tokens.weight.grad
    assert not found[0].any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def train(backend: Any, steps: range = range(3)) -> list[float]:
    """Steps on the global batches; returns the gradient norms."""
    norms = []
    for step in steps:
        batch = some_batch(step)
        backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
        norms.append(backend.optimizer_step(LEARNING_RATES[step]))
    return norms


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_those_of_torch_adamw(kind: str, group: None) -> None:
    backend = make_backend(kind, optimizer=OPTIMIZER)
    plain = network(kind)
    norms = plain_steps(plain, OPTIMIZER, LEARNING_RATES)["norms"]
    weights = weights_of(plain)
    assert train(backend) == pytest.approx(norms, rel=1e-4)
    assert min(norms) > 2 * OPTIMIZER["max_grad_norm"], "clipping should matter"
    assert_same(dict(backend.gather_weights()), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_to_the_bit(dtype: str, group: None) -> None:
    settings: dict[str, Any] = {"dtype": dtype}
    first = make_backend(**settings)
    train(first, range(2))
    state = {name: tensor.clone() for name, tensor in first.local_state().items()}
    second = make_backend(**settings)
    assert second.local_state().keys() <= state.keys()
    second.load_local_state(state)
    assert train(first, range(2, 3)) == train(second, range(2, 3))
    for (name, one), (_, other) in zip(first.gather_weights(), second.gather_weights(), strict=True):
        assert torch.equal(one, other), name


def test_masters_in_float32_are_loaded_trained_and_exported(group: None) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    backend, expected = make_backend(**settings), weights_of(network())
    for name, weight in backend.gather_weights():
        assert torch.equal(weight, expected[name]), name
    for step in range(3):  # too small for bfloat16
        backend.forward_backward(some_batch(step), WeightedLoss(10.0))
        backend.optimizer_step(1e-6)
    moved = [not torch.equal(weight, expected[name]) for name, weight in backend.gather_weights()]
    assert all(moved)


def test_bfloat16_computes_near(group: None) -> None:
    batch, found = some_batch(), []
    for dtype in ("float32", "bfloat16"):
        backend = make_backend(dtype=dtype)
        found.append(backend.compute_logprobs(batch))
        assert train(backend)[0] == pytest.approx(train(make_backend())[0], rel=0.05)
    difference = (found[0] - found[1])[batch.token_mask].abs()
    assert 0 < float(difference.mean()) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_from_a_cache_is_the_hugging_face_model(kind: str, group: None) -> None:
    backend = make_backend(kind, temperature=1.3, optimizer=OPTIMIZER)
    train(backend)
    weights = dict(backend._full_weights())
    plain = network(kind)
    plain.load_state_dict(weights, strict=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), backend.decoding() as decoder:
        _, cache = decoder(ids[:, :3], torch.ones(1, 3).long(), torch.arange(3)[None], None)
        found, _ = decoder(ids[:, 3:], torch.ones(1, 4).long(), torch.tensor([[3]]), cache)
        torch.testing.assert_close(found, plain(ids).logits[:, -1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_a_hugging_face_checkpoint(kind: str, tmp_path: Path, group: None) -> None:
    backend = make_backend(kind)
    backend.save(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in network(kind).named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name


def test_the_quickstart_takes_the_steps_of_dtensor(tmp_path: Path, group: None) -> None:
    """To float32's rounding, with what it samples, validates and keeps; and from a checkpoint on."""
    settings = ("steps=4", "validation={every: 2, num_prompts: 4}", f"task={verifier(tmp_path)}")
    rows = [
        train_here(make_run(tmp_path / name, run_config(*settings, *more)))
        for name, more in (("dtensor", ()), ("megatron", ("policy.backend={type: megatron}",)))
    ]
    assert rows[0].keys() == rows[1].keys() == {0, 1, 2, 3, 4}
    for ours, other in zip(*(each.values() for each in rows), strict=True):
        assert ours.keys() == other.keys()
        for key, value in ours.items():
            if not key.startswith(("timing/", "performance/", "memory/")):
                assert other[key] == pytest.approx(value, rel=2e-4, abs=1e-5), key
    assert rows[0][1]["train/grad_norm"] > 0


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "heads": (
        "qwen2",
        {},
        {"tensor_parallel": 3},
        r"tensor_parallel: got 3 with a model of 4 attention heads",
    ),
    "key heads": (
        "qwen2",
        {},
        {"tensor_parallel": 4},
        r"tensor_parallel: got 4 with a model of 2 key and value",
    ),
    "layers": ("qwen2", {}, {"pipeline_parallel": 3}, r"pipeline_parallel: got 3 with a model of 4 layers"),
    "experts": ("qwen3_moe", {}, {"expert_parallel": 3}, r"expert_parallel: got 3 with a model of 8 experts"),
    "no experts": (
        "qwen2",
        {},
        {"expert_parallel": 2},
        r"expert_parallel: got 2 with a qwen2 model, which has",
    ),
    "experts cut": (
        "qwen3_moe",
        {},
        {"tensor_parallel": 2, "sequence_parallel": True},
        r"expert_parallel: got 1 with tensor_parallel 2, but experts",
    ),
    "bias": (
        "llama",
        {"attention_bias": True},
        {},
        r"type: got 'megatron' with Llama\w+, which .*attention_bias",
    ),
    "sliding": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
        {},
        r"type: got 'megatron' with a qwen2 model, which has layers of sliding_attention",
    ),
    "a window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8},
        {},
        r"type: got 'megatron' with a qwen3_moe model, whose layers attend to windows of 8 tokens",
    ),
    "some layers": ("qwen3_moe", {"mlp_only_layers": [1]}, {}, r"type: .*layers without experts"),
    "rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        r"type: .*scaled rotary embeddings",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case: str, group: None) -> None:
    kind, changes, cut, message = REFUSED[case]
    with pytest.raises(RecipeError, match=r"^policy\.backend\." + message) as raised:
        from abrun.recipe.policy import Megatron, Policy
        from abrun.trainer.backends.megatron.network import make_network
        from abrun.trainer.models.families import facts_of

        model = network(kind, **changes)
        settings = Megatron.model_validate({"type": "megatron", **cut})
        make_network(model, facts_of(model), Policy(), settings, on_cpu=True)
    assert "\n" not in str(raised.value) and "use " in str(raised.value)


def test_a_family_that_megatron_does_not_build_is_refused(group: None) -> None:
    from abrun.trainer.backends.megatron.backend import MegatronBackend

    settings = Policy.model_validate({"backend": {"type": "megatron"}})
    with pytest.raises(RecipeError, match="got 'megatron' with a gemma2"):
        MegatronBackend(partial(tiny, "gemma2"), settings, make_ranks(CPU, {}))


@pytest.mark.parametrize("scaling", ["linear", "llama3"])
def test_stretched_rotary_embeddings_are_the_familys_own(scaling: str, group: None) -> None:
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": 1e4, "factor": 4.0}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    changes, batch = {"rope_parameters": rope}, some_batch()
    with torch.no_grad():
        expected, _ = plain_logprobs(network("llama", **changes), batch)
        plain, _ = plain_logprobs(network("llama"), batch)
    found = make_backend("llama", changes=changes).compute_logprobs(batch)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert float((plain - expected).abs().max()) > 1e-3


def test_another_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version, its absence or that of what it imports, or a signature that this backend does not call."""
    installed = importlib.metadata.version("megatron-core")
    monkeypatch.setitem(library.REQUIRED_ARGUMENTS, "megatron.core.models.gpt:GPTModel.forward", ("renamed",))
    with pytest.raises(RecipeError, match=rf"core {installed}, whose GPTModel\.forward .* renamed"):
        library.check_megatron()
    for version in ("0.16.1", "0.17.0", "0.19.2"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        assert megatron_refusal() is None
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        refusal = megatron_refusal()
        assert refusal and "which needs the missing package triton" in refusal
    for version in ("0.16.0", "0.20.0", "0.20.0rc0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        refusal = megatron_refusal()
        assert refusal and f"megatron-core {version}, but supported are >=0.16.1,<0.20;" in refusal

    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(RecipeError, match=r"megatron-core is missing; pip install 'abrun\[megatron\]'"):
        library.check_megatron()
