"""From YAML to a validated model: inheritance, overrides, and every refusal as one line."""

import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from abrun.errors import RecipeError
from abrun.recipe.section import Section

M = TypeVar("M", bound=BaseModel)


def dotted(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; empty mappings stay as values."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat.update(dotted(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            below = branch.get(parent)
            branch[parent] = dict(below) if isinstance(below, Mapping) else {}
            branch = branch[parent]
        branch[last] = value
    return tree


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`, mapping by mapping; a mapping of another `type` replaces the old one."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("type") in (None, old.get("type"))
        ):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


class Loader(yaml.SafeLoader):
    """YAML as people read it: `1e-6` is a number (YAML 1.2), and a key given twice is refused.

    So are aliases (`*name`): `defaults:` shares values, and a few lines of aliases can mean gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*name) are not supported: write the value out, or share it through defaults:"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
        seen: set[str] = set()
        for key in keys:
            readable = isinstance(key, str) and key.isprintable()
            if not readable or key in seen:
                problem = "is given twice" if readable else "is not a line of text"
                raise yaml.MarkedYAMLError(None, None, f"key {shortened(key)} {problem}", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{source}{where}: not readable as YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None


def read_with_defaults(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    resolved = Path(os.path.realpath(path))
    if resolved in chain:
        raise RecipeError(
            f"{chain[-1]}: defaults: a cycle of recipes ({' > '.join(p.name for p in (*chain, resolved))}); "
            "drop one link"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        asked = f"{chain[-1]}: defaults: " if chain else ""
        raise RecipeError(f"{asked}{path}: no such recipe; check the path") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {error}") from None
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: got {shortened(raw)}; a recipe is a mapping of keys to values")
    parents = raw.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(
        isinstance(parent, str) and parent.isprintable() and len(parent) < 1000 for parent in parents
    ):
        raise RecipeError(f"{path}: defaults: got {shortened(parents)}; allowed: a path or a list of paths")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = merge(merged, read_with_defaults(path.parent / parent, (*chain, resolved)))
    return merge(merged, raw)


def parse_override(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")) or not key.isprintable():
        raise RecipeError(
            f"--set: got {shortened(override)}; allowed: key=value with a dotted key, such as steps=20"
        )
    return nested({key: parse_yaml(value, f"--set {key}")})


def validated(model: type[M], raw: Mapping[str, Any], source: str) -> M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise RecipeError(f"{source}: {_explain(first, model)}{more}") from None


def _explain(error: Any, model: type[BaseModel]) -> str:
    """One pydantic error as field, value received, what is allowed."""
    sections: list[type[BaseModel]] = [model]
    owners = sections
    names: list[str] = []
    for part in error["loc"]:
        chosen = [section for section in sections if _tag(section) == part]
        if len(sections) > 1 and chosen:  # pydantic's name of the union's member: not part of the user's path
            sections = chosen
            continue
        names.append(str(part))
        if isinstance(part, str):
            owners = sections
            fields = [section.model_fields[part] for section in owners if part in section.model_fields]
            sections = _sections(fields[0].annotation) if fields else []
    field = ".".join(names)
    if error["type"] == "extra_forbidden":
        return f"{field}: {unknown(names[-1], owners[0])}"
    if error["type"] == "missing":
        return f"{field}: missing; add it to the recipe"
    if error["type"] == "union_tag_not_found":
        return f"{field}.type: missing; allowed: {error['ctx'].get('expected_tags') or _tags(sections)}"
    if error["type"] == "union_tag_invalid":
        return f"{field}.type: got {shortened(error['ctx']['tag'])}; allowed: {error['ctx']['expected_tags']}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # written above, by a validator of a field or of a section
        return f"{field}: {message}" if message.startswith("got") else message
    allowed = message.removeprefix("Input should be ").split(" to extract fields")[0].split(" or instance")[0]
    allowed = allowed.replace("a valid dictionary or object", "a mapping").replace(
        "a valid dictionary", "a mapping"
    )
    return f"{field}: got {shortened(error['input'])}; allowed: {allowed}"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The Section classes inside an annotation such as `A | B | None` or `list[A]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in _sections(part)]


def _tag(section: type[BaseModel]) -> str | None:
    kind = section.model_fields.get("type")
    return get_args(kind.annotation)[0] if kind else None


def _tags(sections: Iterable[type[BaseModel]]) -> str:
    return ", ".join(repr(_tag(section)) for section in sections)


def unknown(key: str, section: type[BaseModel]) -> str:
    allowed = sorted(section.model_fields)
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"
    return f"unknown key; {hint}"


def shortened(value: Any) -> str:
    """A value as one bounded line, however long or deep it is."""
    bounded = reprlib.Repr()
    bounded.maxlevel, bounded.maxstring, bounded.maxother = 3, 60, 60
    text = bounded.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
