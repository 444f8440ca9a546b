"""The assistant's turn of a chat template: the text around a completion and the token that ends it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

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
    special = end_ids | {*tokenizer.all_special_ids} | _special_ids(tokenizer)
    token_ids = tokenizer(closing, add_special_tokens=False)["input_ids"] if closing else []
    return Turn(opening=opening, closing=closing, end_id=next((i for i in token_ids if i in special), None))


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id for token_id, token in added.items() if token.special}
