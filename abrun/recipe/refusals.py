"""Validation of trees into models; every error is one line: field, value received, what is allowed."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from abrun.errors import RecipeError
from abrun.recipe.section import RuleError, Section
from abrun.runs.migrations import RENAMED
from abrun.runs.redaction import shortened

M = TypeVar("M", bound=BaseModel)

RENAMED_KEYS = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
# Key of an earlier version, or key and value -> what to do instead
REMOVED_SETTINGS = {
    "cluster.runs_per_gpu: auto": "write a number (abrun memory-profile shows what a run takes)",
    "keep_samples.every": "drop it (samples of the first and of every tenth step are kept)",
    "launcher.type: jobset": "run abrun launch in a SkyPilot task",
    "launcher.type: skypilot": "run abrun launch in a SkyPilot task",
    "policy.backend.distributed_optimizer": "drop it (the optimizer is always distributed)",
    "policy.logprobs.memory_budget_mib": "set policy.logprobs.chunk_size",
}
# Allowed values by the type of pydantic's error, whose context has the numbers
ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}
# Texts that YAML reads as numbers or booleans
SCALAR_PATTERN = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?|true|false"
MAX_NAMED = 100  # characters of the names of further invalid fields


def validated(model: type[M], raw: Mapping[str, Any], source: str) -> M:
    """Validate a tree into a model. Raises RecipeError, one line that begins with `source`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        # A misspelt key is the reason why the right one is missing, or does not fit another
        ranks = {"extra_forbidden": 0, "missing": 2}
        errors = sorted(error.errors(include_url=False), key=lambda each: ranks.get(each["type"], 1))
        others = [*dict.fromkeys(".".join(_locate_field(each["loc"], model)[0]) for each in errors)][1:]
        names = textwrap.shorten(", ".join(others), MAX_NAMED, placeholder=" ...")
        more = f" (and {len(others)} more: {names})" if others else ""
        raise RecipeError(f"{source}: {_describe(errors[0], model)}{more}") from None


def _describe(error: Any, model: type[BaseModel]) -> str:
    """Describe one error of pydantic: field, value received, what is allowed, what to do."""
    names, owners, sections, siblings = _locate_field(error["loc"], model)
    field, kind, details = ".".join(names), error["type"], error.get("ctx", {})
    if kind == "value_error":  # raised by one of abrun's validators, of a field or a section
        problem = details["error"]
        return str(problem) if isinstance(problem, RuleError) or not field else f"{field}: {problem}"
    if kind == "missing":
        return f"{field}: missing; add it to the recipe"
    if kind == "extra_forbidden":
        types = [type_name(section) for section in siblings if names[-1] in section.model_fields]
        if allowed := ", ".join(repr(name) for name in types if name):
            return (
                f"{field}: not a key of this type; use type: {allowed}, or drop it (null if it is inherited)"
            )
        return f"{field}: {describe_unknown_key(field, owners[0])}"
    if kind == "union_tag_not_found":
        return f"{field}.type: missing; allowed: {', '.join(repr(type_name(each)) for each in sections)}"
    if kind == "union_tag_invalid":
        field, got, allowed = f"{field}.type", details["tag"], details["expected_tags"]
    else:
        got = error["input"]
        limits = {name: _drop_zero_fraction(limit) for name, limit in details.items()}
        allowed = ALLOWED.get(kind, "another kind of value").format(**limits)
    if isinstance(got, str) and (instead := REMOVED_SETTINGS.get(f"{field}: {got}")):
        return f"{field}: got {got!r}, which was removed; {instead}"
    items = owners[0].model_fields.get(names[-1]) if kind == "list_type" and names else None
    item_types = get_args(items.annotation) if items else ()
    if item_types and int in (item_types[0], *get_args(item_types[0])):
        advice = _suggest_number_list(got)
        return f"{field}: got {shortened(got)}; allowed: a list of numbers{advice or ', such as [4, 8]'}"
    advice = _suggest_spelling(kind, got, allows_sections=bool(sections))
    place = f"{field}: " if field else ""
    return f"{place}got {shortened(got)}; allowed: {allowed}{advice}"


