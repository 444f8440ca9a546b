"""Conversion between text and tokens as the model was trained to read them, without building its network."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from abrun.errors import RecipeError
from abrun.recipe.policy import Model
from abrun.recipe.refusals import shortened
from abrun.trainer.models.families import max_positions_of
from abrun.trainer.models.sources import (
    CharacterTokenizer,
    character_tokenizer,
    loading,
    preset_config,
    source_of,
)

# The assistant's turn of a chat template: the text around a completion and the token that ends it.

QUESTION = {"role": "user", "content": "abrun's question"}
ANSWER = "abrun's answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An assistant's turn that answers a question, as a chat template renders it."""

    opening: str  # the question with the generation prompt
    closing: str  # what follows the content, such as "<|im_end|>\\n"
    end_id: int | None  # first special token of `closing`; None if it has none

    def content(self, tokenizer: Any, completion: str) -> str:
        """Return a completion as the template writes it after the generation prompt, without `closing`.

        Templates trim a completion and add to it (a space, an empty thinking block). The completion is taken
        as it is if the template leaves out or rewrites more, such as a chain of thought, or if its rendering
        does not continue the generation prompt.
        """
        rendered = render(tokenizer, [QUESTION, {"role": "assistant", "content": completion}])
        content = rendered[len(self.opening) : len(rendered) - len(self.closing)]
        is_whole = rendered == self.opening + content + self.closing and completion.strip() in content
        return content if is_whole else completion


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool = False) -> str:
    """Return a conversation in the tokenizer's chat template; `prompt`: with the generation prompt."""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))


def find_turn(tokenizer: Any, end_ids: frozenset[int]) -> Turn | None:
    """Return the turn of a tokenizer's chat template; None without a template for assistant messages.

    `end_ids`: tokens that end a completion although the tokenizer does not call them special.
    """
    if not tokenizer.chat_template:
        return None
    try:
        opening = render(tokenizer, [QUESTION], prompt=True)
        rendered = render(tokenizer, [QUESTION, {"role": "assistant", "content": ANSWER}])
    except TemplateError:
        return None
    _, answer, closing = rendered.rpartition(ANSWER)
    if not answer:
        return None
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = end_ids | {*tokenizer.all_special_ids} | {i for i, token in added.items() if token.special}
    token_ids = tokenizer(closing, add_special_tokens=False)["input_ids"] if closing else []
    return Turn(opening=opening, closing=closing, end_id=next((i for i in token_ids if i in special), None))


