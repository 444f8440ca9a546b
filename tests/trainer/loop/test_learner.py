"""Learning rates over a run."""

import math

import pytest

from abrun.errors import RecipeError
from abrun.recipe.policy import Optimizer
from abrun.recipe.refusals import validated
from abrun.trainer.loop.setup import learning_rate_at


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)), 0.1]),
    ],
)
def test_schedules_by_hand(schedule: str, expected: list[float]) -> None:
    """Two steps of warm-up, then down to the floor, which the last of six steps has."""
    floor = {} if schedule == "constant" else {"min_learning_rate": 0.1}
    optimizer = Optimizer.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 2, "schedule": schedule} | floor
    )
    assert [learning_rate_at(step, optimizer, 6) for step in range(1, 7)] == pytest.approx(expected)


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    optimizer = Optimizer(learning_rate=2.0, schedule="linear")
    assert [learning_rate_at(step, optimizer, 3) for step in (1, 2, 3)] == [2.0, 1.0, 0.0]
    assert learning_rate_at(1, optimizer, 1) == 2.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_learning_rate": 1e-7}, "min_learning_rate 1e-07 with schedule 'constant'"),
        ({"min_learning_rate": 1.0, "schedule": "cosine"}, "min_learning_rate 1.0 above learning_rate 1e-06"),
    ],
)
def test_floors_that_cannot_be(settings: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        validated(Optimizer, settings, "optimizer")
