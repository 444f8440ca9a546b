"""The recipes that ship: found by name, described by what a launch of them takes."""

from pathlib import Path

import pytest

from abrun.errors import RecipeError
from abrun.experiment.starter.shipped import find_recipe, list_shipped_recipes, recipe_files, recipes_folder
from tests.snapshot import Snapshot

ROOT = Path(__file__).parents[3]


def test_a_name_is_a_recipe_that_ships_and_a_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path("quickstart")) == ROOT / "recipes" / "quickstart.yaml"
    assert find_recipe(Path("quickstart-regression")).parent.name == "regression"
    (tmp_path / "quickstart").write_text("name: mine")
    assert find_recipe(Path("quickstart")) == Path("quickstart")
    assert find_recipe(Path("gone.yaml")) == Path("gone.yaml")  # whoever reads it says that it is missing
    with snapshot.refused(RecipeError):
        find_recipe(Path("quickstrat"))
    (tmp_path / "mine.yaml").touch()
    with snapshot.refused(RecipeError):
        find_recipe(Path("mine"))


def test_every_file_is_listed_under_a_name_of_its_own_with_what_it_takes() -> None:
    assert len(recipe_files()) == len(list(recipes_folder().rglob("*.yaml")))
    listed = {one.name: one for one in list_shipped_recipes()}
    assert set(listed) == set(recipe_files()) and next(iter(listed)) == "quickstart"
    quickstart, two_nodes = listed["quickstart"], listed["grpo-qwen3-30b-a3b-2n8g-fused-logprobs"]
    assert quickstart.cost == "9 runs x 60 steps, 1 CPU core each"
    assert quickstart.completions == 9 * 60 * 32 * 8
    assert two_nodes.cost.endswith("2 nodes x 8 GPUs each") and two_nodes.where == "GPUs"
    assert (listed["trl"].where, listed["trl"].completions) == ("another trainer", None)
    assert quickstart.about.endswith("about two minutes")
    assert all(one.about for one in listed.values())
