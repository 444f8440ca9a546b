"""JSON schema of recipes for editors, with the comments of the fields as descriptions."""

import functools
import inspect
import re
from typing import Any

from pydantic import TypeAdapter

from abrun.recipe.experiment import CommandRecipe, Recipe
from abrun.recipe.section import Section

DEFAULTS = {
    "description": "Recipes to inherit from, by their paths relative to this file; later ones win.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe's file; nothing is required, since a file may inherit any part.

    If `trainer.type` is `command`, the schema is that of external trainers. Invalid combinations of values
    are reported only by `abrun launch --dry-run`.
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
    """Return the schema without required keys; a section without its `type` may have any of the types."""
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


def field_comment(model: type, name: str) -> str:
    """Return the comments above and beside the field of a section or another record in the code."""
    described = getattr(model, "model_fields", {}).get(name)
    if described and described.description:
        return described.description
    owner = next(base for base in model.__mro__ if name in inspect.get_annotations(base))
    return _field_comments(owner).get(name, "")


@functools.cache
def _field_comments(model: type) -> dict[str, str]:
    """Return the comments of all fields that a class itself declares."""
    comments: dict[str, str] = {}
    above: list[str] = []  # whole lines of comment before the next field
    for line in inspect.getsource(model).splitlines():
        code, _, comment = line.partition("# ")
        if field := re.match(r"    (\w+): ", code):
            comments[field[1]] = " ".join([*above, comment] if comment else above)
        above = [*above, comment] if comment and not code.strip() else []
    return comments
