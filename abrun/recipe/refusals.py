"""From a tree to a validated model; every refusal is one line: field, value received, what is allowed."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from abrun.errors import RecipeError
from abrun.reasons import Code, Reason
from abrun.recipe.section import Section
from abrun.redaction import shortened

M = TypeVar("M", bound=BaseModel)

LIMITS = ("gt", "ge", "lt", "le", "expected")  # what pydantic says of numbers and of literals
RENAMED_KEYS = {
    "primary": "claims",
    "looks": "interim",
    "looks_spending": "alpha_spending",
    "planted_fault": "injected_fault",
}
PLAIN = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?|true|false"  # what YAML reads as a number or a truth value


def validated(model: type[M], raw: Mapping[str, Any], source: str) -> M:
    """A model of what a tree holds. Raises RecipeError, one line that begins with `source`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        fields = [*dict.fromkeys(".".join(_place(one["loc"], model)[0]) for one in (first, *others))][1:]
        raise RecipeError(_reason(first, model, {"source": source, "others": fields})) from None


def _reason(error: Any, model: type[BaseModel], context: Mapping[str, Any]) -> Reason:
    """Return one pydantic error as field, value received, what is allowed, what to do."""
    names, owners, sections, siblings = _place(error["loc"], model)
    field, kind, details = ".".join(names), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        if types := _types_with(names[-1], siblings):
            return Code.KEY_OF_OTHER_TYPE(**context, field=field, types=types)
        return unknown(field, names[-1], owners[0], **context)
    if kind == "missing":
        return Code.VALUE_MISSING(**context, field=field)
    if kind == "union_tag_not_found":
        return Code.TYPE_MISSING(**context, field=f"{field}.type", allowed=_types(sections))
    if kind == "union_tag_invalid":
        expected = details["expected_tags"]
        return Code.TYPE_UNKNOWN(
            **context, field=f"{field}.type", got=shortened(details["tag"]), expected=expected
        )
    if kind == "value_error":  # raised in a validator of ours, of a field or of a section
        problem = details["error"]
        refused = getattr(problem, "field", "") or field
        return Code.RULE_BROKEN(**context, field=refused, problem=getattr(problem, "problem", str(problem)))
    got = shortened(error["input"])
    if kind in ("too_short", "too_long"):
        limit = details["min_length" if kind == "too_short" else "max_length"]
        return Code.LENGTH_NOT_ALLOWED(**context, field=field, got=got, kind=kind, limit=limit)
    advice = _advice(kind, error["input"], of_sections=bool(sections))
    if kind == "list_type" and names and _holds_numbers(owners[0], names[-1]):
        kind, advice = "number_list_type", _as_numbers(error["input"])
    limits = {name: _plain(limit) for name, limit in details.items() if name in LIMITS}
    return Code.VALUE_NOT_ALLOWED(**context, field=field, got=got, kind=kind, limits=limits, advice=advice)


def _advice(kind: str, got: Any, *, of_sections: bool) -> Reason | None:
    """What to write instead, where the value itself says it."""
    if kind == "int_type" and isinstance(got, float) and got.is_integer() and abs(got) < 2**31:
        return Code.WRITE_INSTEAD(value=str(_plain(got)))
    if kind in ("int_type", "float_type", "bool_type") and isinstance(got, str) and re.fullmatch(PLAIN, got):
        return Code.WRITE_UNQUOTED()
    if kind == "string_type" and isinstance(got, bool | int | float):
        return Code.WRITE_QUOTED()
    if kind == "list_type" and isinstance(got, str | bool | int | float) and not of_sections:
        return Code.WRITE_INSTEAD(value=f"[{shortened(got)}]")
    return None


def _holds_numbers(section: type[BaseModel], name: str) -> bool:
    """Whether a field is a list of whole numbers."""
    items = get_args(section.model_fields[name].annotation) if name in section.model_fields else ()
    return bool(items) and int in (items[0], *get_args(items[0]))


def _as_numbers(got: Any) -> Reason | None:
    """What to write instead of `3`, `'0-3'` or `'0, 1'`."""
    if found := re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", str(got)):
        numbers = [*range(int(found[1]), int(found[2]) + 1)[:1000]]
    else:
        numbers = [int(one) for one in re.split(r"[\s,]+", str(got).strip()) if re.fullmatch(r"\d{1,9}", one)]
    return Code.WRITE_INSTEAD(value=str(numbers)) if 0 < len(numbers) <= 20 else None


def _plain(limit: Any) -> Any:
    """A number as people write it: 1 for 1.0."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _place(
    location: Iterable[str | int], model: type[BaseModel]
) -> tuple[list[str], Sequence[type[BaseModel]], Sequence[type[BaseModel]], Sequence[type[BaseModel]]]:
    """The keys that lead to an error, the sections that hold its field, and those its value may be.

    Last, the sections among which the `type` of its owner chose.
    """
    sections: Sequence[type[BaseModel]] = [model]
    owners = siblings = sections
    names: list[str] = []
    for part in location:
        chosen = [section for section in sections if type_name(section) == part]
        if len(sections) > 1 and chosen:  # pydantic's name of the union's member: not part of the user's path
            siblings, sections = sections, chosen
            continue
        plain = 0 < len(str(part)) <= 100 and str(part).isprintable()
        names.append(str(part) if plain else shortened(part))
        if isinstance(part, str):
            owners = sections
            fields = [section.model_fields[part] for section in owners if part in section.model_fields]
            sections = sections_in(fields[0].annotation) if fields else []
    return names, owners, sections, siblings


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the Section classes inside an annotation such as `A | B | None` or `list[A]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in sections_in(part)]


def type_name(section: type[BaseModel]) -> str | None:
    """Return the `type` that chooses a section, or the first of several; None if it has none."""
    kind = section.model_fields.get("type")
    return get_args(kind.annotation)[0] if kind else None


def _types(sections: Iterable[type[BaseModel]]) -> list[str | None]:
    return [type_name(section) for section in sections]


def _types_with(key: str, siblings: Iterable[type[BaseModel]]) -> list[str | None]:
    """Return the types of a section that have a key, which this one does not."""
    return _types(section for section in siblings if key in section.model_fields and type_name(section))


def unknown(field: str, key: str, section: type[BaseModel], *, source: str, others: Sequence[str]) -> Reason:
    """Return the refusal of a key that a section does not have, with the key that was probably meant."""
    allowed = sorted(section.model_fields)
    if RENAMED_KEYS.get(key) in allowed:
        return Code.KEY_RENAMED(source=source, field=field, name=RENAMED_KEYS[key])
    return Code.KEY_UNKNOWN(
        source=source, field=field, nearest=closest(key, allowed), allowed=allowed, others=others
    )


def closest(name: str, allowed: Sequence[str]) -> str | None:
    """Return the allowed name that may be meant by one that is not allowed."""
    return next(iter(difflib.get_close_matches(name, allowed, n=1)), None)


def nearest(name: str, allowed: Sequence[str]) -> str:
    """What may be meant by a name that is not allowed; where nothing is near, all that is."""
    close = closest(name, allowed)
    return f"did you mean {close!r}?" if close else f"allowed: {', '.join(allowed)}"
