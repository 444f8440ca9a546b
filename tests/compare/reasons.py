"""Reasons of a comparison, with those that stand in the values of others, and refusals by their codes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from abrun.compare import Comparison
from abrun.errors import AbrunError
from abrun.reasons import Code, Reason


def only(reasons: Iterable[Reason], code: Code) -> Reason:
    """Return the reason of a code; there must be exactly one."""
    (reason,) = [reason for reason in reasons if reason.code is code]
    return reason


@contextmanager
def refused(code: Code, **values: Any) -> Iterator[pytest.ExceptionInfo[AbrunError]]:
    """Expect an error of this code, with these among its values, and a sentence on one line."""
    with pytest.raises(AbrunError) as caught:
        yield caught
    reason = caught.value.reason
    assert reason is not None, f"no code: {caught.value}"
    assert (reason.code, {name: reason[name] for name in values}) == (code, values)
    assert str(caught.value).isprintable()


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
