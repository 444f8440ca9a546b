"""Validation of trees into models; every error is one line: field, value received, what is allowed."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from abrun.errors import RecipeError
from abrun.messages.codes import Code, Reason
from abrun.recipe.section import Section
from abrun.runs.migrations import RENAMED
from abrun.runs.redaction import shortened

M = TypeVar("M", bound=BaseModel)

LIMIT_KEYS = ("gt", "ge", "lt", "le", "expected")  # keys of pydantic's error context for numbers and literals
RENAMED_KEYS = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
# Texts that YAML reads as numbers or booleans
SCALAR_PATTERN = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?|true|false"


def validated(model: type[M], raw: Mapping[str, Any], source: str) -> M:
    """Validate a tree into a model. Raises RecipeError, one line that begins with `source`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        # A misspelt key is the reason why the right one is missing
        errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
        fields = dict.fromkeys(".".join(_locate_field(each["loc"], model)[0]) for each in errors)
        raise RecipeError(_reason(errors[0], model, {"source": source, "others": [*fields][1:]})) from None


def _reason(error: Any, model: type[BaseModel], context: Mapping[str, Any]) -> Reason:
    """Convert one pydantic error to a reason: field, value received, what is allowed, what to do."""
    names, owners, sections, siblings = _locate_field(error["loc"], model)
    field, kind, details = ".".join(names), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        if types := _types_with_key(names[-1], siblings):
            return Code.KEY_OF_OTHER_TYPE(**context, field=field, types=types)
        return unknown_key(field, names[-1], owners[0], **context)
    if kind == "missing":
        return Code.VALUE_MISSING(**context, field=field)
    if kind == "union_tag_not_found":
        return Code.TYPE_MISSING(**context, field=f"{field}.type", allowed=_type_names(sections))
    if kind == "union_tag_invalid":
        expected = details["expected_tags"]
        return Code.TYPE_UNKNOWN(
            **context, field=f"{field}.type", got=shortened(details["tag"]), expected=expected
        )
    if kind == "value_error":  # raised by one of abrun's validators, of a field or a section
        problem = details["error"]
        refused = getattr(problem, "field", "") or field
        return Code.RULE_BROKEN(**context, field=refused, problem=getattr(problem, "problem", str(problem)))
    got = shortened(error["input"])
    if kind in ("too_short", "too_long"):
        limit = details["min_length" if kind == "too_short" else "max_length"]
        return Code.LENGTH_NOT_ALLOWED(**context, field=field, got=got, kind=kind, limit=limit)
    advice = _suggest_spelling(kind, error["input"], allows_sections=bool(sections))
    if kind == "list_type" and names and _is_list_of_integers(owners[0], names[-1]):
        kind, advice = "number_list_type", _suggest_number_list(error["input"])
    limits = {name: _drop_zero_fraction(limit) for name, limit in details.items() if name in LIMIT_KEYS}
    return Code.VALUE_NOT_ALLOWED(**context, field=field, got=got, kind=kind, limits=limits, advice=advice)


def _suggest_spelling(kind: str, got: Any, *, allows_sections: bool) -> Reason | None:
    """Return the spelling to use instead if the value makes it clear, else None."""
    if kind == "int_type" and isinstance(got, float) and got.is_integer() and abs(got) < 2**31:
        return Code.WRITE_INSTEAD(value=str(_drop_zero_fraction(got)))
    is_scalar = isinstance(got, str) and re.fullmatch(SCALAR_PATTERN, got)
    if is_scalar and kind in ("int_type", "float_type", "bool_type"):
        return Code.WRITE_UNQUOTED()
    if kind == "string_type" and isinstance(got, bool | int | float):
        return Code.WRITE_QUOTED()
    if kind == "string_type" and isinstance(got, dict) and [*got.values()] == [None]:
        (name,) = got  # YAML reads an unquoted {seed} as a mapping
        return Code.WRITE_INSTEAD(value=f"'{{{name}}}'") if str(name).isidentifier() else None
    if kind == "list_type" and isinstance(got, str | bool | int | float) and not allows_sections:
        return Code.WRITE_INSTEAD(value=f"[{shortened(got)}]")
    return None


def _is_list_of_integers(section: type[BaseModel], name: str) -> bool:
    items = get_args(section.model_fields[name].annotation) if name in section.model_fields else ()
    return bool(items) and int in (items[0], *get_args(items[0]))


def _suggest_number_list(got: Any) -> Reason | None:
    """Return the list to write instead of `3`, `'0-3'` or `'0, 1'`."""
    if match := re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", str(got)):
        numbers = [*range(int(match[1]), int(match[2]) + 1)[:1000]]
    else:
        words = re.split(r"[\s,]+", str(got).strip())
        numbers = [int(word) for word in words if re.fullmatch(r"\d{1,9}", word)]
    return Code.WRITE_INSTEAD(value=str(numbers)) if 0 < len(numbers) <= 20 else None


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


def _type_names(sections: Iterable[type[BaseModel]]) -> list[str | None]:
    return [type_name(section) for section in sections]


def _types_with_key(key: str, siblings: Iterable[type[BaseModel]]) -> list[str | None]:
    return _type_names(section for section in siblings if key in section.model_fields and type_name(section))


def unknown_key(
    field: str, key: str, section: type[BaseModel], *, source: str, others: Sequence[str]
) -> Reason:
    """Return the reason for an unknown key of a section, with the key that was probably meant."""
    allowed = sorted(section.model_fields)
    if RENAMED_KEYS.get(key) in allowed:
        return Code.KEY_RENAMED(source=source, field=field, name=RENAMED_KEYS[key])
    return Code.KEY_UNKNOWN(
        source=source, field=field, nearest=closest_name(key, allowed), allowed=allowed, others=others
    )


def closest_name(name: str, allowed: Sequence[str]) -> str | None:
    """Return the allowed name most similar to one that is not allowed, or None."""
    return next(iter(difflib.get_close_matches(name, allowed, n=1)), None)


def suggest_name(name: str, allowed: Sequence[str]) -> str:
    """Return "did you mean ...?" for a name that is not allowed, or else all allowed names."""
    close = closest_name(name, allowed)
    return f"did you mean {close!r}?" if close else f"allowed: {', '.join(allowed)}"
