"""A plugin for pytest: the fixture `assert_equivalent`, by which a test says that two sets of runs are alike.

Found by its entry point once abrun is installed. Imports nothing but pytest until a test asks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from abrun.api import Result


@pytest.fixture
def assert_equivalent(tmp_path: Path) -> "Callable[..., Result]":
    """`assert_equivalent(runs_a, runs_b, metric, margin)`: fails unless the verdict is a match.

    `runs_a` and `runs_b` are folders or files of runs over seeds, as `abrun compare` reads them; the first
    are the baseline. `margin` is absolute (0.02), or text such as "1.5 sigma" or "5%". What else
    `abrun.compare` takes are keywords: `unpaired`, `step_one`, `aliases`, `step_column`, `pattern`. Returns
    the result; its report is in the test's `tmp_path`, which the failure names.
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
            result = compare(
                f"a={runs_a}",
                f"b={runs_b}",
                claim=f"{metric}:{window}:{margin}",
                output=report,
                formats=("html", "json"),
                **options,
            )
        except AbrunError as error:  # one line: not chained to the error that says the same
            raise pytest.fail.Exception(f"these runs cannot be compared: {error}", pytrace=False) from None
        if result.verdict == "MATCH" or (allow_inconclusive and result.verdict == "INCONCLUSIVE"):
            return result
        reasons = "\n".join(f"  {reason}" for reason in result.reasons)
        pytest.fail(f"{result.verdict}: {runs_a} and {runs_b}\n{reasons}\n  report: {report}", pytrace=False)

    return check
