"""Merging of recipe trees: `defaults:`, arms, `--set`, and sections whose `type` changes."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import RecipeError
from abrun.recipe.command import CommandRunConfig
from abrun.recipe.launcher import LAUNCHER_TYPES
from abrun.recipe.reading import dotted, parse_yaml
from abrun.recipe.refusals import RENAMED_KEYS, sections_in, shortened, type_name
from abrun.recipe.run import OwnRunConfig
from abrun.recipe.section import Section
from abrun.runs.experiment import is_experiment, suggest_path
from abrun.runs.files import open_regular

# Limits of a recipe with all its `defaults:`; PyYAML reads about 30 KB/s
MAX_BYTES = 1 << 17
MAX_FILES = 64
MAX_PARENTS = 16  # `defaults:` of one file


def _typed_sections(model: type[Section], above: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield every section that has a `type`, with its dotted key."""
    for name, field in model.model_fields.items():
        for section in sections_in(field.annotation):
            if type_name(section):
                yield f"{above}{name}", section
            yield from _typed_sections(section, f"{above}{name}.")


# Dotted key of a section -> name of a type -> its model; includes sections with a single type
TYPES: dict[str, dict[str, type[Section]]] = {"launcher": dict(LAUNCHER_TYPES)}
for _model in (OwnRunConfig, CommandRunConfig):
    for _key, _section in _typed_sections(_model):
        TYPES.setdefault(_key, {})[str(type_name(_section))] = _section
RESET_SECTION = "trainer"  # nothing of one trainer's section applies to another trainer


def merge(base: Mapping[str, Any], change: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return `base` recursively updated with `change`; `above` are the keys that lead to both.

    `_drop_keys_of_old_type` decides what a section keeps whose `type` changes.
    """
    merged = dict(base)
    for key, value in change.items():
        old, keys = merged.get(key), (*above, key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(_drop_keys_of_old_type(old, value.get("type"), keys), value, keys)
        else:
            merged[key] = value
    return merged


def _drop_keys_of_old_type(
    section: Mapping[str, Any], new_type: Any, keys: tuple[str, ...]
) -> Mapping[str, Any]:
    """Return the part of a section that survives a change of its type.

    Keys of both types stay. A key of only the old type is dropped if it is null or at its default; otherwise
    it stays, so that validation refuses it by name. If the types share no key, or the trainer changes, all
    keys of only the old type are dropped.
    """
    key = _section_key(keys)
    old, new = _model_of(key, section.get("type")), _model_of(key, new_type)
    if new_type is None or old is None or new is None or old is new:
        return section
    if keys[0] == "arms" and "type" not in section:  # an arm's section inherits the baseline's type
        return section
    shared = (old.model_fields.keys() & new.model_fields.keys()) - {"type"}
    if not shared or key == RESET_SECTION:
        return {name: value for name, value in section.items() if name in new.model_fields}
    dropped = old.model_fields.keys() - new.model_fields.keys()
    return {
        name: value
        for name, value in section.items()
        if name not in dropped or value not in (None, _field_default(old, name))
    }


def drop_foreign_nulls(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a tree without nulls for keys that only another type of the section has."""
    key = ".".join(above)
    model, foreign = _model_of(key, tree.get("type")), set[str]()
    if model is not None:
        foreign = {name for section in TYPES[key].values() for name in section.model_fields}
        foreign -= model.model_fields.keys()
    return {
        name: drop_foreign_nulls(value, (*above, name)) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if value is not None or name not in foreign
    }


def _section_key(keys: tuple[str, ...]) -> str:
    """Return the dotted key of a section, without the `arms.NAME` prefix."""
    return ".".join(keys[2:] if keys[0] == "arms" else keys)


def _model_of(key: str, tag: Any) -> type[Section] | None:
    types = TYPES.get(key, {})
    if tag is None:
        return next((model for model in types.values() if not model.model_fields["type"].is_required()), None)
    return types.get(tag) if isinstance(tag, str) else None


def _field_default(model: type[Section], name: str) -> Any:
    default = model.model_fields[name].get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, Section) else default


def defaults_of_type(key: str, tag: Any) -> dict[str, Any]:
    """Return the defaults of a section's type by dotted key; `key` is the section's key."""
    model = _model_of(key, tag)
    if model is None:
        return {}
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    return dotted({key: {name: _field_default(model, name) for name in optional}}) if optional else {}


def implied_by_types(base: Mapping[str, Any], changed: Mapping[str, Any]) -> set[str]:
    """Return keys at their defaults that only one of two flat configurations has, by a section's type."""
    defaults: dict[str, Any] = {}
    for section in TYPES:
        tags = [config.get(f"{section}.type") for config in (base, changed)]
        if None not in tags and tags[0] != tags[1]:
            old, new = (defaults_of_type(section, tag) for tag in tags)
            defaults |= {key: (old | new)[key] for key in old.keys() ^ new.keys()}
    values = {**base, **changed}
    return {key for key in base.keys() ^ changed.keys() if key in defaults and defaults[key] == values[key]}


def type_lacks_key(change: Mapping[str, Any], key: str) -> bool:
    """Return whether an arm changes the section of `key` to a type that lacks the key."""
    section, _, name = key.rpartition(".")
    tag = dotted(change).get(f"{section}.type")
    model = _model_of(section, tag) if tag is not None else None
    return model is not None and name not in model.model_fields


def read_with_defaults(path: Path) -> dict[str, Any]:
    """Read a recipe's file merged over its `defaults:`. Raises RecipeError, one line."""
    return _RecipeFiles().tree(path, ())


