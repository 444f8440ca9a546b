"""Reasons and refusals as tests look for them: by their codes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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
