"""Prints docs/recipes.md: every field of a recipe, from the models and the comments beside their fields.

python docs/recipes.py > docs/recipes.md
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from abrun.experiment.starter.schema import field_comment
from abrun.recipe.experiment import CommandRecipe, Recipe
from abrun.recipe.section import Section

HEAD = """# Recipes, field by field

Printed by `python docs/recipes.py`, from the models in `abrun/recipe/` and the comments beside their fields;
a test compares the two.

A recipe is a YAML file. `defaults:` names recipes to inherit from, one or a list (later wins), each by its
path relative to the file. `--set key=value` changes a value by its dotted key, such as
`compare.claims.0.margin=0.1`. `arms:` has for every arm what differs from the rest of the file, as dotted
keys. Every key is checked, and what does not fit is refused in one line. "A section" is a mapping, whose
fields stand under its own heading.

## Another `type`

A section with a `type`, such as `policy.backend`, can get another one in an arm, by `--set`, or in a file
over its `defaults:`. Then:

- Keys that both types have keep their values. `policy.backend.type: megatron` in an arm keeps the baseline's
  `tensor_parallel` and `sequence_parallel`; `algorithm.type: ppo` over GRPO keeps `group_size`.
- A key that only the old type has is refused by name if it is set to something else than its default. Null
  drops it: `policy.backend.keep_gathered: null` beside `policy.backend.type: megatron`.
- Types without a common key begin with their own defaults, as `grpo` and `sft`, or `arithmetic` and `gsm8k`.
  Another `trainer` does, too, and keeps `env`.

An arm changes the baseline as it is resolved, defaults included; a file and `--set` change what is written.
A mapping that is set whole (`--set policy.backend={type: megatron}`) replaces the section. The dry run lists
every difference between the arms, except defaults that only one of two types has.
"""


def page() -> str:
    """The whole of docs/recipes.md."""
    sections = dict.fromkeys([("a recipe", Recipe), *_below(Recipe), *_below(CommandRecipe)])
    return "\n".join([HEAD, *(line for key, model in sections for line in _section(key, model))])


def _below(model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Every section inside of `model` by where it stands, as `policy.optimizer` or `task: {type: gsm8k}`."""
    for name in _fields(model):
        annotation = get_type_hints(model)[name]
        for part in _sections_of(annotation):
            kinds = get_args(part.model_fields["type"].annotation) if "type" in part.model_fields else ()
            where = f"{name}.0" if get_origin(annotation) is list else name
            yield f"{where}: {{type: {kinds[0]}}}" if len(kinds) == 1 else where, part
            yield from ((f"{where}.{key}", below) for key, below in _below(part))


def _fields(model: type[Section]) -> dict[str, FieldInfo]:
    """A model's own fields, then those of the sections it extends, where one declared anew stays."""
    names = [name for each in model.__mro__ for name in inspect.get_annotations(each)]
    last = {name: place for place, name in enumerate(names) if name in model.model_fields}
    return {name: model.model_fields[name] for name in sorted(last, key=last.__getitem__)}


def _sections_of(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [part for each in get_args(annotation) for part in _sections_of(each)]


def _section(title: str, model: type[Section]) -> Iterator[str]:
    yield f"## `{title}`\n" if model is not Recipe else "## The whole\n"
    yield from (f"{_prose(text)}\n" for text in _docstrings(model))
    yield "| field | value | default | |"
    yield "|---|---|---|---|"
    schema = model.model_json_schema()
    for name, field in _fields(model).items():
        value = _value(schema["properties"][name]) or _value(
            TypeAdapter(get_type_hints(model)[name]).json_schema()
        )
        yield f"| `{name}` | {value} | {_default(field)} | {_prose(field_comment(model, name))} |"
    yield ""


# --- what a value may be, out of the JSON schema ---


def _value(schema: dict[str, Any]) -> str:
    """In words; empty where a validator of its own decides, of which the schema knows nothing."""
    if "$ref" in schema or "discriminator" in schema:
        return "a section"
    if "anyOf" in schema:
        return " or ".join(_value(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"a list, each {_value(schema['items'])}"
        case "integer":
            return f"a whole number{_bounds(schema)}"
        case "number":
            return f"a number{_bounds(schema)}"
        case kind:
            names = {"string": "text", "boolean": "`true`, `false`", "null": "`null`", "object": "a mapping"}
            return names.get(str(kind), "")


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    given = [f" {word} {schema[key]:g}" for key, word in words.items() if abs(schema.get(key, 2**31)) < 2**31]
    return "".join(given)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Section):
        changed = default.model_dump(exclude_defaults=True)
        return f"`{_yaml(changed)}`" if changed else "its defaults"
    return f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(_yaml(each) for each in value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- what is said of it, in docstrings and comments ---


def _docstrings(model: type[Section]) -> list[str]:
    """The model's own and those of the sections it extends, the most special first."""
    classes = [each for each in model.__mro__ if issubclass(each, Section) and each is not Section]
    return [inspect.cleandoc(each.__doc__) for each in classes if each.__doc__]


def _prose(text: str) -> str:
    """Python's words as YAML's, and what Markdown would take for its own left as it is."""
    text = re.sub(r"\bNone\b", "`null`", text)
    text = re.sub(r"\b(True|False)\b", lambda found: f"`{found[0].lower()}`", text)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
