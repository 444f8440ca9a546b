"""Reasons of a comparison, with those that stand in the values of others, and refusals by their codes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from abrun.errors import AbrunError
from abrun.messages.codes import Code, Reason
from abrun.report.comparing import Comparison


def only(reasons: Iterable[Reason], code: Code) -> Reason:
    """Return the reason of a code; there must be exactly one."""
    (reason,) = [reason for reason in reasons if reason.code is code]
    return reason


@contextmanager
def refused(said: Code | str, **values: Any) -> Iterator[pytest.ExceptionInfo[AbrunError]]:
    """Expect an error on one line: of this code with these values, or with this text and these in it."""
    with pytest.raises(AbrunError) as caught:
        yield caught
    reason, text = caught.value.reason, str(caught.value)
    if isinstance(said, Code):
        assert (reason.code, {name: reason[name] for name in values}) == (said, values)
    else:
        assert said in text and all(str(value) in text for value in values.values())
    assert text.isprintable()


def reason_of(comparison: Comparison, code: Code) -> Reason:
    """Return the first of the verdict's reasons with a code."""
    given = _reasons(comparison)
    found = next((reason for reason in given if reason.code == code), None)
    assert found is not None, [reason.code for reason in given]
    return found


def codes_of(comparison: Comparison) -> list[Code]:
    return [reason.code for reason in _reasons(comparison)]


def _reasons(comparison: Comparison) -> list[Reason]:
    return [found for reason in comparison.content.reasons for found in reason.walk()]