ENCODING, DECODING = ("__call__", "_encode_plus", "apply_chat_template"), ("decode", "_decode")
TEXTS_PER_CALL = 256  # the library keeps some 100 bytes per token until the last text of a call is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A model's tokenizer and chat template, with its end and padding tokens."""

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None  # first turn of every prompt
    end_ids: frozenset[int]  # tokens that end a completion
    turn: Turn | None = None  # the assistant's turn in the chat template
    max_positions: int | None  # largest number of tokens of a sequence; None if unknown
    # Tokenizers fail if two threads use them at the same time.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def pad_id(self) -> int:
        """Return the padding token, which is never attended to and never a target."""
        pad: Any = self.tokenizer.pad_token_id
        return pad if pad is not None else min(self.end_ids, default=0)

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts, at least one each; with a chat template, as a user's turn.

        Encodes many prompts at a time, which uses all cores and releases the GIL. Raises RecipeError for a
        prompt without tokens, since a completion's first token would have no context.
        """
        if self.tokenizer.chat_template:
            system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            conversations = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
            encoded = self._encode(
                self.tokenizer.apply_chat_template,
                conversations,
                add_generation_prompt=True,
                return_dict=True,
            )
        else:
            encoded = self._encode(self.tokenizer, prompts)
        for prompt, token_ids in zip(prompts, encoded, strict=True):
            if not token_ids:
                raise RecipeError(
                    f"task: got the prompt {shortened(prompt)}, which has no tokens; remove or correct it"
                )
        return encoded

    @property
    def end_id(self) -> int | None:
        """Return the token that ends a completion to learn from: the template's end of turn, or else eos."""
        end = self.turn.end_id if self.turn and self.tokenizer.chat_template else None
        eos: Any = self.tokenizer.eos_token_id
        return eos if end is None else end

    def encode_completions(self, completions: Sequence[str]) -> list[list[int]]:
        """Return the token ids of completions, each with its end token.

        Appended to a prompt of `encode_prompts`, they are what the chat template renders up to its end of
        turn.
        """
        ending = [] if self.end_id is None else [self.end_id]
        if self.turn and self.tokenizer.chat_template:
            encoded = self._encode_turns(self.turn, completions)
        else:
            encoded = self._encode(self.tokenizer, completions, add_special_tokens=False)
        return [[*token_ids, *ending] for token_ids in encoded]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, without a chat template or special tokens."""
        [token_ids] = self._encode(self.tokenizer, [text], add_special_tokens=False)
        return token_ids

    def _encode_turns(self, turn: Turn, completions: Sequence[str]) -> list[list[int]]:
        with self._lock:
            contents = [turn.content(self.tokenizer, completion) for completion in completions]
        [opening] = self._encode(self.tokenizer, [turn.opening], add_special_tokens=False)
        texts = [turn.opening + content for content in contents]
        encoded = self._encode(self.tokenizer, texts, add_special_tokens=False)
        for row, content in enumerate(contents):
            if encoded[row][: len(opening)] == opening:
                del encoded[row][: len(opening)]
            else:  # a token spans prompt and completion, which never happens in a sampled completion
                [encoded[row]] = self._encode(self.tokenizer, [content], add_special_tokens=False)
        return encoded

    def decode(self, completions: Sequence[list[int]]) -> list[str]:
        """Return the texts of completions, without special tokens."""
        tokenizer: Any = self.tokenizer
        with self._lock:
            if completions and _is_stock(tokenizer, DECODING) and not tokenizer.clean_up_tokenization_spaces:
                # The decode method of transformers takes one completion at a time.
                return tokenizer.backend_tokenizer.decode_batch(list(completions), skip_special_tokens=True)
            return [str(tokenizer.decode(token_ids, skip_special_tokens=True)) for token_ids in completions]

    def _encode(self, encode: Callable[..., Any], texts: Sequence[Any], **settings: Any) -> list[list[int]]:
        """Return the token ids of each text, by `encode`, a method of the tokenizer."""
        encoded: list[list[int]] = []
        if _is_stock(self.tokenizer, ENCODING):
            for start in range(0, len(texts), TEXTS_PER_CALL):
                with self._lock:
                    encoded += encode(list(texts[start : start + TEXTS_PER_CALL]), **settings)["input_ids"]
            return encoded
        for text in texts:
            with self._lock:
                encoded.append(list(encode(text, **settings)["input_ids"]))
        return encoded

    def save(self, directory: Path) -> None:
        """Write the tokenizer in the format of a Hugging Face checkpoint."""
        self.tokenizer.save_pretrained(directory)


def _is_stock(tokenizer: Any, names: Sequence[str]) -> bool:
    """Return True if these methods are those of transformers' fast tokenizers.

    Others may take a single text only, or read it differently, such as CodeLlama's fill-in-the-middle.
    """
    methods = (getattr(getattr(tokenizer, name, None), "__func__", None) for name in names)
    return all(
        method is getattr(PreTrainedTokenizerFast, name) for method, name in zip(methods, names, strict=True)
    )


def load_text(model: Model, *, weights: Path | None) -> Text:
    """Return the `Text` of a recipe's model, from the checkpoint folder `weights` if it is given.

    Raises RecipeError if the checkpoint does not load, or has no chat template for the system prompt.
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
    ids: Any = generation.eos_token_id  # pyright: ignore[reportAttributeAccessIssue]
    ids = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    turn = find_turn(tokenizer, frozenset(i for i in ids if i is not None))
    ids.append(turn.end_id if turn else None)
    return Text(
        tokenizer=tokenizer,
        system_prompt=model.system_prompt,
        end_ids=frozenset(i for i in ids if i is not None),
        turn=turn,
        max_positions=max_positions_of(config),
    )


def _load_generation_config(source: str, config: Any) -> GenerationConfig:
    """Return a checkpoint's generation config, or the default that transformers derives from its config."""
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return GenerationConfig.from_model_config(config)


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    # AutoTokenizer would apply Qwen2's word splitting to the vocabulary of a saved preset.
    saved = get_tokenizer_config(source).get("tokenizer_class")
    kind = CharacterTokenizer if saved == CharacterTokenizer.__name__ else AutoTokenizer
    tokenizer = kind.from_pretrained(source)
    token_ids = tokenizer("1", add_special_tokens=False)["input_ids"]
    if not token_ids:  # transformers returns such a tokenizer if files are missing
        raise ValueError("its tokenizer knows no tokens")
    return tokenizer
