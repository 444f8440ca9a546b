"""A tiny network, with random weights, of any causal family that transformers has."""

import contextlib
import inspect
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL: dict[str, Any] = (
    {
        "vocab_size": 128,
        "vocab_size_per_layer_input": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    | dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 32)
    | dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 48)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2)
    | dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2)
    | dict.fromkeys(("max_position_embeddings", "n_positions"), 64)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "top_k"), 2)
    | {"head_dim": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
)
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRID_LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2}
# What a family needs beyond that to be consistent.
NEEDS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_HEADS,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": MAMBA_HEADS | {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "granitemoehybrid": MAMBA_HEADS,
    "inkling_text": {"unpadded_vocab_size": 128},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "n_groups": 1, "state_size": 8},
    "zamba": HYBRID_LAYERS | {"mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": HYBRID_LAYERS | {"n_mamba_heads": 8, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: str, **settings: Any) -> PreTrainedConfig:
    """The configuration of `kind`, a `model_type`; `settings` stand for those of the same name."""
    config_class = CONFIG_MAPPING[kind]
    return config_class(**_sizes(config_class, NEEDS.get(kind, {}) | settings))


def tiny_network(kind: str, *, noise: float | None = None, **settings: Any) -> Any:
    """Random weights, the same at every call, in training mode; what it drew leaves no trace.

    `noise` is the probability or size of all noise that the configuration names.
    """
    config = tiny_config(kind, **settings)
    if noise is not None:
        _disturb(config, noise)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()


def _disturb(config: Any, noise: float) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _disturb(value, noise)
        elif any(part in name for part in ("dropout", "pdrop", "layerdrop", "drop_prob", "jitter")):
            with contextlib.suppress(StrictDataclassFieldValidationError):  # no number of this kind
                setattr(config, name, noise)


def _sizes(config_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(config_class.__init__).parameters)
    known |= set(getattr(config_class, "__dataclass_fields__", {})) | set(config_class.attribute_map)
    sizes = {name: value for name, value in (SMALL | settings).items() if name in known}
    if "qk_rope_head_dim" in known and "head_dim" not in settings:
        sizes.pop("head_dim", None)  # another name of it
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in config_class.sub_configs:
        default = getattr(config_class(), name, None)
        if isinstance(default, PreTrainedConfig):
            sizes[name] = _sizes(type(default), settings)
    return sizes
