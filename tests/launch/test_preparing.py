"""An experiment's directory on a disk that fails, or loses power, while a launcher prepares it."""

import errno
import json
from pathlib import Path

import pytest

from abrun.errors import RecipeError, StoreError
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.launch.prepare import own_experiment
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import is_experiment, planned_runs, run_dir
from abrun.runs.lock import describe_launcher
from abrun.runs.rundir import RunDir
from tests.runs.faulty import Disk, Faults, PowerLoss

SMALL = Path(__file__).parent / "small.yaml"


@pytest.fixture(scope="module")
def plan() -> ExperimentPlan:
    return make_plan(load_recipe(SMALL, ["warm_start={steps: 2}"]))


def prepare(plan: ExperimentPlan, experiment_dir: Path) -> None:
    """As a user would: launch, or resume where there is something to be resumed."""
    with own_experiment(plan, experiment_dir, resume=is_experiment(experiment_dir)):
        pass


def check(plan: ExperimentPlan, experiment_dir: Path) -> None:
    prepare(plan, experiment_dir)
    assert planned_runs(experiment_dir) == [run.name for run in plan.runs]
    for run in plan.runs:
        assert RunDir(run_dir(experiment_dir, run.name)).record().name == run.name
    assert not describe_launcher(experiment_dir)


def test_a_run_with_a_setting_that_was_removed_is_not_resumed_without_it(
    tmp_path: Path, plan: ExperimentPlan
) -> None:
    prepare(plan, tmp_path / "x")
    path = run_dir(tmp_path / "x", plan.runs[-1].name) / "config.json"
    stored = json.loads(path.read_text())
    for name, value in (("memory_budget_mib", None), ("memory_budget_mib", 64), ("chunk_size", None)):
        stored["config"]["policy"]["logprobs"].pop("memory_budget_mib", None)
        stored["config"]["policy"]["logprobs"][name] = value
        path.write_text(json.dumps(stored))
        if value is None:
            prepare(plan, tmp_path / "x")
        else:
            with pytest.raises(
                RecipeError, match=r"seed-1: --resume: .*memory_budget_mib: 64, a setting that"
            ):
                prepare(plan, tmp_path / "x")


TRAINER = """name: moving
trainer:
  type: command
  argv: ["{python}", "{recipe_dir}/train.py", --seed, "{seed}"]
  metrics: {format: csv, path: "{run_dir}/m.csv"}
steps: 3
arms: {baseline: {}, treatment: {trainer.argv: ["{python}", "{recipe_dir}/other.py", "{seed}"]}}
seeds: [0, 1]
"""


def test_a_recipe_that_moved_is_resumed_from_its_new_folder(tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "moving.yaml").write_text(TRAINER)
        prepare(make_plan(load_recipe(tmp_path / folder / "moving.yaml")), tmp_path / "runs" / "moving")
        for run in planned_runs(tmp_path / "runs" / "moving"):
            trainer = RunDir(run_dir(tmp_path / "runs" / "moving", run)).record().config["trainer"]
            assert trainer["recipe_dir"] == str(tmp_path / folder)
            assert trainer["argv"][1] in ("{recipe_dir}/train.py", "{recipe_dir}/other.py")
    again = load_recipe(tmp_path / "runs" / "moving")  # an experiment's folder is a recipe, too
    assert getattr(again.trainer, "recipe_dir", None) == str(tmp_path / "new")


def test_an_experiment_whose_folder_was_filled_in_at_launch_is_resumed(tmp_path: Path) -> None:
    path, experiment_dir = tmp_path / "moving.yaml", tmp_path / "runs" / "moving"
    path.write_text(TRAINER.split("arms:")[0] + "arms: {baseline: {}, treatment: {steps: 2}}\nseeds: [0]\n")
    prepare(make_plan(load_recipe(path)), experiment_dir)
    for file in (experiment_dir / "experiment.json", *experiment_dir.glob("*/*/config.json")):
        content = json.loads(file.read_text().replace("{recipe_dir}", str(tmp_path)))
        del content.get("recipe", content.get("config"))["trainer"]["recipe_dir"]
        file.write_text(json.dumps(content))
    more_seeds = make_plan(load_recipe(path, ["seeds=[0, 1]"]))
    for _ in range(2):  # and once more, now that this version has written it
        prepare(more_seeds, experiment_dir)
    argvs = [
        RunDir(run_dir(experiment_dir, run.name)).record().config["trainer"]["argv"]
        for run in more_seeds.runs
    ]
    assert argvs == [["{python}", f"{tmp_path}/train.py", "--seed", "{seed}"]] * 4


def num_calls(plan: ExperimentPlan, root: Path) -> int:
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(root, patch, last=10**9)
        prepare(plan, root / "x")
        disk.close()
    return disk.count


def test_any_call_that_fails_leaves_what_can_be_launched_again(tmp_path: Path, plan: ExperimentPlan) -> None:
    for first in range(1, num_calls(plan, tmp_path / "counted") + 1):
        for error in (errno.ENOSPC, errno.EIO):
            runs_dir = tmp_path / f"{first}-{error}"
            with pytest.MonkeyPatch.context() as patch:
                Faults(runs_dir, patch, first=first, every=3, error=error)
                with pytest.raises(StoreError) as raised:
                    prepare(plan, runs_dir / "x")
            assert "\n" not in str(raised.value)
            check(plan, runs_dir / "x")


def test_a_loss_of_power_at_any_call_leaves_what_can_be_launched_again(
    tmp_path: Path, plan: ExperimentPlan
) -> None:
    for last in range(1, num_calls(plan, tmp_path / "counted") + 1):
        (tmp_path / f"disk-{last}").mkdir()
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(tmp_path / f"disk-{last}", patch, last=last)
            with pytest.raises(PowerLoss):
                prepare(plan, tmp_path / f"disk-{last}" / "x")
            patch.undo()
            disk.left(tmp_path / f"left-{last}")
            disk.close()
        check(plan, tmp_path / f"left-{last}" / "x")
