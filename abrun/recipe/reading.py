"""YAML reader for recipes, without secrets; dotted and nested keys; recipes of launched experiments."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from abrun.errors import RecipeError
from abrun.runs.files import MAX_FILE_BYTES, read_regular
from abrun.runs.layout import EXPERIMENT
from abrun.runs.migrations import drop_removed, migrate
from abrun.runs.redaction import has_token, is_secret_variable, redacted, shortened

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def dotted(mapping: Mapping[str, Any], max_characters: int = sys.maxsize) -> dict[str, Any]:
    """Convert `{"a": {"b": 1}}` to `{"a.b": 1}`, without longer keys; empty mappings stay as values."""
    flat: dict[str, Any] = {}
    levels = [("", iter(mapping.items()))]  # no recursion: a file may be nested very deeply
    while levels:
        prefix, items = levels[-1]
        for key, value in items:
            name = f"{prefix}{key}"
            if len(name) > max_characters:
                continue
            if isinstance(value, Mapping) and value:
                levels.append((f"{name}.", iter(value.items())))
                break
            flat[name] = value
        else:
            levels.pop()
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `{"a.b": 1}` to `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    own_ids = {id(tree)}  # mappings created here; a caller's mapping is copied before it is changed
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        branch = tree
        for parent in parents:
            below: Any = branch.get(parent)
            if id(below) not in own_ids:
                below = branch[parent] = dict(below) if isinstance(below, Mapping) else {}
                own_ids.add(id(below))
            branch = below
        branch[leaf] = value
    return tree


class Loader(yaml.SafeLoader):
    """YAML loader with the scalars of YAML 1.2: numbers, true, false, null; everything else is text.

    (YAML 1.1 reads 010 as 8, 1:30 as 90, `on` as true, and has dates.) Refuses duplicate keys, tags (`!name`)
    and aliases (`*name`): `defaults:` shares values, and a few lines of aliases can expand to gigabytes.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not supported: repeat the value, or share it through defaults:"
        elif getattr(event, "tag", None) is not None:
            problem = f"tags are not supported, got {shortened(event.tag)}: write the value without it"
        if problem:
            raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> str:
        text = super().construct_scalar(node)
        if LONE_SURROGATE.search(text):
            problem = f"got {shortened(text)}, which has half of a surrogate pair: write the character itself"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key: Any = self.construct_object(key_node, deep=True)  # pyright: ignore
            problem = None
            if not (isinstance(key, str) and key.isprintable()):
                problem = f"key {shortened(key)} is not a line of text: quote it"
            elif key in lines:
                problem = f"duplicate key {shortened(key)}, first in line {lines[key]}: drop one"
            if problem:
                raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


for _kind, _pattern, _first_characters in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]{1,16}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), _first_characters
    )


def parse_yaml(text: str, source: str, loader: type[Loader] = Loader) -> Any:
    try:
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem)
        if error.problem_mark:
            source += f", line {error.problem_mark.line + 1}"
            if problem == "expected ',' or '}', but got '{'":
                source += " ('${NAME}' inside {...} needs quotes)"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:  # from int(): Python parses at most 4300 digits
        problem = "a number of thousands of digits"
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
    raise RecipeError(f"{source}: not readable as YAML: {problem}")


def read_launched_recipe(experiment_dir: Path) -> dict[str, Any]:
    """Read the recipe that an experiment was launched with (including `--set`), named after its folder."""
    path = experiment_dir / EXPERIMENT
    try:
        recipe = json.loads(read_regular(path, MAX_FILE_BYTES))["recipe"]
        recipe = drop_removed(migrate(recipe))
        if isinstance(recipe.get("compare"), dict):
            recipe["compare"].pop("noise_priors", None)  # another launch has a longer history
        return {**recipe, "name": Path(os.path.realpath(experiment_dir)).name}
    except FileNotFoundError:
        raise RecipeError(
            f"{experiment_dir}: cannot be read as a recipe: the folder has no {EXPERIMENT}; give a recipe "
            "file, or an experiment's folder to use the recipe it was launched with"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {shortened(str(error))}") from None


def refuse_secrets(raw: Mapping[str, Any], source: str) -> None:
    """Raise RecipeError for the first token of a known format, without quoting it.

    Also for an environment variable of a program or a launcher whose name says that its value is a secret. A
    recipe is copied into every run and shown in every report.
    """
    for names, value in _iter_texts(raw, ()):
        field, name = redacted(".".join(names)), names[-1]
        of_launcher = names[0] in ("launcher", "env", "setup")  # a profile has the launcher's keys at the top
        is_variable = len(names) > 1 and names[-2] == "env" and is_secret_variable(name, value)
        if is_variable and not of_launcher:
            raise RecipeError(f"{source}: {field}: looks like a secret; write ${{{name}}} and export {name}")
        if is_variable or has_token(value) or any(map(has_token, names)):
            remedy = (
                "scripts would contain it and clusters would show it; set it in the nodes' own environment "
                "or files"
                if of_launcher
                else "pass it as an environment variable, such as trainer.env.HF_TOKEN: ${HF_TOKEN}, which "
                "is read at every start and never stored"
            )
            raise RecipeError(f"{source}: {field}: looks like a secret; {remedy}")


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
