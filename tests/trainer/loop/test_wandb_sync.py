"""wandb mirrors a run where it can; whatever it does, training goes on and the store is whole."""

import os
from pathlib import Path

import pytest

from abrun.runs.rundir import RunDir
from tests.trainer.loop.runs import Trainer, last_step
from tests.written_runs import make_run, run_config

FAKE = """
class Settings:
    def __init__(self, **options):
        pass

class Run:
    id, project, entity, url, starting_step = "i", "test", "team", "http://here", 0
    def define_metric(self, name, **options):
        {define}
    def log(self, row, step):
        {log}
    def finish(self, exit_code):
        {finish}

def init(**options):
    {init}
"""


def train(directory: Path, env: dict[str, str], path: Path | None = None) -> list[str]:
    """Train two steps with wandb asked for, in a home without credentials; returns what it said of wandb."""
    home = directory.parent / "home"
    home.mkdir()
    make_run(directory, run_config("steps=2", "wandb={project: test}"))
    clean = {"WANDB_API_KEY": "", "WANDB_MODE": "", "WANDB_SILENT": "true", "HOME": str(home)}
    if path:  # the mirror is a process of its own
        clean["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", str(Path.cwd()))])
    trainer = Trainer(directory, env=clean | env)
    assert trainer.wait() == 0, trainer.stderr
    assert last_step(directory) == 2 and (directory / "result.json").exists()
    rows = RunDir(directory).events()
    return [row["message"] for row in rows if row["event"] == "wandb"]


def fake_wandb(folder: Path, **calls: str) -> Path:
    folder.mkdir()
    (folder / "wandb.py").write_text(
        FAKE.format(**({"init": "return Run()", "define": "pass", "log": "pass", "finish": "pass"} | calls))
    )
    return folder


@pytest.mark.slow
def test_offline_mode_writes_an_offline_run(tmp_path: Path) -> None:
    assert train(tmp_path / "run", {"WANDB_MODE": "offline"}) == []
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (record,) = offline.glob("run-*.wandb")
    content = record.read_bytes()
    assert b"train/reward" in content and b"baseline-s0" in content and b"qwen2-tiny" in content


def test_without_a_key_it_says_so_once_and_logs_offline(tmp_path: Path) -> None:
    (message,) = train(tmp_path / "run", {})
    assert "API key" in message and "to wandb offline" in message and "\n" not in message
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({"init": "raise OSError('no network')"}, ["to wandb offline", "without wandb"]),
        ({"log": "raise RuntimeError('gone')"}, ["wandb stopped: gone"]),
        pytest.param(
            {"define": "raise OSError('no')"},
            ["to wandb offline", "without wandb"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"finish": "raise RuntimeError('gone')"}, ["did not finish: gone"], marks=pytest.mark.slow
        ),
        pytest.param(
            {"init": "import nonexistent_module_of_wandb"},
            ["to wandb offline", "without wandb"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_wandb_never_stops_training(
    broken: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    said = train(tmp_path / "run", {}, fake_wandb(tmp_path / "fake", **broken))
    assert len(said) == len(expected), said
    assert all(part in message for part, message in zip(expected, said, strict=True)), said


def test_what_is_mirrored(tmp_path: Path) -> None:
    record = tmp_path / "seen.txt"
    say = f"print({{}}, file=open({str(record)!r}, 'a'))"
    options = "{key: options[key] for key in ('project', 'group', 'job_type', 'name', 'resume', 'mode')}"
    init = f"{say.format(options)}; return Run()"
    log = say.format("step, row['step'], 'time_s' in row, 'train/reward' in row")
    assert train(tmp_path / "run", {}, fake_wandb(tmp_path / "fake", init=init, log=log)) == []
    first, *logged = record.read_text().splitlines()
    assert eval(first) == {
        "project": "test",
        "group": "x",
        "job_type": "baseline",
        "name": "baseline-s0",
        "resume": "allow",
        "mode": None,
    }
    assert logged == [f"{step} {step} False True" for step in (1, 2)]
