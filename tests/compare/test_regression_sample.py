"""The sample of regression mode that ships: recipe, frozen reference and workflow fit together."""

import shlex
from pathlib import Path

import yaml

from abrun.compare.read.reference import load_reference
from abrun.recipe import dotted, load_recipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "regression"


def test_the_recipe_is_the_quickstart_s_baseline_and_names_the_reference():
    recipe, quickstart = (
        load_recipe(FOLDER / "quickstart-regression.yaml"),
        load_recipe(ROOT / "recipes/quickstart.yaml"),
    )
    assert recipe.run_config("baseline") == quickstart.run_config("baseline")
    assert recipe.seeds == quickstart.seeds
    assert recipe.compare.reference == "recipes/regression/quickstart.json"


def test_the_reference_holds_that_recipe_s_runs_and_claims():
    reference, quickstart = (
        load_reference(FOLDER / "quickstart.json"),
        load_recipe(ROOT / "recipes/quickstart.yaml"),
    )
    assert reference.compare == quickstart.compare
    assert sorted({run.name.seed for run in reference.runs}) == quickstart.seeds
    now = dotted(quickstart.run_config("baseline").model_dump(mode="json"))
    for run in reference.runs:
        assert run.config is not None
        assert {key: now.get(key) for key in run.config} == run.config


def test_the_workflow_runs_commands_that_exist():
    from typer.main import get_group

    from abrun.cli import app

    workflow = yaml.safe_load((FOLDER / "workflow.yml").read_text())
    lines = [step["run"] for step in workflow["jobs"]["convergence"]["steps"] if "run" in step]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("abrun ")]
    assert [words[0] for words in commands] == ["launch", "compare"]
    for name, *words in commands:
        known = {option for one in get_group(app).commands[name].params for option in one.opts}
        assert {word for word in words if word.startswith("--")} <= known
