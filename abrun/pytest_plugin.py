"""Pytest plugin: the fixture `assert_equivalent` asserts that two sets of runs are equivalent.

Registered by an entry point. Imports only pytest until a test uses the fixture.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from abrun.api import Result


@pytest.fixture
def assert_equivalent(tmp_path: Path) -> "Callable[..., Result]":
    """Return `assert_equivalent(runs_a, runs_b, metric, margin)`, which fails unless the verdict is MATCH.

    `runs_a` and `runs_b` are folders or files of runs over seeds, as `abrun compare` reads them; the first
    are the baseline. Runs whose numbers did not change at all pass. `margin` is absolute (0.02), or text
    such as "1.5 sigma" or "5%". Other options of `abrun.compare` are keywords: `unpaired`, `step_one`,
    `aliases`, `step_column`, `pattern`. Returns the result; its report is in the test's `tmp_path`, and the
    failure message names it.
    """

    def check(
        runs_a: str | Path,
        runs_b: str | Path,
        metric: str,
        margin: float | str,
        *,
        window: str = "last 20%",
        allow_inconclusive: bool = False,
        **options: Any,
    ) -> "Result":
        __tracebackhide__ = True
        from abrun.api import compare
        from abrun.errors import AbrunError

        report = tmp_path / "abrun-report"
        try:
            name_a, name_b = _names(Path(runs_a), Path(runs_b))
            result = compare(
                f"{name_a}={runs_a}",
                f"{name_b}={runs_b}",
                claim=f"{metric}:{window}:{margin}",
                output=report,
                formats=("html", "json"),
                **options,
            )
        except AbrunError as error:  # one line: not chained to the error that says the same
            raise pytest.fail.Exception(f"these runs cannot be compared: {error}", pytrace=False) from None
        if result.verdict in ("MATCH", "PASS") or (allow_inconclusive and result.verdict == "INCONCLUSIVE"):
            return result
        reasons = "\n".join(f"  {reason}" for reason in result.reasons)
        pytest.fail(f"{result.verdict}: {runs_a} and {runs_b}\n{reasons}\n  report: {report}", pytrace=False)

    return check


def _names(source_a: Path, source_b: Path) -> tuple[str, str]:
    """Return names for two sources: the last folder, or file, in which their paths differ."""
    for name_a, name_b in zip(source_a.resolve().parts[::-1], source_b.resolve().parts[::-1], strict=False):
        if name_a != name_b and re.fullmatch(r"[\w.-]+ [\w.-]+", f"{name_a} {name_b}"):
            return name_a, name_b
    return "a", "b"
