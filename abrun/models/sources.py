"""Where a model's files lie, and what is said when they do not load."""

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

from abrun.errors import RecipeError
from abrun.recipe import Model


def source_of(model: Model, weights: Path | None) -> str | None:
    """A checkpoint folder or a hub name; None for a preset with random weights.

    `weights`, a checkpoint folder, replaces the recipe's own initial weights.
    """
    return str(weights) if weights else model.path


@contextlib.contextmanager
def loading(source: str) -> Iterator[None]:
    """Raises RecipeError where what is loaded from `source` inside does not load."""
    try:
        yield
    except Exception as error:  # config.json decides which foreign code runs, and so what it raises
        reason = textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__
        raise RecipeError(
            f"model.path: got {source!r}, which does not load: {reason}; "
            "give a folder with config.json, safetensors weights and a tokenizer, or a hub name"
        ) from error
