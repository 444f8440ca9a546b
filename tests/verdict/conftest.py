from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verdict.simulate import write_experiment


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., Path]:
    """Writes an experiment with a known truth and returns its directory."""
    return lambda **scenario: write_experiment(tmp_path / "simulated", **scenario)


@pytest.fixture
def judged() -> Callable[..., Any]:
    """Compares without drawing, which takes a second a figure."""
    from abrun.logs.recorded.stored import load_experiment
    from abrun.report.comparing import compare, with_options

    def judge(
        experiment_dir: Path,
        claims: Any = None,
        step_one: bool = True,
        unpaired: bool = False,
        **options: Any,
    ) -> Any:
        read = load_experiment(experiment_dir)
        return compare(
            with_options(read, claims, step_one=step_one, unpaired=unpaired),
            declared=read.compare,
            **{"output": experiment_dir / "report", "formats": ("json", "markdown"), **options},
        )

    return judge
