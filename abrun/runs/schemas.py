"""Validation of stored files: types of their fields, and one error that names file, field and value.

Unknown keys of newer versions are ignored, missing keys of older versions get defaults, and no type is
converted. Every number is bounded, so that formatting, arithmetic and conversion to a date cannot fail.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from abrun.errors import StoreError
from abrun.runs.redaction import shortened

T = TypeVar("T")
MAX_TIME_S = 1e11  # seconds since 1970, within the range of datetime

MAX_COUNT = 2**53

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Flag = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_TIME_S, allow_inf_nan=False)]
# Positive: os.kill takes 0 and negative numbers for process groups.
ProcessId = Annotated[int, Field(strict=True, gt=0, lt=2**31)]
ExitCode = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**32)]
Items = Annotated[tuple[T, ...], Field(fail_fast=True)]
Texts = Items[str]

_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "tuple_type": "a list",
}


def _path_text(value: object) -> str:
    """Return a string that can be a path, in any encoding. Raises PydanticCustomError."""
    if not isinstance(value, str) or "\0" in value:
        raise PydanticCustomError("string_type", "a path")
    return value


PathText = Annotated[str, PlainValidator(_path_text)]


def checked(kind: type[T], content: Mapping[str, Any], path: Path) -> T:
    """Return a file's content as an instance of a dataclass. Raises StoreError for the first wrong field."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field = ".".join(map(_field_name, first_error["loc"]))
        expected = _EXPECTED.get(first_error["type"], "text").format(**first_error.get("ctx", {}))
        got = f"got {shortened(first_error['input'])}; expected {expected}"
        problem = "missing" if first_error["type"] == "missing" else got
        raise StoreError(f"{path}: {field}: {problem}; restore the file, or remove it") from None


def _field_name(key: int | str) -> str:
    is_plain = isinstance(key, int) or (0 < len(key) <= 100 and key.isprintable())
    return str(key) if is_plain else shortened(key)


@functools.cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
