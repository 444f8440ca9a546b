"""From a tree to a validated model; every refusal is one line: field, value received, what is allowed."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from abrun.errors import RecipeError
from abrun.recipe.section import Section
from abrun.redaction import shortened

M = TypeVar("M", bound=BaseModel)

# What pydantic's kinds of errors allow, in our words; its numbers are filled in.
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
}
MOST_NAMED = 100  # characters, of fields that are refused beside the first
PLAIN = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]+)?|true|false"  # what YAML reads as a number or a truth value


def validated(model: type[M], raw: Mapping[str, Any], source: str) -> M:
    """A model of what a tree holds. Raises RecipeError, one line that begins with `source`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        fields = [*dict.fromkeys(".".join(_place(one["loc"], model)[0]) for one in (first, *others))][1:]
        named = textwrap.shorten(", ".join(fields), MOST_NAMED, placeholder=" ...")
        more = f" (and {len(fields)} more: {named})" if fields else ""
        raise RecipeError(f"{source}: {_explain(first, model)}{more}") from None


def _explain(error: Any, model: type[BaseModel]) -> str:
    """One pydantic error as field, value received, what is allowed, what to do."""
    names, owners, sections, siblings = _place(error["loc"], model)
    field, kind, context = ".".join(names), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{field}: {_of_a_sibling(names[-1], siblings) or unknown(names[-1], owners[0])}"
    if kind == "missing":
        return f"{field}: missing; add it to the recipe"
    if kind == "union_tag_not_found":
        return f"{field}.type: missing; allowed: {_tags(sections)}"
    if kind == "union_tag_invalid":
        return f"{field}.type: got {shortened(context['tag'])}; allowed: {context['expected_tags']}"
    if kind == "value_error":  # written in a validator of ours, of a field or of a section
        message = str(context["error"])
        return f"{field}: {message}" if field and message.startswith("got") else message
    got = f"{field}: got {shortened(error['input'])}" if field else f"got {shortened(error['input'])}"
    if kind in ("too_short", "too_long"):
        least = kind == "too_short"
        limit = context["min_length" if least else "max_length"]
        return f"{got}; allowed: a list of {limit} or {'more: add one' if least else 'less: leave some out'}"
    limits = {name: _plain(limit) for name, limit in context.items()}
    allowed = ALLOWED.get(kind, "another kind of value").format(**limits)
    if kind == "list_type" and names and _holds_numbers(owners[0], names[-1]):
        return f"{got}; allowed: a list of numbers{_as_numbers(error['input'])}"
    return f"{got}; allowed: {allowed}{_advice(kind, error['input'], of_sections=bool(sections))}"


def _advice(kind: str, got: Any, *, of_sections: bool) -> str:
    """What to write instead, where the value itself says it."""
    if kind == "int_type" and isinstance(got, float) and got.is_integer() and abs(got) < 2**31:
        return f"; write {_plain(got)}"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(got, str) and re.fullmatch(PLAIN, got):
        return "; write it without quotes"
    if kind == "string_type" and isinstance(got, bool | int | float):
        return "; put it in quotes"
    if kind == "list_type" and isinstance(got, str | bool | int | float) and not of_sections:
        return f"; write [{shortened(got)}]"
    return ""


def _holds_numbers(section: type[BaseModel], name: str) -> bool:
    """Whether a field is a list of whole numbers."""
    items = get_args(section.model_fields[name].annotation) if name in section.model_fields else ()
    return bool(items) and int in (items[0], *get_args(items[0]))


def _as_numbers(got: Any) -> str:
    """What to write instead of `3`, `'0-3'` or `'0, 1'`."""
    if found := re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", str(got)):
        numbers = [*range(int(found[1]), int(found[2]) + 1)[:1000]]
    else:
        numbers = [int(one) for one in re.split(r"[\s,]+", str(got).strip()) if re.fullmatch(r"\d{1,9}", one)]
    return f"; write {numbers}" if 0 < len(numbers) <= 20 else ", such as [4, 8]"


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


def _tags(sections: Iterable[type[BaseModel]]) -> str:
    return ", ".join(repr(type_name(section)) for section in sections)


def _of_a_sibling(key: str, siblings: Iterable[type[BaseModel]]) -> str | None:
    """What to say of a key that sections of another type have, and this one does not."""
    having = [section for section in siblings if key in section.model_fields and type_name(section)]
    if not having:
        return None
    return f"unknown key with this type; use type: {_tags(having)}, or leave it out (null if it is inherited)"


def unknown(key: str, section: type[BaseModel]) -> str:
    """What to say of a key that a section does not have."""
    allowed = sorted(section.model_fields)
    return f"unknown key; {nearest(key, allowed)}"


def nearest(name: str, allowed: Sequence[str]) -> str:
    """What may be meant by a name that is not allowed; where nothing is near, all that is."""
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"
