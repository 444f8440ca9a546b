"""What an editor knows of a recipe: its JSON schema, with the comments that stand beside the fields."""

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
from typing import Any

from pydantic import TypeAdapter

from abrun.recipe.experiment import CommandRecipe, Recipe
from abrun.recipe.section import Section

DEFAULTS = {
    "description": "Recipes to inherit from, by their paths relative to this file; later ones win.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe's file, in which nothing is required: it may inherit any part of itself.

    A recipe whose `trainer.type` is `command` is one of another trainer. What values cannot be combined with
    each other is for `abrun launch --dry-run` to say.
    """
    parts: dict[str, Any] = {}
    roots = []
    for model in (Recipe, CommandRecipe):
        schema = TypeAdapter(model).json_schema()
        parts |= schema.pop("$defs")
        schema["properties"]["defaults"] = DEFAULTS
        parts[model.__name__] = schema
        roots.append({"$ref": f"#/$defs/{model.__name__}"})
    for model in _sections(Section):
        fields = parts.get(model.__name__, {}).get("properties", {})
        for name, field in fields.items():
            said = comment(model, name) if name in model.model_fields else ""
            if said:
                field["description"] = said
    own, foreign = roots
    command = {"properties": {"type": {"const": "command"}}, "required": ["type"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "abrun recipe",
        "if": {"properties": {"trainer": command}, "required": ["trainer"]},
        "then": foreign,
        "else": own,
        "$defs": _loosened(parts),
    }


def _loosened(schema: Any) -> Any:
    """Without what only a whole recipe has to have; a part without its `type` may be of any of the types."""
    if isinstance(schema, list):
        return [_loosened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("required", "discriminator", "title")}
    if "oneOf" in kept:
        kept["anyOf"] = kept.pop("oneOf")
    return {key: _loosened(value) for key, value in kept.items()}


def _sections(model: type[Section]) -> list[type[Section]]:
    return [each for below in model.__subclasses__() for each in (below, *_sections(below))]


def comment(model: type[Section], name: str) -> str:
    """What stands in the code above and beside a field of a section."""
    owner = next(each for each in model.__mro__ if name in inspect.get_annotations(each))
    return _comments(owner).get(name, "")


@functools.cache
def _comments(model: type[Section]) -> dict[str, str]:
    """The comments above and beside the fields that a class itself declares."""
    source = textwrap.dedent(inspect.getsource(model))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {each.start[0]: each for each in tokens if each.type == tokenize.COMMENT}
    lines = source.splitlines()
    comments: dict[str, str] = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while re.match(r"\s*#", lines[first - 2]):
                first -= 1
            texts = [
                found[line].string for line in range(first, (node.end_lineno or first) + 1) if line in found
            ]
            comments[node.target.id] = " ".join(text.removeprefix("#").strip() for text in texts)
    return comments
