"""The templates for other frameworks: each plans and dry-runs as it ships."""

import itertools
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import RecipeError
from abrun.experiment.plan import make_plan
from abrun.launch.prepare import find_ineffective_settings
from abrun.logs import FORMATS
from abrun.logs.aliases import FRAMEWORKS
from abrun.recipe import command as commands
from abrun.recipe.command import MetricsLog
from abrun.recipe.experiment import CommandRecipe, load_recipe

FOREIGN = Path(__file__).parent / "foreign.yaml"
FOLDER = Path(__file__).parent.parent.parent / "recipes" / "external"
TEMPLATES = sorted(FOLDER.glob("*.yaml"))


def test_templates_are_of_frameworks_whose_names_are_known() -> None:
    assert {path.stem for path in TEMPLATES} <= set(FRAMEWORKS) == set(commands.FRAMEWORKS)
    assert MetricsLog.model_json_schema()["properties"]["format"]["enum"] == list(FORMATS)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_dry_runs_and_names_every_seed(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert isinstance(recipe, CommandRecipe) and recipe.trainer.aliases == path.stem
    shown = CliRunner().invoke(app, ["launch", str(path), "--plan-only", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    assert "treatment/seed-0, with metrics in RUN_DIR/" in words
    assert "{" not in words.split("command of baseline/seed-0")[1].split("What differs")[0]
    assert any("{seed}" in word for word in recipe.trainer.argv)
    assert any("{steps}" in word for word in recipe.trainer.argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_dry_runs_on_two_nodes_as_its_comment_says(path: Path, tmp_path: Path) -> None:
    comment = path.read_text().partition("\nname: ")[0].replace("\n# ", " ")
    said = comment[comment.index("On two nodes") :].partition(" The arms")[0].partition("; abrun starts")[0]
    words = shlex.split(said.partition(": ")[2])
    settings = [
        word for name, value in itertools.pairwise(words) if name == "--set" for word in (name, value)
    ]
    assert settings[:2] == ["--set", "cluster.nodes=2"]
    recipe = load_recipe(path, settings[1::2])
    assert isinstance(recipe, CommandRecipe) and recipe.started_nodes == 2
    shown = CliRunner().invoke(
        app, ["launch", str(path), "--plan-only", "--runs-dir", str(tmp_path), *settings]
    )
    assert shown.exit_code == 0, shown.output
    output = " ".join(shown.output.split())
    if recipe.trainer.ray:
        assert "on the first of 2 nodes, with" in output and " starts on 2 nodes" in output
    else:
        assert "on each of 2 nodes, NODE_RANK 0 to 1, with" in output
        assert all(word in output for word in ("rank=NODE_RANK", "HEAD_ADDRESS", "PORT"))
    assert "NUM_NODES" in output


def test_a_dollar_before_a_placeholder_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"which would leave a \$ before the value; write \{seed\}"):
        load_recipe(FOREIGN, ["trainer.argv=[train, '${seed}', '{script}{format}{learning_rate}{step_s}']"])


def test_commands_that_are_the_same_in_every_seed_are_noted() -> None:
    names = "{script}{format}{learning_rate}{behaviour}{step_s}{label}"
    plain = f"trainer.argv=[train, '{names}']"
    (line,) = find_ineffective_settings(make_plan(load_recipe(FOREIGN, [plain])))
    assert line.startswith("arms baseline, treatment: trainer.argv and trainer.env do not use {seed}, so all")
    for other in ("trainer.env={SEED: '{seed}'}", f"trainer.argv=[sh, '$ABRUN_SEED {names}']"):
        assert find_ineffective_settings(make_plan(load_recipe(FOREIGN, [plain, other]))) == []
    assert find_ineffective_settings(make_plan(load_recipe(FOREIGN))) == []
    assert (
        find_ineffective_settings(make_plan(load_recipe(FOREIGN, [plain, "seeds=[4]", "compare.claims=[]"])))
        == []
    )