class _RecipeFiles:
    """Files of one recipe; each is read once, however many others inherit from it."""

    def __init__(self) -> None:
        self._trees: dict[Path, dict[str, Any]] = {}
        self._bytes_left = MAX_BYTES

    def tree(self, path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
        """Return a file's tree with everything it inherits; `chain` are the files that led to it."""
        resolved = Path(os.path.realpath(path))
        if resolved in chain:
            cycle = " > ".join(file.name for file in (*chain, resolved))
            raise RecipeError(f"{chain[-1]}: defaults: recipes inherit in a cycle ({cycle}); drop one")
        # `defaults:` are relative to the folder of a link, not of its target
        named = Path(os.path.realpath(path.parent), path.name)
        if named not in self._trees:
            if max(len(chain), len(self._trees)) >= MAX_FILES:
                problem = f"the recipe inherits from more than {MAX_FILES} files"
                raise RecipeError(f"{path}: defaults: {problem}; merge some")
            self._trees[named] = self._read(path, (*chain, resolved))
        return self._trees[named]

    def _read(self, path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
        raw = parse_yaml(self._text(path, chain[:-1]), str(path))
        if raw is None:
            raise RecipeError(f"{path}: the recipe is empty; create one with abrun init")
        if not isinstance(raw, dict):
            raise RecipeError(f"{path}: got {shortened(raw)}; allowed: a mapping of keys to values")
        parents = raw.pop("defaults", [])
        parents = [parents] if isinstance(parents, str) else parents
        paths = parents if isinstance(parents, list) else [None]
        if not all(isinstance(text, str) and text.isprintable() and len(text) < 1000 for text in paths):
            got = shortened(parents)
            raise RecipeError(f"{path}: defaults: got {got}; allowed: a path or a list of paths")
        if len(parents) > MAX_PARENTS:
            raise RecipeError(f"{path}: defaults: got {len(parents)} paths; allowed: at most {MAX_PARENTS}")
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
                    f"{chain[-1]}: defaults: {path}: no such recipe; give a path relative to that file's "
                    f"folder (to copy a built-in recipe: abrun recipes NAME > {path.name})"
                ) from None
            closest = suggest_path(path, _can_be_recipe)
            remedy = f"did you mean {closest}?" if closest else "check the path"
            raise RecipeError(f"{path}: no such recipe; {remedy}") from None
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read as a recipe: {error.strerror}") from None
        self._bytes_left -= len(content)
        if self._bytes_left < 0:
            raise RecipeError(
                f"{path}: the recipe and its parents exceed {MAX_BYTES >> 10} KiB; keep data in other files"
            )
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(
                f"{path}: cannot be read as a recipe: not UTF-8 (at byte {error.start + 1}); save it as UTF-8"
            ) from None


def _can_be_recipe(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") or is_experiment(path)


def apply_override(raw: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return a recipe's tree with one `key=value` set; the value replaces the old one as a whole.

    A number in the key is an index into a list. Raises RecipeError, one line.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")) or not key.isprintable():
        raise RecipeError(
            f"--set: got {shortened(override)}; allowed: key=value with a dotted key, such as steps=20"
        )
    source = f"--set {shortened(key)[1:-1]}"
    return _replace_value(raw, key.split("."), parse_yaml(text, source), source, ())


def refuse_shadowed(raw: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Raise RecipeError for a `key=value` without effect, because every arm sets the key itself.

    The arms of `raw` have dotted keys.
    """
    arms = raw.get("arms")
    if not isinstance(arms, Mapping) or not all(isinstance(change, Mapping) for change in arms.values()):
        return
    for override in overrides:
        key, _, text = override.partition("=")
        keys = dotted({key: parse_yaml(text, f"--set {shortened(key)[1:-1]}")})
        if arms and all(name in change for name in keys for change in arms.values()):
            treatment = next((arm for arm in arms if arm != "baseline"), "baseline")
            raise RecipeError(
                f"--set {key}: has no effect, because every arm sets it; use arms.{treatment}.{key}"
            )


def _replace_value(tree: Any, names: list[str], value: Any, source: str, above: tuple[str, ...]) -> Any:
    """Return `tree` with the value at `names` replaced; missing mappings on the path are created."""
    name, *rest = names
    field = ".".join(above)
    if isinstance(tree, list):
        if not (name.isdecimal() and len(name) < 10 and int(name) < len(tree)):
            allowed = f"0 to {len(tree) - 1}" if len(tree) > 1 else "0" if tree else "none, it is empty"
            raise RecipeError(
                f"{source}: got index {shortened(name)} for {field}; allowed: {allowed}; or give the whole "
                f"list: {field}=[...]"
            )
        changed: Any = list(tree)
        key: Any = int(name)
        below = tree[key]
    else:
        if name.isdecimal() and not isinstance(tree, Mapping):
            if above and above[-1] in RENAMED_KEYS:
                raise RecipeError(f"{source}: {field}: was renamed; use {RENAMED_KEYS[above[-1]]}")
            raise RecipeError(
                f"{source}: got index {shortened(name)[1:-1]}, but {field} is {shortened(tree)}, not a list; "
                f"give the whole list: {field}=[...]"
            )
        changed = dict(tree) if isinstance(tree, Mapping) else {}
        key, below = name, changed.get(name)
        if name == "type" and not rest:
            changed = dict(_drop_keys_of_old_type(changed, value, above))
    changed[key] = _replace_value(below, rest, value, source, (*above, name)) if rest else value
    return changed
