"""A shipped recipe's header names what its dry run lists as differences between the arms."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

from abrun.experiment.plan import make_plan
from abrun.recipe.experiment import BASELINE, load_recipe
from tests.recipe.test_shipped_recipes import RECIPES, each_recipe

BY_NAME = {path.stem: path for path in RECIPES}
DIFFERS = re.compile(r"(?:The arms differ|Arm ([\w-]+) differs) in (`[^`]+`(?:(?:, | and )`[^`]+`)*)[.:]")


def named_differences(path: Path) -> dict[str, set[str]]:
    """Return the keys that a recipe's leading comment names, by arm."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.lstrip("#").strip() for line in comment)
    return {arm or "treatment": set(re.findall("`([^`]+)`", keys)) for arm, keys in DIFFERS.findall(text)}


def planned_differences(path: Path, *overrides: str) -> dict[str, set[str]]:
    recipe = load_recipe(path, overrides)
    diff = make_plan(recipe).treatment_diff
    return {arm: set(diff[arm]) for arm in recipe.arms if arm != BASELINE}


@each_recipe
def test_a_header_names_what_the_dry_run_lists(path: Path) -> None:
    assert named_differences(path) == planned_differences(path)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("quickstart", "arms.treatment.steps=59"),
        ("gspo-fused-logprobs", "arms.treatment.policy.logprobs={impl: chunked, chunk_size: null}"),
        ("smollm2-ppo-values", "arms.no-right-shift.steps=1"),
    ],
)
def test_a_header_that_is_not_true_any_more_is_found(name: str, override: str) -> None:
    assert named_differences(BY_NAME[name]) != planned_differences(BY_NAME[name], override)
