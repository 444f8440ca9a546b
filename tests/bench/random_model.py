"""A folder of random weights of a preset's architecture, with a tokenizer that has a token a word."""

from pathlib import Path
from typing import Any


def make_model(preset: str, folder: Path, device: str, *, vocab_size: int = 100) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from abrun.models.presets import preset_config
    from abrun.recipe.policy import Model

    torch.manual_seed(0)
    shape = preset_config(Model.model_validate({"preset": preset}))
    with torch.device(device):
        network: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    words = ["<pad>", "<eos>", "<unk>", *(str(number) for number in range(vocab_size - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    ).save_pretrained(folder)
