"""`abrun init`: what it writes can be launched as it is, and nothing that is there is written over."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from abrun import cli
from abrun.cli import app
from abrun.errors import RecipeError
from abrun.experiment.plan import make_plan
from abrun.experiment.starter.initial import KIND_QUESTIONS, initial_files, write_files
from abrun.logs.recorded.reference import load_reference
from abrun.recipe.experiment import CommandRecipe, Recipe, load_recipe
from tests.reasons import refused
from tests.snapshot import Snapshot

ROOT = Path(__file__).parents[3]


def begin(folder: Path, kind: str, answer: str, name: str = "mine") -> Path:
    write_files(initial_files(kind, name, answer), folder)
    return folder / f"{name}.yaml"


@pytest.mark.parametrize("model", ["qwen2-tiny", "Qwen/Qwen2.5-1.5B-Instruct"])
def test_a_recipe_of_our_own_trainer_plans(tmp_path: Path, model: str) -> None:
    path = begin(tmp_path, "recipe", model)
    recipe = load_recipe(path)
    assert isinstance(recipe, Recipe) and recipe.name == "mine"
    assert (recipe.model.preset or recipe.model.path) == model
    assert recipe.cluster.gpus_per_node == ("/" in model)
    (changes,) = make_plan(recipe).treatment_diff.values()
    assert all(key.startswith("policy.logprobs.") for key in changes) and changes
    if recipe.model.preset:  # in chunks: all of a tiny vocabulary in one would be the baseline bit for bit
        assert recipe.arms == load_recipe(ROOT / "recipes/quickstart.yaml").arms
    first = path.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=recipe.schema.json"
    assert json.loads((tmp_path / "recipe.schema.json").read_text())["title"] == "abrun recipe"


@pytest.mark.parametrize("trainer", ["trl", "verl", "nemo-rl", "skyrl", "other"])
def test_a_recipe_of_another_trainer_names_files_that_are_there(tmp_path: Path, trainer: str) -> None:
    recipe = load_recipe(begin(tmp_path, "external", trainer))
    assert isinstance(recipe, CommandRecipe) and recipe.name == "mine"
    here = [word for word in recipe.trainer.argv if "{recipe_dir}" in word]
    assert all(Path(word.format(recipe_dir=tmp_path)).is_file() for word in here)
    assert len(here) == (trainer in ("trl", "other"))
    if here:  # how much it climbs is unknown: an absolute margin could be most of it
        assert [claim.margin for claim in recipe.compare.claims] == ["5% of climb"]


def test_the_stand_in_for_a_trainer_learns_the_same_from_the_same_seed(tmp_path: Path) -> None:
    script = begin(tmp_path, "external", "other").with_name("mine_trainer.py")
    rewards = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        asked = ["--seed", str(seed), "--steps", "60", "--learning-rate", "0.1", "--output"]
        subprocess.run([sys.executable, script, *asked, tmp_path / name], check=True)
        with (tmp_path / name).open() as file:
            rewards[name] = [float(row["reward"]) for row in csv.DictReader(file)]
    assert rewards["a"] == rewards["b"] != rewards["c"] and len(rewards["a"]) == 60
    assert sum(rewards["a"][-10:]) / 10 > 0.8 > 0.6 > rewards["a"][0]  # of at most 1; by chance 0.5


def test_a_workflow_comes_with_its_action_recipe_and_frozen_runs(tmp_path: Path) -> None:
    recipe = load_recipe(begin(tmp_path, "regression", "quickstart-regression", "convergence"))
    frozen = Path(recipe.compare.reference or "")
    assert frozen == tmp_path / "convergence.json" and len(load_reference(frozen).runs) == 5
    workflow = yaml.safe_load((tmp_path / ".github/workflows/convergence.yml").read_text())
    used = workflow["jobs"]["convergence"]["steps"][-1]
    assert used == {"uses": "./.github/actions/regression", "with": {"recipe": "convergence.yaml"}}
    action = (tmp_path / used["uses"] / "action.yml").read_text()
    assert action == (ROOT / ".github/actions/regression/action.yml").read_text()


def test_what_is_there_stays(tmp_path: Path, snapshot: Snapshot) -> None:
    path = begin(tmp_path, "recipe", "qwen2-tiny")
    begin(tmp_path, "recipe", "qwen2-tiny")  # the same again changes nothing
    path.write_text("name: mine")
    with snapshot.refused(RecipeError):
        begin(tmp_path, "recipe", "qwen2-tiny")
    assert path.read_text() == "name: mine"


def test_a_folder_that_cannot_be_written_is_not_called_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", deny)
    with refused(f"{tmp_path}/mine.yaml: cannot be written: Permission denied; choose another folder"):
        begin(tmp_path, "recipe", "qwen2-tiny")


def test_the_questions_are_asked_of_a_terminal_and_have_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(cli.starting.sys, "stdin", type("Tty", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(cli.starting.typer, "prompt", lambda text, default: asked.append(text) or default)
    cli.starting.init(to=tmp_path)
    assert len(asked) == 3 and "do you compare?" in asked[0] and asked[2] == KIND_QUESTIONS["recipe"].text
    assert load_recipe(tmp_path / "mine.yaml").name == "mine"


def test_a_bad_answer_at_a_terminal_is_said_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], snapshot: Snapshot
) -> None:
    answers = iter(["recipes", "external", "a/b", "mine", "x", "other"])
    monkeypatch.setattr(cli.starting.sys, "stdin", type("Tty", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(cli.starting.typer, "prompt", lambda text, default: next(answers))
    cli.starting.init(to=tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in said] == [
        f"abrun: --{option}: got {bad!r}"
        for option, bad in (("kind", "recipes"), ("name", "a/b"), ("trainer", "x"))
    ]
    assert next(answers, None) is None and (tmp_path / "mine.yaml").is_file()
    with pytest.raises(RecipeError) as refusal:  # an option is nobody's answer
        cli.starting.init(kind="recipes", to=tmp_path)
    snapshot(refusal.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--kind, --name, --model: missing"),
        (["--recipe", "r.yaml"], "such as abrun init --kind regression --name convergence --recipe r.yaml"),
        (["--kind", "x"], "--kind: got 'x'; allowed: recipe, external, regression"),
        (["--kind", "recipe", "--name", "a/b", "--model", "qwen2-tiny"], "--name: got 'a/b'"),
        (["--kind", "recipe", "--name", "a", "--trainer", "trl"], "--trainer: got 'trl', but --kind recipe"),
        (
            ["--kind", "external", "--name", "a", "--trainer", "x"],
            "--trainer: got 'x'; allowed: fast-llm, nemo-rl",
        ),
        (["--kind", "regression", "--name", "a", "--recipe", "quickstart"], "no compare.reference"),
    ],
)
def test_a_bad_answer_is_one_line_and_writes_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["init", "--to", str(tmp_path), *words])
    assert isinstance(done.exception, RecipeError) and said in str(done.exception)
    assert list(tmp_path.iterdir()) == []
