"""Building blocks of recipe sections: the strict base model and constrained types."""

import os
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from abrun.runs.redaction import shortened, yaml_text

Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
MAX_NAME, MAX_PATH = 255, 4095  # bytes; limits of Linux and most of its file systems
Fraction = Annotated[float, Field(ge=0, lt=1)]


class FieldError(ValueError):
    """Problem of the field or the section that a validator checks, whose key the message adds."""


class RuleError(ValueError):
    """Broken rule over several fields, as a sentence that begins with the dotted key of the refused one."""


class Section(BaseModel):
    """Base of all sections of a recipe: frozen, no unknown keys, no type coercion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def require_default(self, key: str, reason: str, remedy: str) -> None:
        """Raise RuleError if a field, of this dotted key in the recipe, does not have its default."""
        name = key.rpartition(".")[2]
        value, default = getattr(self, name), type(self).model_fields[name].default
        if value != default:
            remedy = f"{remedy}, or " if remedy else ""
            raise RuleError(
                f"{key}: got {shortened(value)} {reason}; use {remedy}{name}: {yaml_text(default)}"
            )


def rule(check: Callable[[Any], None]) -> Any:
    """Decorate a method of a Section that raises RuleError or FieldError for values that do not combine.

    It is called once each field is valid by itself; rules of base classes come first.
    """

    def check_section(section: Any) -> Any:
        check(section)
        return section

    return model_validator(mode="after")(check_section)


def require(is_allowed: Callable[[Any], bool], allowed: str) -> BeforeValidator:
    """Return a validator that refuses other values before they are matched with the types of a union."""

    def check(value: Any) -> Any:
        if is_allowed(value):
            return value
        raise FieldError(f"got {shortened(value)}; allowed: {allowed}")

    return BeforeValidator(check)


def matching(pattern: str, allowed: str) -> AfterValidator:
    """Return a validator of texts that refuses those that do not match a pattern."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text):
            return text
        raise FieldError(f"got {shortened(text)}; allowed: {allowed}")

    return AfterValidator(check)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def check_path(value: str) -> str:
    """Return the path unchanged. Raises FieldError if a file system cannot hold it."""
    encoded = value.encode(errors="surrogatepass")
    if b"\0" in encoded or len(encoded) > MAX_PATH or max(map(len, encoded.split(b"/"))) > MAX_NAME:
        allowed = f"a path of at most {MAX_PATH} bytes, each name at most {MAX_NAME}"
        raise FieldError(f"got {shortened(value)}; allowed: {allowed}")
    if value.startswith("~") and os.path.expanduser(value) == value:
        raise FieldError(f"got {shortened(value)}; allowed: ~/ for your own home, or an absolute path")
    return value


PathText = Annotated[str, AfterValidator(check_path)]


def check_word(value: str) -> str:
    """Return the value unchanged. Raises FieldError if it contains whitespace."""
    if not value.isprintable() or value.split() != [value]:
        raise FieldError(f"got {shortened(value)}; allowed: one word, without spaces")
    return value


def check_line(value: str) -> str:
    """Return the value unchanged. Raises FieldError if it is not one non-empty line."""
    if not value.strip() or not value.isprintable():
        raise FieldError(f"got {shortened(value)}; allowed: one line of text")
    return value


RESERVED_PREFIX = "ABRUN_"  # prefix of the environment variables that abrun sets
# The launcher sets a process's rank and device.
RESERVED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise FieldError(f"got the name {shortened(name)}; allowed: letters, digits and '_'")
        if name.startswith(RESERVED_PREFIX) or name in RESERVED_VARIABLES:
            raise FieldError(
                f"got {name}, which the launcher sets itself; drop it (set the number of GPUs in cluster)"
            )
    return env


Env = Annotated[dict[str, str], AfterValidator(_check_env)]
