"""From YAML to one tree: what a scalar means, `defaults:` inheritance, `--set`."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from abrun.errors import RecipeError
from abrun.layout import EXPERIMENT
from abrun.recipe.refusals import shortened
from abrun.regular_files import open_regular

MOST_BYTES = 1 << 17  # of a recipe with all that its `defaults:` name; PyYAML reads about 30 KB a second
MOST_FILES = 64  # likewise
MOST_PARENTS = 16  # of one file
HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def dotted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; empty mappings stay as values."""
    flat: dict[str, Any] = {}
    levels = [("", iter(mapping.items()))]  # no recursion: a file may be nested as deep as its reader goes
    while levels:
        prefix, items = levels[-1]
        for key, value in items:
            if isinstance(value, Mapping) and value:
                levels.append((f"{prefix}{key}.", iter(value.items())))
                break
            flat[f"{prefix}{key}"] = value
        else:
            levels.pop()
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    made = {id(tree)}  # mappings of this tree alone: others are copied before something is put in
    for name, value in flat.items():
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            below: Any = branch.get(parent)
            if id(below) not in made:
                below = branch[parent] = dict(below) if isinstance(below, Mapping) else {}
                made.add(id(below))
            branch = below
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
    """YAML as people read it: what YAML 1.2 calls a number, true, false or null is one; the rest is text.

    (YAML 1.1 takes 010 for 8, 1:30 for 90, `on` for true, and has dates.) Refused are keys given twice, tags
    (`!name`), and aliases (`*name`): `defaults:` shares values, and few lines of aliases can mean gigabytes.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not supported: write the value out, or share it through defaults:"
        elif getattr(event, "tag", None) is not None:
            problem = f"tags are not supported, got {shortened(event.tag)}: write the value alone"
        if problem:
            raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> str:
        text = super().construct_scalar(node)
        if HALF_A_PAIR.search(text):
            problem = f"got {shortened(text)}, with half of a surrogate pair: write the character itself"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key: Any = self.construct_object(key_node, deep=True)  # pyright: ignore
            problem = None
            if not (isinstance(key, str) and key.isprintable()):
                problem = f"key {shortened(key)} is not a line of text: put it in quotes"
            elif key in lines:
                problem = f"key {shortened(key)} is given twice, first in line {lines[key]}: drop one"
            if problem:
                raise yaml.MarkedYAMLError(None, None, problem, key_node.start_mark)
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]{1,16}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), _first)


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        if error.problem_mark and error.problem == "expected ',' or '}', but got '{'":
            where += " ('${NAME}' inside of {...} takes quotes)"
        raise RecipeError(f"{source}{where}: not readable as YAML: {error.problem}") from None
    except RecursionError:
        raise RecipeError(f"{source}: not readable as YAML: nested too deeply") from None
    except ValueError:  # of int: Python reads numbers of up to 4300 digits
        raise RecipeError(f"{source}: not readable as YAML: a number of thousands of digits") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None


def read_with_defaults(path: Path) -> dict[str, Any]:
    """The tree of a recipe's file laid over those that its `defaults:` name. Raises RecipeError, one line."""
    return _Files().tree(path, ())


