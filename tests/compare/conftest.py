from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compare.simulate import write_experiment


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., Path]:
    """Writes an experiment with a known truth and returns its directory."""
    return lambda **scenario: write_experiment(tmp_path / "simulated", **scenario)


@pytest.fixture
def judged() -> Callable[..., Any]:
    """Compares without drawing, which takes a second a figure."""
    from abrun.compare import compare
    from abrun.compare.read.stored import load_experiment

    return lambda experiment_dir, **options: compare(
        load_experiment(experiment_dir),
        **{"output": experiment_dir / "report", "formats": ("json", "markdown"), **options},
    )
