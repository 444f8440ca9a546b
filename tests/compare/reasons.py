"""Reasons of a comparison, with those that stand in the values of others."""

from collections.abc import Iterable, Iterator
from typing import Any

from abrun.compare import Comparison
from abrun.reasons import Code, Reason


def reasons_in(values: Any) -> Iterator[Reason]:
    """Yield every reason in a value, each before those among its own values."""
    if isinstance(values, Reason):
        yield values
        yield from reasons_in(list(values.values.values()))
    elif isinstance(values, dict):
        yield from reasons_in(list(values.values()))
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from reasons_in(value)


def reason_of(comparison: Comparison, code: Code) -> Reason:
    """Return the first of the verdict's reasons with a code."""
    given = list(reasons_in(comparison.content.reasons))
    found = next((reason for reason in given if reason.code == code), None)
    assert found is not None, [reason.code for reason in given]
    return found


def codes_of(comparison: Comparison) -> list[Code]:
    return [reason.code for reason in reasons_in(comparison.content.reasons)]