def read_launched(experiment_dir: Path) -> dict[str, Any]:
    """The tree of the recipe that an experiment was launched with, `--set` and all, by the folder's name."""
    path = experiment_dir / EXPERIMENT
    try:
        with open_regular(path) as file:
            recipe = json.loads(file.read())["recipe"]
        return {**recipe, "name": Path(os.path.realpath(experiment_dir)).name}
    except FileNotFoundError:
        raise RecipeError(
            f"{experiment_dir}: cannot be read as a recipe: a folder without {EXPERIMENT}; give a recipe's "
            "file, or an experiment's folder, for what that was launched with"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {shortened(str(error))}") from None


class _Files:
    """The files behind one recipe: each is read once, however many others name it."""

    def __init__(self) -> None:
        self._trees: dict[Path, dict[str, Any]] = {}
        self._bytes_left = MOST_BYTES

    def tree(self, path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
        """A file with all that it inherits; `chain` are the files that led to it."""
        resolved = Path(os.path.realpath(path))
        if resolved in chain:
            raise RecipeError(
                f"{chain[-1]}: defaults: a cycle of recipes ({' > '.join(p.name for p in (*chain, resolved))}"
                "); drop one link"
            )
        named = Path(os.path.realpath(path.parent), path.name)  # what a link inherits lies beside the link
        if named not in self._trees:
            if max(len(chain), len(self._trees)) >= MOST_FILES:
                raise RecipeError(
                    f"{path}: defaults: got more than {MOST_FILES} files behind one recipe; merge some"
                )
            self._trees[named] = self._read(path, (*chain, resolved))
        return self._trees[named]

    def _read(self, path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
        raw = parse_yaml(self._text(path, chain[:-1]), str(path))
        if raw is None:
            raise RecipeError(f"{path}: an empty recipe; abrun init writes one to begin with")
        if not isinstance(raw, dict):
            raise RecipeError(f"{path}: got {shortened(raw)}; a recipe is a mapping of keys to values")
        parents = raw.pop("defaults", [])
        parents = [parents] if isinstance(parents, str) else parents
        if not isinstance(parents, list) or not all(
            isinstance(parent, str) and parent.isprintable() and len(parent) < 1000 for parent in parents
        ):
            raise RecipeError(
                f"{path}: defaults: got {shortened(parents)}; allowed: a path or a list of paths"
            )
        if len(parents) > MOST_PARENTS:
            raise RecipeError(f"{path}: defaults: got {len(parents)} paths; allowed: at most {MOST_PARENTS}")
        merged: dict[str, Any] = {}
        for parent in parents:
            merged = merge(merged, self.tree(path.parent / parent, chain))
        return merge(merged, raw)

    def _text(self, path: Path, chain: tuple[Path, ...]) -> str:
        try:
            with open_regular(path) as file:
                content = file.read(self._bytes_left + 1)
        except FileNotFoundError:
            if chain:
                raise RecipeError(
                    f"{chain[-1]}: defaults: {path}: no such recipe; give a path from that file's folder "
                    f"(abrun recipes NAME > {path.name} writes one that ships)"
                ) from None
            raise RecipeError(f"{path}: no such recipe; check the path") from None
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read as a recipe: {error.strerror}") from None
        self._bytes_left -= len(content)
        if self._bytes_left < 0:
            raise RecipeError(
                f"{path}: larger than {MOST_BYTES >> 10} KiB, with all that the recipe inherits; "
                "a recipe states differences: keep data elsewhere"
            )
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {error.start + 1} is none of it"
            raise RecipeError(
                f"{path}: cannot be read as a recipe: not UTF-8 ({where}); save it as UTF-8"
            ) from None


def overridden(raw: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A recipe with one `key=value` set: the value replaces what the dotted key held, as a whole.

    A number in the key reaches into a list. Raises RecipeError, one line.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")) or not key.isprintable():
        raise RecipeError(
            f"--set: got {shortened(override)}; allowed: key=value with a dotted key, such as steps=20"
        )
    source = f"--set {shortened(key)[1:-1]}"
    return _with_value(raw, key.split("."), parse_yaml(text, source), source, ())


def _with_value(tree: Any, names: list[str], value: Any, source: str, above: tuple[str, ...]) -> Any:
    """`tree` with the value below it at `names` replaced; mappings on the way there are made."""
    name, *rest = names
    here = ".".join(above)
    if isinstance(tree, list):
        if not (name.isdecimal() and len(name) < 10 and int(name) < len(tree)):
            allowed = f"0 to {len(tree) - 1}" if len(tree) > 1 else "0" if tree else "none, it is empty"
            raise RecipeError(
                f"{source}: got {shortened(name)} as the index into {here}; allowed: {allowed}; "
                f"or give the list whole: {here}=[...]"
            )
        changed: Any = list(tree)
        key: Any = int(name)
        below = tree[key]
    else:
        if name.isdecimal() and not isinstance(tree, Mapping):
            raise RecipeError(
                f"{source}: got the index {shortened(name)[1:-1]} where {here} is no list (but "
                f"{shortened(tree)}); give the list whole: {here}=[...]"
            )
        changed = dict(tree) if isinstance(tree, Mapping) else {}
        key, below = name, changed.get(name)
        if name == "type" and not rest and below not in (None, value):
            changed = {}  # the other keys are the old type's
    changed[key] = _with_value(below, rest, value, source, (*above, name)) if rest else value
    return changed
