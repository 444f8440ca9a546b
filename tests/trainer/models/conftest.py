"""A checkpoint as Hugging Face has them, made by transformers alone."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="package")
def bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained here: what published checkpoints have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["What is the sum of two numbers? The answer is 42.", TEMPLATE], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="package", params=["llama", "qwen2"])
def checkpoint(
    request: pytest.FixtureRequest, bpe: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Weights with a head of their own, and the tokenizer."""
    kind, config_kind = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    }[request.param]
    torch.manual_seed(1)
    settings = TINY | {"vocab_size": len(bpe), "tie_word_embeddings": False, "attention_dropout": 0.1}
    network = kind(config_kind(**settings))
    network.generation_config.eos_token_id = [
        bpe.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    ]
    folder = tmp_path_factory.mktemp(request.param)
    network.save_pretrained(folder)
    bpe.save_pretrained(folder)
    return folder
