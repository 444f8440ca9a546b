"""The recipes that ship: each plans and dry-runs, is named after what it does, and states no default."""

import copy
import json
import re
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import RecipeError
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.experiment.preflight.checks import find_problems
from abrun.launch.prepare import find_ineffective_settings
from abrun.launch.preview import check_feasibility, precision_differences, render_preview
from abrun.recipe.experiment import (
    BASELINE,
    CommandRecipe,
    Recipe,
    load_recipe,
    parse_stored_recipe,
    parse_stored_run,
)
from abrun.recipe.reading import Loader, dotted
from tests.experiment.test_preflight import KERNELS, WITHOUT_VLLM, machine
from tests.snapshot import Snapshot

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)

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
MACHINES = {
    "laptop": machine(packages={}),
    "laptop with train": machine(),
    "1 GPU": machine(1, packages=KERNELS),
    "2 GPUs": machine(2, packages=KERNELS),
    "8 GPUs without vllm": machine(8, 64, WITHOUT_VLLM),
    "8 GPUs": machine(8, 64, WITHOUT_VLLM | {"vllm": "0.33.0"}),
}
DIFFERS = re.compile(r"(?:The arms differ|Arm ([\w-]+) differs) in (`[^`]+`(?:(?:, | and )`[^`]+`)*)[.:]")


def named_differences(path: Path) -> dict[str, set[str]]:
    """Return the keys that a recipe's leading comment names, by arm."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.lstrip("#").strip() for line in comment)
    return {arm or "treatment": set(re.findall("`([^`]+)`", keys)) for arm, keys in DIFFERS.findall(text)}


@each_recipe
def test_it_plans_and_does_what_its_name_and_header_say(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    """Everything that a plan says of a recipe, of one plan."""
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    plan = make_plan(recipe)
    check_stored_copies(recipe, plan, tmp_path / path.stem)
    assert find_ineffective_settings(plan) == []  # a setting without effect
    controls = recipe.controls
    num_arms, reruns = len(recipe.arms) + len(controls.faults), controls.aa_reruns + controls.ulp_reruns
    assert len(plan.runs) == num_arms * len(recipe.seeds) + reruns
    # A fused head is compared with a dense one, and not float32 logits with bfloat16 ones.
    fused = any("policy.logprobs.impl" in changes for changes in plan.treatment_diff.values())
    assert not (fused and precision_differences(plan))
    treatments = [arm for arm in recipe.arms if arm != BASELINE]
    assert named_differences(path) == {arm: set(plan.treatment_diff[arm]) for arm in treatments}
    if named := re.fullmatch(NAME, path.stem):
        check_name(recipe, plan, named)
    monkeypatch.chdir(tmp_path)  # where none of its data are
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    snapshot(problems_by_machine(plan))
    check_dry_run(plan, path.stem)


def check_stored_copies(recipe: Recipe | CommandRecipe, plan: ExperimentPlan, folder: Path) -> None:
    """Check that runs, the recipe and an experiment's folder read back as what was launched."""
    for run in plan.runs:
        assert parse_stored_run(run.config.model_dump(mode="json")) == run.config
    assert parse_stored_recipe(recipe.model_dump(mode="json")) == recipe
    folder.mkdir()
    (folder / "experiment.json").write_text(json.dumps({"recipe": recipe.model_dump(mode="json")}))
    assert load_recipe(folder) == recipe


def check_name(recipe: Recipe | CommandRecipe, plan: ExperimentPlan, named: re.Match[str]) -> None:
    assert isinstance(recipe, Recipe)
    model = Path(recipe.model.path or str(recipe.model.preset)).name.lower().removesuffix("-instruct")
    loss = getattr(recipe.algorithm, "loss", None)
    assert named["algorithm"] in (recipe.algorithm.type, loss) and named["model"] == model
    assert (recipe.cluster.nodes, recipe.cluster.gpus_per_node) == (int(named["nodes"]), int(named["gpus"]))
    for changes in plan.treatment_diff.values():
        assert all(key.startswith(FACTORS[named["factor"]]) for key in changes), changes


def problems_by_machine(plan: ExperimentPlan) -> str:
    """Return what each machine lacks for the plan, one line a machine."""
    table = []
    for name, here in MACHINES.items():
        problems = find_problems(plan, here)
        assert not any(problem.is_final for problem in problems), "some machine runs it"
        # Each begins with the arms, then the refused field or what is missing
        subjects = {re.split("[:;]", problem.text.partition(": ")[2])[0] for problem in problems}
        table.append(f"{name}: {', '.join(sorted(subjects)) or 'runs'}")
    return "\n".join(table)


def check_dry_run(plan: ExperimentPlan, name: str) -> None:
    """Check that a dry run's text can be made, and that every setting can be run somewhere."""
    feasible = check_feasibility(plan, None, None)
    screen = Console(width=200)
    with screen.capture() as shown:
        screen.print(render_preview(plan, feasible, None, is_staged=False))
    assert shown.get().startswith(f"{name}: ") and "not supported yet" not in shown.get()
    assert not feasible.is_refused


@pytest.mark.usefixtures("trainer_installed")
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
