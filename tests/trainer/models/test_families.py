"""Families known by facts: the trainer's logits are the network's own, or the network is refused."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from abrun.errors import RecipeError
from abrun.trainer.models.checks import check_decoding, check_network
from abrun.trainer.models.families import Facts, facts_of
from tests.snapshot import Snapshot
from tests.trainer.models.architectures import tiny_network

TOKENS = torch.arange(3, 19).view(2, 8)

# Settings beyond the sizes, logit_scale, logit_softcap.
SCALES: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "qwen2": ({}, 1.0, None),
    "qwen3": ({}, 1.0, None),
    "llama": ({}, 1.0, None),
    "gpt2": ({}, 1.0, None),
    "gpt_oss": ({}, 1.0, None),
    "gemma2": ({"final_logit_softcapping": 7.0}, 1.0, 7.0),
    "gemma3_text": ({"final_logit_softcapping": 7.0}, 1.0, 7.0),
    "gemma3": ({}, 1.0, None),
    "gemma3n_text": ({}, 1.0, 30.0),
    "gemma4": ({"final_logit_softcapping": 7.0}, 1.0, 7.0),
    "recurrent_gemma": ({}, 1.0, 30.0),
    "xlstm": ({}, 1.0, 30.0),
    "cohere": ({"logit_scale": 0.3}, 0.3, None),
    "cohere2": ({"logit_scale": 0.3}, 0.3, None),
    "granite": ({"logits_scaling": 4.0}, 0.25, None),
    "granitemoe": ({"logits_scaling": 4.0}, 0.25, None),
    "falcon_h1": ({"lm_head_multiplier": 0.3}, 0.3, None),
    "hyperclovax": ({"logits_scaling": 4.0}, 4.0, None),
    "minicpm3": ({"dim_model_base": 16}, 0.5, None),
    "inkling_text": ({"logits_mup_width_multiplier": 5.0}, 0.2, None),
    "inkling2_text": ({"final_logit_softcapping": 7.0}, 1.0, 7.0),
    "glm4_moe": ({}, 1.0, None),
    "deepseek_v3": ({}, 1.0, None),
    "falcon": ({}, 1.0, None),
    "persimmon": ({}, 1.0, None),
    "fuyu": ({}, 1.0, None),
    "llama4": ({}, 1.0, None),
    "mllama": ({}, 1.0, None),
    "doge": ({}, 1.0, None),
}
NOISY: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_dropout": 0.3},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "gpt_bigcode": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "seed_oss": {"residual_dropout": 0.3},
    "opt": {"dropout": 0.3, "layerdrop": 0.5},
    "bloom": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "persimmon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
    "doge": {"hidden_dropout": 0.3},
    "gemma3": {"attention_dropout": 0.3},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gptj": ({}, "an LM head with a bias"),
    "phi": ({}, "an LM head with a bias"),
    "bert": ({}, "an LM head with a bias"),
    "phimoe": ({}, "whose router samples experts in training"),
    "cpmant": ({}, "where a token's logits depend on the tokens after it"),
    "prophetnet": ({}, "whose own logits are not those of its last hidden states"),
    "inkling_text": (
        {"unpadded_vocab_size": 100},
        "whose own logits are not those of its last hidden states",
    ),
    # The text model alone applies the cap that its configuration declares.
    "gemma3": ({"final_logit_softcapping": 7.0}, "whose own logits are not those of its last hidden states"),
    "zamba": ({}, "whose layers share weights"),
}


def our_logits(facts: Facts) -> Tensor:
    """The formula of the log-prob kernels, spelled out."""
    base: Any = facts.base
    logits = (
        facts.logit_scale * base(input_ids=TOKENS, use_cache=False).last_hidden_state @ facts.head.weight.T
    )
    return (
        logits if facts.logit_softcap is None else facts.logit_softcap * (logits / facts.logit_softcap).tanh()
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", SCALES)
def test_the_facts_give_the_networks_own_logits(kind: str) -> None:
    settings, scale, softcap = SCALES[kind]
    network = tiny_network(kind, **settings).eval()
    network.get_output_embeddings().weight.mul_(50)  # so that a soft cap bends
    own = network(input_ids=TOKENS, use_cache=False).logits
    facts = facts_of(network)
    assert facts.logit_scale == pytest.approx(scale) and facts.logit_softcap == softcap
    torch.testing.assert_close(our_logits(facts), own, atol=1e-4, rtol=1e-4)
    check_network(network, facts)


@pytest.mark.parametrize(
    "kind", ["gemma3", "gemma4", "qwen3_5", "mllama", "llama4", "opt", "gpt2", "gemma3n_text"]
)
def test_the_layers_are_the_text_decoders(kind: str) -> None:
    """A vision tower's layers come first in the wrappers, other lists come first in some decoders."""
    network = tiny_network(kind)
    layers, ran = facts_of(network).layers, []
    assert len(layers) == network.config.get_text_config().num_hidden_layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: ran.append(module))
    facts_of(network).base(input_ids=TOKENS, use_cache=False)
    assert ran == list(layers)


