"""The check at load: which networks may compute streams of sequences, and how others are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from abrun.errors import RecipeError
from abrun.recipe.policy import Model, Policy
from abrun.trainer.backends import attention
from abrun.trainer.backends.attention import enable_streams, hidden_states
from abrun.trainer.backends.microbatches import make_packing
from abrun.trainer.models.families import facts_of
from abrun.trainer.models.weights import open_network
from tests.trainer.models.architectures import MAMBA_HEADS, tiny_network

SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
SHARED = {"packing": True, "share_prompts": True}
# Settings, the module that differs.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows": ("mistral", {"sliding_window": 16}, "model.layers.0.self_attn"),
    "windows in some layers": ("qwen2", SLIDING, "model.layers.1.self_attn"),
    "windows of a text configuration": ("gemma3", {}, "model.language_model.layers.0.self_attn"),
    "windows beside full layers": ("gemma4", {}, "model.language_model.layers.0.self_attn"),
    "chunks": ("llama4_text", {"attention_chunk_size": 16}, "model.layers.0.self_attn"),
    "sinks": ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "model.layers.0.self_attn"),
    "convolutions": ("lfm2", {"layer_types": ["full_attention", "conv"]}, "model.layers.1.conv"),
    "state-space": ("mamba2", {}, "backbone.layers.0.mixer"),
    "state-space beside attention": ("falcon_h1", MAMBA_HEADS | {"mamba_d_ssm": 64}, "model.layers.0.mamba"),
    "linear attention": ("qwen3_next", {}, "model.layers.0.linear_attn"),
    "learned positions": ("marian", {}, "model.decoder.layers.0.self_attn"),
}
TAKEN = ("llama", "qwen3_moe", "gemma", "gpt2", "opt", "deepseek_v3", "granite", "mixtral", "starcoder2")


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_whose_stream_differs_is_refused(case: str) -> None:
    kind, settings, module = REFUSED[case]
    for asked, policy in (
        ("policy.packing: got true", {"packing": True}),
        ("policy.backend.context_parallel: got 2", {"backend": {"context_parallel": 2}}),
    ):
        network = tiny_network(kind, **settings)
        with pytest.raises(RecipeError) as caught:
            enable_streams(network, Policy.model_validate(policy))
        line = str(caught.value)
        assert line.startswith(
            f"{asked} with {type(network).__name__}, whose {module} gives different results"
        )
        assert "\n" not in line and line.endswith(("use packing: false", "use context_parallel: 1"))


@pytest.mark.parametrize("kind", ["bloom", "falcon_mamba", "stablelm", "gemma2"])
def test_a_network_that_cannot_compute_a_stream_is_refused_in_a_line(kind: str) -> None:
    with pytest.raises(RecipeError, match="fails on packed sequences") as caught:
        enable_streams(tiny_network(kind), Policy(packing=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"packing": True}, SHARED], ids=["packed", "shared"])
@pytest.mark.parametrize("kind", TAKEN)
def test_others_are_taken_and_left_as_they_were(kind: str, settings: dict[str, Any]) -> None:
    network, before = tiny_network(kind), tiny_network(kind)
    state = torch.get_rng_state()
    enable_streams(network, Policy.model_validate(settings))
    assert torch.equal(state, torch.get_rng_state()) and network.training
    assert network.config._attn_implementation == attention.TRACED_ATTENTION
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before.parameters(), strict=True))
    rows = torch.arange(3, 15).view(2, 6)
    packing = make_packing([6, 6], 6, torch.device("cpu"))
    with torch.no_grad():
        expected = hidden_states(facts_of(before.eval()).base, rows, None)
        found = packing.unpack(hidden_states(facts_of(network.eval()).base, packing.pack(rows), packing))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_windows_are_short_for_a_while() -> None:
    """The forward pass is then that of a network built with such a window."""
    long, short = (tiny_network("gemma3", sliding_window=window).eval() for window in (512, 3))
    tokens = torch.arange(3, 19).view(2, 8)

    def logits(network: Any) -> Tensor:
        with torch.no_grad():
            return network(input_ids=tokens, use_cache=False).logits

    before = logits(long)
    with attention.short_windows(long):
        torch.testing.assert_close(logits(long), logits(short))
    assert torch.equal(logits(long), before) and not torch.allclose(before, logits(short))


def test_a_network_that_is_read_in_parts_is_tried_on_a_small_one(tmp_path: Any) -> None:
    """With a layer of each kind, wherever they stand."""
    for layer_types, taken in (
        (["full_attention"] * 3, True),
        (["full_attention", "sliding_attention"], False),
    ):
        layers = [*layer_types, "full_attention"]
        settings = {"num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": 64}
        tiny_network("qwen2", use_sliding_window=True, **settings).save_pretrained(tmp_path)
        network: Any = open_network(Model(path=str(tmp_path)), weights=None, seed=0, decodes=True)
        assert all(parameter.is_meta for parameter in network.parameters())
        if taken:
            enable_streams(network, Policy(packing=True))
            assert network.config._attn_implementation == attention.TRACED_ATTENTION
        else:
            with pytest.raises(RecipeError, match=r"packing: got true with Qwen2\w+, whose model\.layers\.1"):
                enable_streams(network, Policy(packing=True))


@pytest.mark.parametrize("flips", [1, 2])
def test_a_difference_that_other_tokens_do_not_have_is_rounding(
    flips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token near the border between two experts goes to the other one in a product of another shape."""
    network, streams = tiny_network("qwen3_moe"), 0

    def flipping(base: Any, tokens: Tensor, packing: Any) -> Tensor:
        nonlocal streams
        hidden = hidden_states(base, tokens, packing)
        streams += packing is not None
        return hidden + 1 if packing is not None and streams <= flips else hidden

    monkeypatch.setattr(attention, "hidden_states", flipping)
    if flips == 1:
        enable_streams(network, Policy(packing=True))
    else:
        with pytest.raises(RecipeError, match="gives different results for packed sequences"):
            enable_streams(network, Policy(packing=True))


def test_a_family_that_no_list_knows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to the last three tokens, whatever the configuration says."""
    from transformers.models.llama import modeling_llama

    make: Any = vars(modeling_llama)["create_causal_mask"]

    def windowed(*args: Any, **settings: Any) -> Any:
        length = settings["inputs_embeds"].shape[1]
        near = torch.ones(length, length).tril().triu(-2).bool()
        return make(*args, **settings) if settings.get("attention_mask") is not None else near[None, None]

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama",
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(RecipeError, match=r"whose model\.layers\.0\.self_attn gives different results"):
        enable_streams(network, Policy(packing=True))
