"""GRPO with TRL's GRPOTrainer on a CPU: the foreign trainer of recipes/external/trl.yaml.

A Qwen2 of 30 thousand random weights is rewarded for the share of its completion that is one certain word; no
download, no GPU. Imports nothing of abrun, which reads the TensorBoard files that this writes.
"""

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

WORDS = [f"w{index}" for index in range(24)]
WANTED = "w7"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of TensorBoard files and checkpoints"
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--loss-type", default="dapo", help="as in trl.GRPOConfig")
    parser.add_argument("--label", help="changes nothing: for an experiment whose arms are the same")
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    set_seed(asked.seed)
    tokenizer = word_tokenizer()
    trainer = GRPOTrainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=wanted_share,
        train_dataset=Dataset.from_list(
            [{"prompt": f"{first} {second}"} for first in WORDS for second in WORDS]
        ),
        args=GRPOConfig(
            output_dir=str(asked.output),
            seed=asked.seed,
            max_steps=asked.steps,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            loss_type=asked.loss_type,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            logging_steps=1,
            report_to="tensorboard",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def wanted_share(completions: list[str], **_: object) -> list[float]:
    """The share of the wanted word among each completion's words."""
    return [words.count(WANTED) / max(1, len(words)) for words in (text.split() for text in completions)]


if __name__ == "__main__":
    main()
