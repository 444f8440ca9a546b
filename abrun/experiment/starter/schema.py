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
    definitions: dict[str, Any] = {}
    roots = []
    for model in (Recipe, CommandRecipe):
        schema = TypeAdapter(model).json_schema()
        definitions |= schema.pop("$defs")
        schema["properties"]["defaults"] = DEFAULTS
        definitions[model.__name__] = schema
        roots.append({"$ref": f"#/$defs/{model.__name__}"})
    for model in _all_subsections(Section):
        fields = definitions.get(model.__name__, {}).get("properties", {})
        for name, field in fields.items():
            description = field_comment(model, name) if name in model.model_fields else ""
            if description:
                field["description"] = description
    own_recipe, command_recipe = roots
    command = {"properties": {"type": {"const": "command"}}, "required": ["type"]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "abrun recipe",
        "if": {"properties": {"trainer": command}, "required": ["trainer"]},
        "then": command_recipe,
        "else": own_recipe,
        "$defs": _relax_schema(definitions),
    }


def _relax_schema(schema: Any) -> Any:
    """Without what only a whole recipe has to have; a part without its `type` may be of any of the types."""
    if isinstance(schema, list):
        return [_relax_schema(child) for child in schema]
    if not isinstance(schema, dict):
        return schema
    relaxed = {
        key: value for key, value in schema.items() if key not in ("required", "discriminator", "title")
    }
    if "oneOf" in relaxed:
        relaxed["anyOf"] = relaxed.pop("oneOf")
    return {key: _relax_schema(value) for key, value in relaxed.items()}


def _all_subsections(model: type[Section]) -> list[type[Section]]:
    return [section for below in model.__subclasses__() for section in (below, *_all_subsections(below))]


def field_comment(model: type[Section], name: str) -> str:
    """What stands in the code above and beside a field of a section."""
    owner = next(base for base in model.__mro__ if name in inspect.get_annotations(base))
    return _field_comments(owner).get(name, "")


@functools.cache
def _field_comments(model: type[Section]) -> dict[str, str]:
    """The comments above and beside the fields that a class itself declares."""
    source = textwrap.dedent(inspect.getsource(model))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comment_tokens = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    comments: dict[str, str] = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first_line = node.lineno
            while re.match(r"\s*#", lines[first_line - 2]):
                first_line -= 1
            texts = [
                comment_tokens[line].string
                for line in range(first_line, (node.end_lineno or first_line) + 1)
                if line in comment_tokens
            ]
            comments[node.target.id] = " ".join(text.removeprefix("#").strip() for text in texts)
    return comments
