"""Architectures with random weights, in the fields of Hugging Face's configurations."""

from typing import Any

TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
# Every preset reads with one tokenizer, of characters; a larger vocabulary has tokens that no text contains.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2-tiny": TINY | {"model_type": "qwen2", "hidden_size": 96, "intermediate_size": 256},
    # Heads of 32, which vLLM has attention for, on CPU cores and GPUs.
    "qwen2-tiny-128": TINY | {"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256},
    "qwen3-moe-tiny": TINY | EXPERTS | {"hidden_size": 64, "head_dim": 16},
    "qwen3-moe-tiny-128": TINY | EXPERTS | {"hidden_size": 128, "head_dim": 32},
    # As much LM head for its body as a real small model has: what memory-profile can show on a laptop.
    "qwen2-wide-vocab": {
        "model_type": "qwen2",
        "vocab_size": 32_768,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # The shape of Qwen2.5-1.5B, for measurements on a GPU without its weights.
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    # The shape of Qwen3-8B.
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
}
# The presets with experts: how many a layer has.
PRESET_EXPERTS = {
    name: shape["num_experts"] for name, shape in ARCHITECTURES.items() if "num_experts" in shape
}
