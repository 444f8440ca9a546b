"""The floor: parameters counted from shapes, and its terms."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from abrun.memory.floor import floor_of, known_shape, num_parameters
from abrun.models.presets import preset_config
from abrun.recipe.policy import Model
from abrun.recipe.presets import ARCHITECTURES
from abrun.recipe.run import OwnRunConfig

PRESETS = sorted(ARCHITECTURES)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_of_the_network(preset: str) -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(preset_config(Model.model_validate({"preset": preset})))
    counted = {True: 0, False: 0}
    for name, parameter in network.named_parameters():
        counted["experts" in name] += parameter.numel()
    shape = known_shape(Model.model_validate({"preset": preset}))
    assert shape is not None and num_parameters(shape) == (counted[False], counted[True])


def test_terms_of_a_floor() -> None:
    """qwen2.5-1.5b on two ranks, bfloat16, microbatches of 1,000 tokens: by hand."""
    raw = {
        "algorithm": {"type": "sft", "batch_size": 8},
        "model": {"preset": "qwen2.5-1.5b"},
        "task": {"type": "arithmetic"},
        "steps": 1,
        "cluster": {"gpus_per_node": 2},
        "policy": {"dtype": "bfloat16", "micro_batch_size": 1, "activation_checkpointing": "full"},
    }
    own = 1_543_714_304 // 2
    assert floor_of(OwnRunConfig.model_validate(raw), length=1000, num_sequences=1) == {
        "weights": 4 * own,
        "optimizer state": 8 * own,
        "gradients": 4 * own,
        "activations": 28 * 1000 * 1536 * 2,
        "log-probs": 2 * 1000 * 151_936 * 2,
    }
    whole = {"micro_batch_size": None, "activation_checkpointing": "none", "logprobs": {"impl": "chunked"}}
    raw["policy"] |= whole
    alone = floor_of(OwnRunConfig.model_validate(raw), length=10_000, num_sequences=1)
    assert alone is not None and "gradients" not in alone  # they take less than what the pass holds
    assert alone["activations"] == 28 * 10_000 * (4 * 1536 + 2 * 1536 + 2 * 256 + 3 * 8960) * 2
    assert alone["log-probs"] == 512 * 2**20


def test_experts_keep_what_a_token_meets() -> None:
    """qwen3-moe-tiny in float32, a sequence of 100 tokens: only the experts that it goes to."""
    raw = {
        "algorithm": {"type": "sft"},
        "model": {"preset": "qwen3-moe-tiny"},
        "task": {"type": "arithmetic"},
        "steps": 1,
        "policy": {"micro_batch_size": 1},
    }
    config = OwnRunConfig.model_validate(raw)
    shape, floor = known_shape(config.model), floor_of(config, length=100, num_sequences=1)
    assert shape is not None and floor is not None and "intermediate_size" not in shape
    heads = shape["num_attention_heads"] + shape["num_key_value_heads"]
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    inner = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
    per_token = 4 * shape["hidden_size"] + 2 * heads * head + 3 * inner
    assert floor["activations"] == shape["num_hidden_layers"] * 100 * per_token * 4


def test_an_unknown_model_has_no_floor() -> None:
    assert known_shape(Model.model_validate({"path": "nobody/nothing"})) is None
