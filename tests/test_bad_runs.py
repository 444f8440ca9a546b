"""One bad run, or one bad experiment, is one line: whoever reads or resumes goes on with the others."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.errors import StoreError
from abrun.experiment.plan import make_plan
from abrun.logs.recorded.sources import ReadingOptions
from abrun.messages.codes import Code
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.report.comparing import compare_sources
from abrun.runs.experiment import planned_runs
from abrun.watch import ExperimentReader
from tests.installed import see_trainer_installed
from tests.launch.fakes import FAKE, run_to_end
from tests.reasons import only
from tests.verdict.simulate import write_experiment

SMALL = Path(__file__).parent / "launch" / "small.yaml"


def corrupt(path: Path) -> None:
    path.write_bytes(b'{"schema_version": 1, \xff\x00')


def newer(path: Path) -> None:
    content = json.loads(path.read_text() or "{}") if path.suffix == ".json" else {}
    path.write_text(json.dumps({**content, "schema_version": 2}) + "\n")


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def other_kind(path: Path) -> None:
    path.write_text('["a list"]\n')


def deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "\n")


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("runs") / "sound", steps=12, seeds=[0, 1, 2])


@pytest.fixture
def experiment_dir(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "runs" / "demo")
    return tmp_path / "runs" / "demo"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", newer),
        ("launch.json", other_kind),
        ("environment.json", corrupt),
        ("result.json", folder),
        ("metrics.jsonl", pipe),
        ("metrics.jsonl", deep),
    ],
)
def test_the_other_runs_are_shown_and_compared(
    experiment_dir: Path, name: str, damage: Callable[[Path], None]
) -> None:
    bad = experiment_dir / "treatment" / "seed-1"
    (bad / name).touch()
    damage(bad / name)
    runs = {run.label: run for run in ExperimentReader(experiment_dir).read()}
    assert len(runs) == 8
    assert all(run.state.status == "finished" for label, run in runs.items() if label != "treatment/seed-1")
    message = runs["treatment/seed-1"].state.message
    assert message is None or message.count("\n") == 0
    comparison = compare_sources([str(experiment_dir)], ReadingOptions())
    if comparison.verdict != "MATCH":  # some of the files a verdict can do without
        assert comparison.verdict == "INVALID"
        assert "treatment/seed-1" in [reason.values.get("run") for reason in comparison.content.reasons]


@pytest.mark.parametrize("damage", [corrupt, newer, other_kind])
def test_an_unreadable_run_is_said_with_its_reason(
    experiment_dir: Path, damage: Callable[[Path], None], abrun
) -> None:
    damage(experiment_dir / "baseline" / "seed-0" / "config.json")
    code, output, errors = abrun("status", experiment_dir)
    assert (code, errors) == (0, "") and "baseline/seed-0" in output and "config.json: " in output
    code, output, errors = abrun("compare", experiment_dir)
    assert (code, errors) == (5, "") and "config.json: " in output
    assert "baseline/seed-0 cannot be read: " in output.replace("\n", " ")


@pytest.mark.parametrize("damage", [pipe, endless])
@pytest.mark.parametrize("name", ["launcher.lock", "experiment.json"])
def test_files_of_an_experiment_that_never_end(experiment_dir: Path, name: str, damage, abrun) -> None:
    damage(experiment_dir / name)
    is_named = name == "experiment.json"
    for command in (("status", "--runs-dir", experiment_dir.parent), ("watch", experiment_dir)):
        code, output, errors = abrun(*command)
        assert code == (2 if command[0] == "watch" and is_named else 0)
        assert ("experiment.json: not a file" in output + errors) == is_named


def test_a_record_of_any_size_is_refused(experiment_dir: Path) -> None:
    """Every text in it would be searched for secrets."""
    (experiment_dir / "baseline" / "seed-0" / "environment.json").write_text('{"a": "' + "x" * 10**7 + '"}')
    comparison = compare_sources([str(experiment_dir)], ReadingOptions())
    assert "larger than" in only(comparison.content.reasons, Code.RUN_UNREADABLE)["problem"]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (None, "runs: got null"),
        ({"a": 1}, "runs: got"),
        ([1], "runs.0: got 1; expected a mapping"),
        ([{"arm": "baseline", "seed": "0", "rerun": 0}], "runs.0.seed: got '0'; expected a whole"),
        ([{"arm": "../../elsewhere", "seed": 0, "rerun": 0}], "runs.0.arm: got"),
    ],
)
def test_a_list_of_runs_that_is_none_is_one_line(experiment_dir: Path, runs, words: str, abrun) -> None:
    path = experiment_dir / "experiment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "runs": runs}))
    with pytest.raises(StoreError, match=words):
        planned_runs(experiment_dir)
    write_experiment(experiment_dir.parent / "other", steps=3, seeds=[0, 1])
    code, output, _ = abrun("status", "--runs-dir", experiment_dir.parent)
    assert code == 0 and "other" in output and "experiment.json: runs" in output


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment of the fake trainer."""
    runs_dir = tmp_path_factory.mktemp("launched")
    with pytest.MonkeyPatch.context() as patch:
        see_trainer_installed(patch)
        patch.setitem(LOCAL_LAUNCHERS, *FAKE)
        run_to_end(make_plan(load_recipe(SMALL)), runs_dir, launcher="fake")
    return runs_dir / "small"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", corrupt),
        ("config.json", newer),
        ("config.json", folder),
        ("stdout.log", pipe),
        ("stdout.log", endless),
        ("metrics.jsonl", pipe),
        ("", shutil.rmtree),
        ("", lambda path: (shutil.rmtree(path), path.write_text(""))),
    ],
)
@pytest.mark.usefixtures("trainer_installed")
def test_resume_refuses_the_bad_run_alone(launched: Path, tmp_path, monkeypatch, name: str, damage) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, *FAKE)
    plan = make_plan(load_recipe(SMALL))
    shutil.copytree(launched, tmp_path / "small", symlinks=True)
    for run in ("baseline/seed-0", "treatment/seed-1"):
        (tmp_path / "small" / run / "result.json").unlink()
    damage(tmp_path / "small" / "baseline" / "seed-0" / name)
    outcome = run_to_end(plan, tmp_path, launcher="fake", resume=True)
    statuses = {str(name): status for name, status in outcome.statuses.items()}
    assert statuses["treatment/seed-1"] == "finished"
    gone = damage is shutil.rmtree  # made again, from the recipe
    assert statuses["baseline/seed-0"] == ("finished" if gone else "failed")
    assert outcome.exit_code == (0 if gone else 1)
