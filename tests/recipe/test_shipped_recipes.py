"""The recipes that ship: each plans and dry-runs, is named after what it does, and states no default."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import RecipeError
from abrun.experiment.plan import make_plan
from abrun.launch.ineffective_settings import find_ineffective_settings
from abrun.launch.preview import precision_differences
from abrun.recipe.experiment import Recipe, load_recipe, parse_stored_recipe, parse_stored_run
from abrun.recipe.reading import Loader, dotted
from tests.snapshot import Snapshot

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)

# What the dry run of a recipe has to name, arm by arm.
NOT_BUILT: dict[str, list[str]] = {}

# <algorithm>-<model>-<nodes>n<gpus>g-<factor>, and the keys in which arms may differ for that factor.
NAME = r"(?P<algorithm>[a-z]+)-(?P<model>.+)-(?P<nodes>\d+)n(?P<gpus>\d+)g-(?P<factor>.+)"
FACTORS = {
    "ablation": "algorithm.",
    "context-parallel": "policy.backend.context_parallel",
    "shared-prompts": "policy.share_prompts",
    "fp32-head": ("policy.logprobs.head_dtype", "rollout.head_dtype"),
    "fused-logprobs": "policy.logprobs.",
    "megatron": "policy.backend.",
}
NAMED = [path for path in RECIPES if re.fullmatch(NAME, path.stem)]


@each_recipe
def test_it_loads_and_plans(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    plan = make_plan(recipe)
    assert find_ineffective_settings(plan) == []  # a setting without effect
    controls = recipe.controls
    num_arms, reruns = len(recipe.arms) + len(controls.faults), controls.aa_reruns + controls.ulp_reruns
    assert len(plan.runs) == num_arms * len(recipe.seeds) + reruns
    for run in plan.runs:
        assert parse_stored_run(run.config.model_dump(mode="json")) == run.config
    assert parse_stored_recipe(recipe.model_dump(mode="json")) == recipe
    launched = tmp_path / path.stem
    launched.mkdir()
    (launched / "experiment.json").write_text(json.dumps({"recipe": recipe.model_dump(mode="json")}))
    assert load_recipe(launched) == recipe  # an experiment's folder is what it was launched with


@each_recipe
def test_a_dry_run_shows_it_and_names_what_is_not_built(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["launch", str(path), "--dry-run"], catch_exceptions=False)
    assert shown.exit_code == 0 and shown.output.startswith(f"{path.stem}: ")
    unbuilt = [line for line in shown.output.splitlines() if "not supported yet" in line]
    expected = NOT_BUILT.get(path.stem, [])
    assert [line.removeprefix("- ").split(", which is not supported yet")[0] for line in unbuilt] == expected


@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_its_name_is_what_it_does(path: Path) -> None:
    named = re.fullmatch(NAME, path.stem)
    recipe = load_recipe(path)
    assert named and isinstance(recipe, Recipe)
    model = Path(recipe.model.path or str(recipe.model.preset)).name.lower().removesuffix("-instruct")
    loss = getattr(recipe.algorithm, "loss", None)
    assert named["algorithm"] in (recipe.algorithm.type, loss) and named["model"] == model
    assert (recipe.cluster.nodes, recipe.cluster.gpus_per_node) == (int(named["nodes"]), int(named["gpus"]))
    for changes in make_plan(recipe).treatment_diff.values():
        assert all(key.startswith(FACTORS[named["factor"]]) for key in changes), changes


@each_recipe
def test_arms_that_differ_in_how_logits_are_computed_do_not_differ_in_their_precision(path: Path) -> None:
    """A fused head is compared with a dense one, and not float32 logits with bfloat16 ones."""
    plan = make_plan(load_recipe(path))
    fused = any("policy.logprobs.impl" in changes for changes in plan.treatment_diff.values())
    assert not (fused and precision_differences(plan))


def test_a_dry_run_says_where_the_precision_of_the_head_differs(
    monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = ["launch", "quickstart", "--dry-run", "--set", "policy.dtype=bfloat16"]
    logits = "arms.treatment.policy.logprobs.logits_dtype=float32"
    shown = CliRunner().invoke(app, [*command, "--set", logits], catch_exceptions=False).output
    snapshot(shown)
    assert "instead of" not in CliRunner().invoke(app, command, catch_exceptions=False).output


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if path.stem != "quickstart"],  # which is read as documentation
    ids=lambda path: path.stem,
)
def test_its_run_states_differences_alone(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path.parent, tmp_path / "recipes")  # with what its `defaults:` name
    shortened = tmp_path / "recipes" / path.name
    tree, recipe = yaml.load(path.read_text(), Loader), load_recipe(path)
    run_fields = type(recipe.run_config("baseline")).model_fields
    for key in dotted({part: tree[part] for part in tree if part in run_fields}):
        shortened.write_text(yaml.safe_dump(_without(tree, key)))
        try:
            assert load_recipe(shortened) != recipe, f"{key} has its default: leave it out"
        except RecipeError:
            continue  # it has to be there


def _without(tree: dict[str, Any], key: str) -> dict[str, Any]:
    left = copy.deepcopy(tree)
    *parents, last = key.split(".")
    branch = left
    for parent in parents:
        branch = branch[parent]
    del branch[last]
    return left
