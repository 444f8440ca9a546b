"""Every command takes the same names for an experiment, and suggests the closest one for a near miss."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.runs.experiment import suggest_path
from abrun.runs.files import write_json
from tests.verdict.simulate import write_experiment

Command = Callable[..., tuple[int, str, str]]
RUN = "/baseline/seed-0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_experiment(tmp_path / "runs/crash", seeds=[0, 1], steps=4, controls={})
    write_experiment(tmp_path / "elsewhere/apart", seeds=[0, 1], steps=4, controls={})
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "crash",
        "crash/",
        "runs/crash",
        "runs/crash/",
        "./runs/crash",
        "elsewhere/apart",
        "{folder}/runs/crash",
    ],
)
def test_commands_take_the_same_names(folder: Path, abrun: Command, name: str) -> None:
    name = name.format(folder=folder)
    for command, *options in (
        ("compare", "--allow-inconclusive"),
        ("status",),
        ("watch",),
        ("launch", "--resume", "--dry-run"),
    ):
        code, output, errors = abrun(command, name, *options)
        assert code in (0, 5) and not errors.startswith("abrun: error"), (command, errors)
        assert Path(name).name in output or command == "watch"
    assert abrun("logs", f"{name.rstrip('/')}{RUN}")[0] == 0


def test_a_near_miss_names_what_is_there(folder: Path, abrun: Command) -> None:
    for words in (
        ("compare", "crsh"),
        ("status", "crsh/"),
        ("watch", "runs/crahs"),
        ("launch", "crsh", "--resume"),
        ("launch", "runs/crsh"),
        ("logs", f"crsh{RUN}"),
        ("stop", "crsh"),
    ):
        code, _, errors = abrun(*words)
        assert code == 2 and errors.count("\n") == 1, errors
        assert "did you mean runs/crash" in errors.replace("'", ""), errors
    (folder / "fused.yaml").write_text("name: fused\n")
    assert "did you mean fused.yaml?" in abrun("launch", "fussed.yaml")[2]
    assert "did you mean 'fused.yaml'?" in abrun("launch", "fused")[2]


def test_no_path_is_suggested_for_a_name_like_none(folder: Path) -> None:
    assert suggest_path(Path("runs/quickstart")) is None
    assert suggest_path(Path("rusn/crsh/baselin/seed-7")) == Path("runs/crash/baseline/seed-1")


def test_an_experiment_is_found_by_its_own_folder_and_by_a_link(
    folder: Path, abrun: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "link").symlink_to("runs/crash")
    assert "crash" in abrun("launch", "link", "--resume", "--dry-run")[1]
    monkeypatch.chdir(folder / "runs/crash")
    assert abrun("launch", ".", "--resume", "--dry-run")[0] == 0
    code, output, _ = abrun("compare", ".", "--json")
    assert code == 0 and json.loads(output)["experiment"] == "crash"
    assert abrun("status", "..")[2].startswith(f"abrun: {folder / 'runs'}: no experiment here; ")


def test_a_copied_experiment_keeps_its_verdict_until_a_run_ends_again(folder: Path, abrun: Command) -> None:
    crash = folder / "runs/crash"
    abrun("compare", "crash", "-o", crash / "report")
    written_s = (crash / "report/verdict.json").stat().st_mtime
    attempt = {"number": 1, "status": "finished", "started_s": written_s - 9, "ended_s": written_s - 5}
    run = crash / "baseline/seed-0"
    write_json(run / "attempts/0001.json", attempt)
    os.utime(run / "result.json", (written_s + 5, written_s + 5))  # as copied after the report
    assert "(old)" not in abrun("status")[1]
    write_json(run / "attempts/0001.json", attempt | {"ended_s": written_s + 4})
    assert "(old)" in abrun("status")[1]
