"""Text to tokens and back, as a model was trained to read: known without building its network."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from abrun.errors import RecipeError
from abrun.models.families import positions_of
from abrun.models.presets import CharacterTokenizer, character_tokenizer, preset_config
from abrun.models.sources import loading, source_of
from abrun.models.turns import Turn, find_turn
from abrun.recipe.policy import Model
from abrun.recipe.refusals import shortened

ENCODING, DECODING = ("__call__", "_encode_plus", "apply_chat_template"), ("decode", "_decode")
AT_ONCE = 256  # texts, of each of whose tokens the library keeps some 100 bytes until the last is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The tokenizer of a model, its chat template, and the tokens that end and fill up."""

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None  # the first turn of every prompt
    end_ids: frozenset[int]  # tokens that end a completion
    turn: Turn | None = None  # of the assistant, in the chat template
    max_positions: int | None  # of a sequence's tokens; None: no limit is known
    # Tokenizers fail where two threads ask them at once
    _asks: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def pad_id(self) -> int:
        """Fills up batches; never attended to and never a target."""
        pad: Any = self.tokenizer.pad_token_id
        return pad if pad is not None else min(self.end_ids, default=0)

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as a user's turn where the tokenizer has a chat template; at least one each.

        Many at once, which takes all cores and leaves Python to other threads. Raises RecipeError where a
        prompt has none: nothing would stand before the completion's first token.
        """
        if self.tokenizer.chat_template:
            system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            conversations = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
            found = self._asked(
                self.tokenizer.apply_chat_template,
                conversations,
                add_generation_prompt=True,
                return_dict=True,
            )
        else:
            found = self._asked(self.tokenizer, prompts)
        for prompt, token_ids in zip(prompts, found, strict=True):
            if not token_ids:
                raise RecipeError(
                    f"task: got the prompt {shortened(prompt)}, which has no tokens; remove or correct it"
                )
        return found

    @property
    def end_id(self) -> int | None:
        """The token that ends a completion to learn from: the chat template's end of turn, or else eos."""
        end = self.turn.end_id if self.turn and self.tokenizer.chat_template else None
        eos: Any = self.tokenizer.eos_token_id
        return eos if end is None else end

    def encode_completions(self, completions: Sequence[str]) -> list[list[int]]:
        """Return the token ids of completions, each with the token that ends it; many at once, as of prompts.

        After a prompt of `encode_prompts` they are what the chat template renders, up to its end of turn.
        """
        ending = [] if self.end_id is None else [self.end_id]
        if self.turn and self.tokenizer.chat_template:
            encoded = self._encode_turns(self.turn, completions)
        else:
            encoded = self._asked(self.tokenizer, completions, add_special_tokens=False)
        return [[*token_ids, *ending] for token_ids in encoded]

    def _encode_turns(self, turn: Turn, completions: Sequence[str]) -> list[list[int]]:
        with self._asks:
            contents = [turn.content(self.tokenizer, completion) for completion in completions]
        [opening] = self._asked(self.tokenizer, [turn.opening], add_special_tokens=False)
        texts = [turn.opening + content for content in contents]
        encoded = self._asked(self.tokenizer, texts, add_special_tokens=False)
        for row, content in enumerate(contents):
            if encoded[row][: len(opening)] == opening:
                del encoded[row][: len(opening)]
            else:  # a token reaches back into the prompt, as none of a sampled completion does
                [encoded[row]] = self._asked(self.tokenizer, [content], add_special_tokens=False)
        return encoded

    def decode(self, completions: Sequence[list[int]]) -> list[str]:
        """The texts of completions, without special tokens; many at once, as prompts are encoded."""
        tokenizer: Any = self.tokenizer
        with self._asks:
            if completions and _is_stock(tokenizer, DECODING) and not tokenizer.clean_up_tokenization_spaces:
                # transformers' own takes one after the other
                return tokenizer.backend_tokenizer.decode_batch(list(completions), skip_special_tokens=True)
            return [str(tokenizer.decode(one, skip_special_tokens=True)) for one in completions]

    def _asked(self, ask: Callable[..., Any], texts: Sequence[Any], **settings: Any) -> list[list[int]]:
        """What a tokenizer makes of each text."""
        found: list[list[int]] = []
        if _is_stock(self.tokenizer, ENCODING):
            for start in range(0, len(texts), AT_ONCE):
                with self._asks:
                    found += ask(list(texts[start : start + AT_ONCE]), **settings)["input_ids"]
            return found
        for text in texts:
            with self._asks:
                found.append(list(ask(text, **settings)["input_ids"]))
        return found

    def save(self, directory: Path) -> None:
        """Write the tokenizer as a Hugging Face checkpoint has it."""
        self.tokenizer.save_pretrained(directory)


def _is_stock(tokenizer: Any, names: Sequence[str]) -> bool:
    """Whether these are methods of transformers' own on Rust's: others may take but one text, or take one
    otherwise, such as CodeLlama's, which fills in the middle."""
    own = (getattr(getattr(tokenizer, name, None), "__func__", None) for name in names)
    return all(of is getattr(PreTrainedTokenizerFast, name) for of, name in zip(own, names, strict=True))


def load_text(model: Model, *, weights: Path | None) -> Text:
    """The text side of a recipe's model; `weights`, a checkpoint folder, stands for the recipe's own.

    Raises RecipeError where there is no such checkpoint.
    """
    source = source_of(model, weights)
    if source is None:
        config = preset_config(model)
        tokenizer, generation = character_tokenizer(), GenerationConfig.from_model_config(config)
    else:
        with loading(source):
            config = AutoConfig.from_pretrained(source)
            tokenizer, generation = _load_tokenizer(source), _load_generation_config(source, config)
    if model.system_prompt is not None and not tokenizer.chat_template:
        raise RecipeError(
            f"model.system_prompt: got {shortened(model.system_prompt)}, and the tokenizer has no chat "
            "template to put it in; use system_prompt: null, or put it into the prompts"
        )
    return _text(tokenizer, config, generation, model.system_prompt)


def _text(
    tokenizer: PreTrainedTokenizerBase, config: Any, generation: GenerationConfig, system_prompt: str | None
) -> Text:
    ids: Any = generation.eos_token_id  # pyright: ignore[reportAttributeAccessIssue]
    ids = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    turn = find_turn(tokenizer, frozenset(i for i in ids if i is not None))
    ids.append(turn.end_id if turn else None)
    return Text(
        tokenizer=tokenizer,
        system_prompt=system_prompt,
        end_ids=frozenset(i for i in ids if i is not None),
        turn=turn,
        max_positions=positions_of(config),
    )


def _load_generation_config(source: str, config: Any) -> GenerationConfig:
    """What a checkpoint says of generation; where it says nothing, what transformers takes in its place."""
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return GenerationConfig.from_model_config(config)


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    # AutoTokenizer would put Qwen2's own splitting of words around the vocabulary of a saved preset.
    saved = get_tokenizer_config(source).get("tokenizer_class")
    kind = CharacterTokenizer if saved == CharacterTokenizer.__name__ else AutoTokenizer
    tokenizer = kind.from_pretrained(source)
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:  # what transformers makes of missing files
        raise ValueError("its tokenizer knows no tokens")
    return tokenizer
