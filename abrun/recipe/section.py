"""What every part of a recipe is made of: the strict base model, and kinds of numbers."""

import os
import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from abrun.recipe.rules import broken_rule
from abrun.redaction import shortened

Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
MAX_NAME, MAX_PATH = 255, 4095  # bytes, of Linux and most of its file systems
Fraction = Annotated[float, Field(ge=0, lt=1)]


class FieldError(ValueError):
    """Raised by validators: what is wrong with the validated field or section, or with `field`."""

    def __init__(self, problem: str, field: str = "") -> None:
        super().__init__(problem)
        self.field = field


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys refused, no type coercion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        if broken := broken_rule(self):
            field, problem = broken
            raise FieldError(problem, field)
        return self


def path_text(value: str) -> str:
    """Return a path that a file system may hold. Raises ValueError, for validators."""
    encoded = value.encode(errors="surrogatepass")
    if b"\0" in encoded or len(encoded) > MAX_PATH or max(map(len, encoded.split(b"/"))) > MAX_NAME:
        allowed = f"a path, of names of up to {MAX_NAME} bytes and {MAX_PATH} in all"
        raise FieldError(f"got {shortened(value)}; allowed: {allowed}")
    if value.startswith("~") and os.path.expanduser(value) == value:
        raise FieldError(f"got {shortened(value)}; allowed: ~/ before a path in your home, or a whole path")
    return value


PathText = Annotated[str, AfterValidator(path_text)]


def word(value: str) -> str:
    """The value itself, where nothing in it is a space. Raises ValueError, for validators."""
    if not value.isprintable() or value.split() != [value]:
        raise FieldError(f"got {shortened(value)}; allowed: one word, without spaces")
    return value


def line_of_text(value: str) -> str:
    """The value itself, where it is one line. Raises ValueError, for validators."""
    if not value.strip() or not value.isprintable():
        raise FieldError(f"got {shortened(value)}; allowed: one line of text")
    return value


OURS = "ABRUN_"  # what the environment variables that abrun adds begin with
# Which rank a process is, and on what device, is the launcher's to say.
LAUNCHERS = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _checked_env(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise FieldError(f"got the name {shortened(name)}; allowed: letters, digits and '_'")
        if name.startswith(OURS) or name in LAUNCHERS:
            raise FieldError(
                f"got {name}, which the launcher sets itself; drop it (cluster: says how many GPUs)"
            )
    return env


Env = Annotated[dict[str, str], AfterValidator(_checked_env)]