def _suggest_spelling(kind: str, got: Any, *, allows_sections: bool) -> str:
    """Return the spelling to use instead, after a semicolon, if the value makes it clear; else nothing."""
    if kind == "int_type" and isinstance(got, float) and got.is_integer() and abs(got) < 2**31:
        return f"; write {_drop_zero_fraction(got)}"
    is_scalar = isinstance(got, str) and re.fullmatch(SCALAR_PATTERN, got)
    if is_scalar and kind in ("int_type", "float_type", "bool_type"):
        return "; write it without quotes"
    if kind == "string_type" and isinstance(got, bool | int | float):
        return "; put it in quotes"
    if kind == "string_type" and isinstance(got, dict) and [*got.values()] == [None]:
        (name,) = got  # YAML reads an unquoted {seed} as a mapping
        return f"; write '{{{name}}}'" if str(name).isidentifier() else ""
    if kind == "list_type" and isinstance(got, str | bool | int | float) and not allows_sections:
        return f"; write [{shortened(got)}]"
    return ""


def _suggest_number_list(got: Any) -> str:
    """Return the list to write, after a semicolon, instead of `3`, `'0-3'` or `'0, 1'`."""
    if match := re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", str(got)):
        numbers = [*range(int(match[1]), int(match[2]) + 1)[:1000]]
    else:
        words = re.split(r"[\s,]+", str(got).strip())
        numbers = [int(word) for word in words if re.fullmatch(r"\d{1,9}", word)]
    return f"; write {numbers}" if 0 < len(numbers) <= 20 else ""


def _drop_zero_fraction(limit: Any) -> Any:
    """Return 1 for 1.0, as people write it."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _locate_field(
    location: Iterable[str | int], model: type[BaseModel]
) -> tuple[list[str], Sequence[type[BaseModel]], Sequence[type[BaseModel]], Sequence[type[BaseModel]]]:
    """Return an error's keys, the sections with its field, the sections its value may be, and the siblings.

    Siblings are the sections among which the `type` of the field's owner chose.
    """
    sections: Sequence[type[BaseModel]] = [model]
    owners = siblings = sections
    names: list[str] = []
    for step in location:
        chosen = [section for section in sections if type_name(section) == step]
        if len(sections) > 1 and chosen:  # pydantic's name of the union member; not in the user's path
            siblings, sections = sections, chosen
            continue
        plain = 0 < len(str(step)) <= 100 and str(step).isprintable()
        names.append(str(step) if plain else shortened(step))
        if isinstance(step, str):
            owners = sections
            fields = [section.model_fields[step] for section in owners if step in section.model_fields]
            sections = sections_in(fields[0].annotation) if fields else []
    return names, owners, sections, siblings


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the Section classes inside an annotation such as `A | B | None` or `list[A]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in getattr(annotation, "__args__", ()) for section in sections_in(argument)]


def type_name(section: type[BaseModel]) -> str | None:
    """Return the `type` that selects a section (the first of several), or None."""
    kind = section.model_fields.get("type")
    return get_args(kind.annotation)[0] if kind else None


def describe_unknown_key(field: str, section: type[BaseModel]) -> str:
    """Describe a key that a section lacks, with the one to use instead or that was probably meant."""
    key, allowed = field.rpartition(".")[2], sorted(section.model_fields)
    if RENAMED_KEYS.get(key) in allowed:
        return f"was renamed; use {RENAMED_KEYS[key]}"
    if instead := REMOVED_SETTINGS.get(field):
        return f"was removed; {instead}"
    return f"unknown key; {suggest_name(key, allowed)}"


def suggest_name(name: str, allowed: Sequence[str]) -> str:
    """Return "did you mean ...?" for a name that is not allowed, or else all allowed names."""
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"
