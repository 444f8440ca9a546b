"""Refusal of secrets in recipes: a recipe is copied into every run and shown in every report."""

from collections.abc import Iterator, Mapping
from typing import Any

from abrun.errors import RecipeError
from abrun.messages.codes import Code
from abrun.runs.redaction import has_token, is_secret_variable, redacted


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raise RecipeError for the first token of a known format, without quoting it.

    Also for an environment variable of a program or a launcher whose name says that its value is a secret.
    """
    for names, value in _iter_texts(raw, ()):
        field, name = redacted(".".join(names)), names[-1]
        of_launcher = names[0] in ("launcher", "env", "setup")  # a profile has the launcher's keys at the top
        is_variable = len(names) > 1 and names[-2] == "env" and is_secret_variable(name, value)
        if is_variable and not of_launcher:
            raise RecipeError(Code.SECRET_IN_ENV(source=source, field=field, variable=name))
        if is_variable or has_token(value) or any(map(has_token, names)):
            raise RecipeError(Code.SECRET_IN_RECIPE(source=source, field=field, of_launcher=of_launcher))


def _iter_texts(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text and integer of a tree (as text) with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _iter_texts(value, (*names, *str(key).split(".")))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _iter_texts(value, (*names, str(index)))
    elif isinstance(tree, str | int) and names:
        yield names, str(tree)
