"""Typed reading of stored files: what their fields may hold, and one refusal of file, field and value.

Keys of a newer version are let be, keys that an older version lacks have defaults, and no type is converted.
Every number is bounded, so that whoever formats it, subtracts it or takes it for a date can do so.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from abrun.errors import StoreError
from abrun.reasons import Code
from abrun.redaction import shortened

T = TypeVar("T")
MAX_TIME_S = 1e11  # a date that datetime takes, in seconds since 1970

MAX_COUNT = 2**53

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Flag = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=MAX_TIME_S, allow_inf_nan=False)]
ProcessId = Annotated[int, Field(strict=True, gt=0, lt=2**31)]  # others address groups of processes
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
    "greater_than_equal": "{ge} or more",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "tuple_type": "a list",
}


def _path_text(value: object) -> str:
    """Return a text that can be a path, in any encoding. Raises PydanticCustomError."""
    if not isinstance(value, str) or "\0" in value:
        raise PydanticCustomError("string_type", "a path")
    return value


PathText = Annotated[str, PlainValidator(_path_text)]


def checked(kind: type[T], content: Mapping[str, Any], path: Path) -> T:
    """Return a dataclass of what a file holds. Raises StoreError for the first field that is wrong."""
    try:
        return _adapter(kind).validate_python(content)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field = ".".join(map(_field_name, first_error["loc"]))
        expected = _EXPECTED.get(first_error["type"], "text").format(**first_error.get("ctx", {}))
        got = f"got {shortened(first_error['input'])}; {expected} is expected"
        problem = "missing" if first_error["type"] == "missing" else got
        raise StoreError(Code.RECORD_FIELD_INVALID(path=path, field=field, problem=problem)) from None


def _field_name(key: int | str) -> str:
    is_plain = isinstance(key, int) or (0 < len(key) <= 100 and key.isprintable())
    return str(key) if is_plain else shortened(key)


@functools.cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
