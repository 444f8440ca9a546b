"""No recipe may hold a secret: what it says is written into every run, and shown in every report."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from abrun.errors import RecipeError
from abrun.redaction import holds_token, is_secret, redacted_code

OPTION = re.compile(r"[-+]{0,2}([A-Za-z][\w.-]*)(?:=([\s\S]*))?")  # --name=value, ++section.name=value


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raises RecipeError for the first value of a recipe that looks like a secret, without quoting it."""
    for names, words in _lists(raw, ()):
        if names[-1] == "argv" and (option := _secret_option(words)):
            raise RecipeError(f"{source}: {'.'.join(names)}: {option} is given a secret; {_INSTEAD}")
    for names, value in _texts(raw, ()):
        field, name = ".".join(names), names[-1]
        of_launcher = names[0] in ("launcher", "env", "setup")  # of a profile it is all there is
        section = names[-2] if len(names) > 1 else ""
        if section == "env" and is_secret(name, value) and not of_launcher:
            raise RecipeError(f"{source}: {field}: looks like a secret; write ${{{name}}} and export {name}")
        in_shell = section in ("argv", "env", "parameters", "setup") and redacted_code(value) != value
        if holds_token(value) or in_shell or (section in ("env", "parameters") and is_secret(name, value)):
            instead = _OF_NODES if of_launcher else _INSTEAD
            raise RecipeError(f"{source}: {field}: looks like a secret; {instead}")


_OF_NODES = (
    "it is written into scripts and shown by clusters: let the nodes have it in their own environment or "
    "files, or name it in launcher.secrets of a jobset or skypilot"
)
_INSTEAD = (
    "pass it to a command as a variable of its environment, such as trainer.env.HF_TOKEN: ${HF_TOKEN}, "
    "which is read at every start and never stored"
)


def _secret_option(words: list[Any]) -> str | None:
    """The option of a command line whose value looks like a secret."""
    previous = None
    for word in words:
        option = OPTION.fullmatch(word) if isinstance(word, str) else None
        if option and option[2] and is_secret(option[1], option[2].split(" ")[0]):
            return option[1]
        if previous and isinstance(word, str) and not word.startswith("-") and is_secret(previous, word):
            return previous
        previous = option[1] if option and word.startswith("--") and option[2] is None else None
    return None


def _texts(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text of a tree, and every whole number, with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _texts(value, (*names, str(index)))
    elif isinstance(tree, str | int) and names:
        yield names, str(tree)


def _lists(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _lists(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list) and names:
        yield names, tree