@torch.no_grad()
@pytest.mark.parametrize("kind", NOISY)
def test_what_is_random_in_training_is_turned_off(kind: str) -> None:
    network = tiny_network(kind, **NOISY[kind])
    published = network.eval()(input_ids=TOKENS, use_cache=False).logits
    check_network(network, facts_of(network))
    for seed in range(3):
        torch.manual_seed(seed)
        trained = network.train()(input_ids=TOKENS, use_cache=False).logits
        torch.testing.assert_close(trained, published, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_trained_wrongly_is_refused(kind: str) -> None:
    settings, reason = REFUSED[kind]
    network = tiny_network(kind, **settings)
    with pytest.raises(RecipeError) as caught:
        check_network(network, facts_of(network))
    line = str(caught.value)
    assert line.startswith(f"model: got {type(network).__name__}, ") and reason in line and "\n" not in line


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("gemma2", "final_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", 29.0),
        ("cohere", "logit_scale", 0.063),
        ("granite", "logits_scaling", 1.01),
    ],
)
def test_a_scale_or_cap_that_is_not_the_networks_is_refused(
    kind: str, field: str, value: float | None, snapshot: Snapshot
) -> None:
    """At random weights, whose logits are too small for a cap to bend."""
    network, other = tiny_network(kind), tiny_network(kind)
    check_network(network, facts_of(network))
    setattr(other.config, field, value)
    found, facts = facts_of(other), facts_of(network)
    wrong = Facts(
        base=facts.base,
        layers=facts.layers,
        head=facts.head,
        logit_scale=found.logit_scale,
        logit_softcap=found.logit_softcap,
    )
    with pytest.raises(RecipeError) as refusal:
        check_network(network, wrong)
    snapshot(refusal.value)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "gemma3", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_cache_decodes_what_one_pass_gives(kind: str) -> None:
    network = tiny_network(kind)
    check_decoding(network, facts_of(network))
    assert network.training


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "no attribute 'past_key_values'|differ"),  # since transformers 5.24 it takes a cache
        ("openai-gpt", "no attribute '(past_key_values|cache)'"),
        ("bart", "differ"),  # its positions count from the padding
    ],
)
def test_what_the_torch_engine_would_sample_wrongly_is_refused(kind: str, reason: str) -> None:
    network = tiny_network(kind)
    with pytest.raises(RecipeError, match=r"^rollout\.engine: got 'torch' with ") as caught:
        check_decoding(network, facts_of(network))
    assert re.search(reason, str(caught.value)) and "\n" not in str(caught.value)


class Noise(nn.Module):
    """Noise of no known name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, *rest: Any, **settings: Any) -> Tensor:
        out = self.inner(hidden, *rest, **settings)
        return out * torch.empty(()).uniform_(0.99, 1.01) if self.training else out


def test_noise_of_no_known_name_is_refused(snapshot: Snapshot) -> None:
    network = tiny_network("llama")
    network.model.layers[0].mlp = Noise(network.model.layers[0].mlp)
    with pytest.raises(RecipeError) as refusal:
        check_network(network, facts_of(network))
    snapshot(refusal.value)


def test_an_error_of_a_foreign_forward_pass_is_one_line(snapshot: Snapshot) -> None:
    network = tiny_network("llama")
    network.model.layers[0].mlp = nn.Linear(3, 3)
    with pytest.raises(RecipeError) as caught:
        check_network(network, facts_of(network))
    snapshot(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "deepseek_v3", "rwkv"])
@pytest.mark.parametrize("training", [True, False])
def test_a_check_leaves_everything_as_it_was(kind: str, training: bool) -> None:
    network = tiny_network(kind).train(training)
    next(network.children()).train(not training)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    state = torch.get_rng_state()
    check_network(network, facts_of(network))
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(module._forward_hooks for module in network.modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
@torch.no_grad()
def test_every_family_is_right_or_refused_in_one_line(kind: str) -> None:
    """With the noise that its configuration knows, all of it."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in tiny_network(kind).parameters())
    except Exception as error:
        pytest.skip(f"no tiny configuration: {error}")
    if size > 60_000_000:
        pytest.skip(f"{size} parameters")
    noise = None if kind == "diffllama" else 0.3  # which refuses to be built with dropout
    network, ran = tiny_network(kind, noise=noise), []
    try:
        facts = facts_of(network)
        check_network(network.train(), facts)
    except RecipeError as error:
        assert "\n" not in str(error)
        return
    published = network.eval()(input_ids=TOKENS, use_cache=False).logits
    network.train()
    for layer in facts.layers:
        layer.register_forward_pre_hook(lambda module, _: ran.append(module))
    for seed in range(3):
        torch.manual_seed(seed)
        assert network.training
        trained = our_logits(facts)
        torch.testing.assert_close(trained, published, atol=1e-4, rtol=1e-4)
    assert set(ran) == set(facts.layers)
