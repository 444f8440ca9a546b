"""Values of foreign files: JSON, YAML, a conversion for each type, and numbers that a log holds as text."""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import yaml

from abrun.errors import AbrunError, StoreError
from abrun.recipe.reading import Loader, dotted, parse_yaml

MAX_YAML_BYTES = 1 << 16  # parsed in 1.5 s on an idle core
MAX_FLOW_LEVELS = 20  # of YAML in brackets: the parser's time grows with it
MAX_JSON_UNITS = 1 << 25  # of one document, 32 bytes each: a value is one, a list two, an object eight
MAX_JSON_BYTES = 1 << 28
MAX_KEYS = 100_000  # of an object or a list, on average
MAX_RECORD_BYTES = 1 << 24  # of one record of a binary log, or value of a database
MAX_CHARACTERS = 10_000  # of a text from a file
MAX_NAME_CHARACTERS = 2000
MAX_LIST_LEVELS = 20  # of a setting
STEP_LIMIT = 2**53  # whole numbers above it are not exact as floats


# --- texts ---


def parse_json(text: bytes | str, place: str = "a JSON text") -> Any:
    """Return the value of a JSON text; None if it is not JSON. Raises StoreError for millions of values."""
    if len(text) > MAX_JSON_UNITS:
        content: Any = text  # its marks are of its own type
        marks = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
        num_values, num_lists, num_objects = map(content.count, marks)
        num_units = num_values + 2 * num_lists + 8 * num_objects
        has_huge_object = num_values > MAX_KEYS * (num_lists + num_objects)
        if num_units > MAX_JSON_UNITS or len(text) > MAX_JSON_BYTES or has_huge_object:
            raise StoreError(f"{place}: {len(text)} bytes of JSON with too many values; log less often")
    try:
        return orjson.loads(text)
    except ValueError:
        try:
            return json.loads(str(text, "utf-8") if isinstance(text, bytes) else text)  # knows NaN, Infinity
        except (ValueError, RecursionError):
            return None


class ForeignLoader(Loader):
    """The recipes' loader for what programs wrote: keys may be numbers, and of equal ones the last counts."""

    construct_mapping = yaml.SafeLoader.construct_mapping

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        if self.flow_level == MAX_FLOW_LEVELS:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token_class)


def parse_foreign_yaml(content: bytes, place: str) -> dict[str, Any]:
    """Return a mapping in YAML, without aliases, tags or dates. Raises StoreError."""
    try:
        value = parse_yaml(content.decode(errors="replace"), place, ForeignLoader)
    except AbrunError as error:
        raise StoreError(str(error)) from None
    if not isinstance(value, dict):
        raise StoreError(f"{place}: got a {type(value).__name__}; expected a mapping")
    return value


# --- values ---


def as_text(value: Any, max_characters: int = MAX_CHARACTERS) -> str | None:
    """Return a text, bytes or a number as text of bounded length; None for anything else."""
    if isinstance(value, bytes):
        value = value[: 4 * max_characters].decode(errors="replace")
    elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 4096):
        value = str(value)
    return value[:max_characters] if isinstance(value, str) else None


def as_name(value: Any) -> str | None:
    """Return the name of a metric, run or setting; None if it has none."""
    return as_text(value, MAX_NAME_CHARACTERS) or None


def as_number(value: Any) -> float | None:
    """Return a number, or the number in a text; None for anything else."""
    try:
        if isinstance(value, int):
            return float(value)
        return float(value) if isinstance(value, float | str | bytes) else None
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf") if isinstance(value, int) and value > 0 else float("-inf")
    except ValueError:
        return None


def as_step(value: Any) -> int | None:
    """Return a whole number below 2^53; None for anything else."""
    if type(value) is int:
        return value if abs(value) < STEP_LIMIT else None
    number = None if isinstance(value, bool) else as_number(value)
    return int(number) if number is not None and abs(number) < STEP_LIMIT and number % 1 == 0 else None


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a mapping; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def as_config(value: Any) -> dict[str, Any]:
    """Return a configuration by dotted keys, without overlong keys; see `_bounded` for its values."""
    settings = dotted(as_mapping(value), MAX_NAME_CHARACTERS)
    return {key: _bounded(setting, MAX_LIST_LEVELS) for key, setting in settings.items()}


def _bounded(value: Any, max_levels: int) -> Any:
    """Return a setting, whose long texts end in a hash, without lists that are nested too deeply."""
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:16]
        return value[: MAX_CHARACTERS - len(digest)] + digest
    if isinstance(value, list):
        return [_bounded(item, max_levels - 1) for item in value] if max_levels else None
    if isinstance(value, Mapping):
        return {key: _bounded(item, max_levels - 1) for key, item in value.items()} if max_levels else None
    return value


