"""What every part of a recipe is made of: the strict base model, and kinds of numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from abrun.redaction import shortened

Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys refused, no type coercion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def word(value: str) -> str:
    """The value itself, where nothing in it is a space. Raises ValueError, for validators."""
    if not value.isprintable() or value.split() != [value]:
        raise ValueError(f"got {shortened(value)}; allowed: one word, without spaces")
    return value


def line_of_text(value: str) -> str:
    """The value itself, where it is one line. Raises ValueError, for validators."""
    if not value.strip() or not value.isprintable():
        raise ValueError(f"got {shortened(value)}; allowed: one line of text")
    return value
