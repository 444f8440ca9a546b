"""Budgets of runs in processes of their own, as a user has them; they print what they find."""

from pathlib import Path

from abrun.report.present.terminal import terminal
from abrun.tools.logprob_diff.command import measure_run
from abrun.tools.logprob_diff.findings import Budget, ChangeResult
from abrun.tools.logprob_diff.report import summary
from tests.tools.logprob_diff.conftest import LEARNING
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.rollout.vllm_sampling import PRESET
from tests.written_runs import make_run, run_config


def budget_of(folder: Path, *overrides: str) -> Budget:
    asked = (f"model.preset={PRESET}", *LEARNING, "task=" + verifier(folder), *overrides)
    budget, _ = measure_run(str(make_run(folder / "run", run_config(*asked))), folder)
    terminal().print(summary(budget))
    return budget


def row(budget: Budget, key: str) -> ChangeResult:
    return next(each for each in budget.rows if each.key == key)


def moved(budget: Budget, key: str) -> float:
    found = row(budget, key)
    assert found.moves is not None, found.reason
    return found.moves.value


def assert_rounding_explains(budget: Budget, least: float = 1e-5) -> None:
    """In bfloat16, of a healthy run: no fault is named, and stale weights would stand out."""
    total = budget.error.value - 1
    assert least <= total < 0.05
    assert moved(budget, "weights_before") > 1 + 3 * total
    assert budget.cause != "weights_before"