class Points:
    """The points of a metric in the order in which they were written, in 16 bytes each."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


def left_out_notes(number: int) -> list[str]:
    """Return a note on points that `as_name`, `as_step` or `as_number` refused, if any."""
    problem = "its name or value is missing, or its step is no whole number below 2^53"
    return [f"{number} point{'s' * (number > 1)} left out: {problem}"] * bool(number)


# --- numbers and steps as text, such as "0.1661", "1,000" or "1/60" ---

COMMA_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?")
DOT_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(\.[0-9]{3})+(,[0-9]+)?")
SPACE = "[ '\u00a0\u2009\u202f\u2019]"  # thousands separators that cannot be decimal marks
SPACE_GROUPED = re.compile(rf"[-+]?[1-9][0-9]{{0,2}}({SPACE}[0-9]{{3}})+(\.[0-9]+)?")
DECIMAL_POINT = re.compile(r"[-+]?[0-9]*\.[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
DECIMAL_COMMA = re.compile(r"[-+]?[0-9]*,[0-9]+(e[-+]?[0-9]+)?", re.IGNORECASE)
STEP_OF_TOTAL = re.compile(r"([0-9][0-9,]*)\s*/\s*[0-9][0-9,]*")  # ms-swift: step / number of steps
MINUS = "\u2212"
MAX_TEXT_CHARS = 400  # characters of a cell that are kept


def parse_number(text: str) -> float:
    """Parse a plain number. Raises ValueError, also for Python-only forms such as 1_000."""
    if "_" in text or not text.isascii():
        raise ValueError
    return float(text)


def to_float(value: float) -> float:
    """Return a number as a float; infinity for a whole number of more than 308 digits."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def shorten_cell(text: str) -> str:
    """Return at most MAX_TEXT_CHARS characters; a longer text ends in its hash, as prompts begin alike."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return text[: MAX_TEXT_CHARS - 16] + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def is_number_with_comma(text: str) -> bool:
    """Return True for a text whose comma is a decimal mark, or groups digits."""
    text = text.strip()
    return "," in text and any(
        pattern.fullmatch(text) for pattern in (COMMA_GROUPED, DECIMAL_COMMA, DOT_GROUPED)
    )


class NumberFormat:
    """Number format of a file, inferred from all of its texts.

    "1,234" may be a thousand or a decimal. It is parsed only if another text of the file shows that decimals
    use a point ("0.5", "1,234,567") and none uses a decimal comma ("0,5"). Likewise "1.234" is rejected in a
    file with decimal commas.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        marked = [text.strip() for text in texts if "," in text or "." in text]
        commas = [text for text in marked if "," in text]
        self.decimal_comma = any(
            (DECIMAL_COMMA.fullmatch(text) and not COMMA_GROUPED.fullmatch(text))
            or DOT_GROUPED.fullmatch(text)
            for text in commas
        )
        grouped = [text for text in commas if COMMA_GROUPED.fullmatch(text)]
        self.thousands_comma = (
            bool(grouped)
            and not self.decimal_comma
            and (
                any("." in text or text.count(",") > 1 for text in grouped)
                or any(DECIMAL_POINT.fullmatch(text) and not DOT_GROUPED.fullmatch(text) for text in marked)
            )
        )

    def parse_number(self, text: str) -> float:
        """Parse a number. Raises ValueError if the text is not a number or is ambiguous."""
        text = text.strip().replace(MINUS, "-")
        if self.decimal_comma and DOT_GROUPED.fullmatch(text):
            raise ValueError
        if self.thousands_comma and COMMA_GROUPED.fullmatch(text):
            return float(text.replace(",", ""))
        if SPACE_GROUPED.fullmatch(text):
            return float(re.sub(SPACE, "", text))
        return parse_number(text)

    def parse_step(self, text: str, *, has_plain_steps: bool) -> float:
        """Parse a step. Steps are whole numbers, so "1,000" can only mean a thousand.

        `has_plain_steps`: other steps of the column have no point, so "1.000" among them is ambiguous and
        raises ValueError.
        """
        text = text.strip()
        fraction = STEP_OF_TOTAL.fullmatch(text)
        text = fraction[1] if fraction else text
        if COMMA_GROUPED.fullmatch(text) and not self.decimal_comma:
            return float(text.replace(",", ""))
        if has_plain_steps and DOT_GROUPED.fullmatch(text):
            raise ValueError
        return self.parse_number(text)
