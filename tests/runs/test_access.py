"""Who may read what abrun writes: readers are kept, new files follow a record, no other name is changed."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abrun.errors import StoreError
from abrun.runs.experiment import read_run_state, write_experiment
from abrun.runs.files import UnreadableError, make_private_folder, open_log, write_file, write_json
from abrun.runs.launches import begin_launch, end_launch, update_launch, write_config, write_wandb_location
from abrun.runs.layout import RunName
from abrun.runs.lines import Sample
from abrun.runs.lock import LOCK, describe_launcher, launcher_lock
from abrun.runs.records import NodeStatus
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt, write_node
from tests.snapshot import Snapshot

NAME = RunName(arm="baseline", seed=0)
GROUP_ID = 65534  # of nobody: any group besides the one that runs the tests


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def plan(experiment_dir: Path, name: RunName = NAME) -> RunDir:
    """An experiment of one planned run, as a launcher writes it."""
    run = {"arm": name.arm, "seed": name.seed, "rerun": name.rerun}
    write_experiment(experiment_dir, {"experiment": experiment_dir.name, "runs": [run]})
    directory = RunDir(experiment_dir / str(name))
    write_config(directory, experiment_dir.name, name, {"steps": 9})
    return directory


def work(run: RunDir, step: int) -> None:
    """One launch of a run that writes each kind of file."""
    with launcher_lock(run.path.parent.parent):
        begin_launch(run, ["cpu"], None)
        with open_log(run.log) as log:
            log.write(b"printed\n")
        update_launch(run, pid=os.getpid())
        writer = begin_attempt(run)
        writer.environment({"python": "3.11"})
        writer.metrics(step, {"train/reward": 1.0})
        writer.validation(step, prompts_sha256="0", rewards=[1.0], lengths=[1])
        sample = Sample(prompt="p", text="t", reward=1.0, logprob_error=None, num_tokens=1, truncated=None)
        writer.samples(step, [sample])
        writer.heartbeat(step)
        write_node(run, NodeStatus(attempt=writer.attempt, node=0, host="n"))
        write_wandb_location(run, {"id": "x"})
        writer.final_sketch(b"sketch")
        writer.finish(step)
        end_launch(run, "finished", None, exit_code=0)


def share(folder: Path) -> None:
    """chmod -R g+rX"""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o040))


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in (folder, *folder.rglob("*"))
        if not path.is_dir()
    }


@pytest.mark.usefixtures("umask")
def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # a project's own, which is no record of abrun
    (tmp_path / "config.json").chmod(0o644)
    run = plan(tmp_path / "runs" / "demo")
    work(run, 1)
    assert len(modes(tmp_path / "runs")) > 12
    assert set(modes(tmp_path / "runs").values()) == {0o600}


@pytest.mark.usefixtures("umask")
def test_after_one_chmod_all_that_is_written_later_is_readable(tmp_path: Path) -> None:
    experiment_dir = tmp_path / "demo"
    run = plan(experiment_dir)
    work(run, 1)
    share(experiment_dir)
    shutil.rmtree(run.path / "nodes")  # a folder, and files, that are made anew
    for name in ("samples.jsonl", "stdout.log", "result.json", "heartbeat.json"):
        (run.path / name).unlink()
    (experiment_dir / "launcher.lock").unlink()
    work(run, 2)
    other = plan(experiment_dir, RunName(arm="treatment", seed=7))
    work(other, 1)
    assert set(modes(experiment_dir).values()) == {0o640}
    for folder in (path for path in experiment_dir.rglob("*") if path.is_dir()):
        assert folder.stat().st_mode & 0o070 == 0o050, folder


def test_one_run_can_be_shared(tmp_path: Path) -> None:
    run = plan(tmp_path / "demo")
    work(run, 1)
    share(run.path)
    work(run, 2)
    assert set(modes(run.path).values()) == {0o640}


@pytest.mark.usefixtures("umask")
def test_in_a_folder_with_the_set_group_id_bit_new_experiments_are_shared(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    runs_dir.mkdir()
    runs_dir.chmod(0o2750)
    run = plan(runs_dir / "demo")
    work(run, 1)
    assert set(modes(runs_dir).values()) == {0o640}
    assert all(path.stat().st_mode & 0o070 == 0o050 for path in runs_dir.rglob("*") if path.is_dir())


def test_nobody_else_gains_the_right_to_write(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    path.chmod(0o666)
    write_json(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_public_file_that_is_replaced_keeps_its_readers(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    for before, after in ((0o600, 0o600), (0o644, 0o644), (0o664, 0o664)):
        path.write_text("old")
        path.chmod(before)
        write_file(path, b"new", mode=0o666)
        assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (after, "new")


def test_the_group_is_kept_and_no_other_group_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of the file before is asked for; where it cannot be had, this process's own reads nothing."""
    path = tmp_path / "a.json"
    path.write_text("{}")
    path.chmod(0o640)
    real, asked = os.lstat, list[int]()

    class OtherGroup:
        st_mode, st_gid = real(path).st_mode, GROUP_ID

    def refuse(file: int, owner: int, group: int) -> None:
        asked.append(group)
        raise PermissionError

    monkeypatch.setattr(os, "lstat", lambda each: OtherGroup if each == path else real(each))
    monkeypatch.setattr(os, "fchown", refuse)
    write_json(path, {})
    assert asked == [GROUP_ID] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_for_a_library_is_private_and_no_link_is_followed(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    run = plan(tmp_path / "demo")
    work(run, 1)
    (run.path / "wandb").mkdir(mode=0o755)
    assert make_private_folder(run.path / "wandb") == 0o077
    assert stat.S_IMODE((run.path / "wandb").stat().st_mode) == 0o700
    share(tmp_path / "demo")
    assert make_private_folder(run.path / "wandb") == 0o027
    assert stat.S_IMODE((run.path / "wandb").stat().st_mode) == 0o750
    (run.path / "wandb").rmdir()
    (tmp_path / "mine").mkdir(mode=0o755)
    (run.path / "wandb").symlink_to(tmp_path / "mine")
    with snapshot.refused(StoreError):
        make_private_folder(run.path / "wandb")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755


# --- files that may not be read ---


def forbid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to open or list a path, as to another user."""

    def refused(call: Callable[..., object]) -> Callable[..., object]:
        def checked(first: object, *rest: object, **options: object) -> object:
            if isinstance(first, str | os.PathLike) and os.fspath(first) == str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return call(first, *rest, **options)

        return checked

    monkeypatch.setattr(os, "open", refused(os.open))
    monkeypatch.setattr(os, "listdir", refused(os.listdir))


@pytest.mark.parametrize(
    "name", ["", "config.json", "launch.json", "heartbeat.json", "attempts", "attempts/0001.json", "nodes"]
)
def test_a_run_that_may_not_be_read_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = plan(tmp_path / "demo")
    work(run, 1)
    (run.path / "result.json").unlink()
    forbid(run.path / name, monkeypatch)
    if name == "nodes":  # are asked of a run at work
        begin_launch(run, ["cpu"], None)
    state = read_run_state(tmp_path / "demo", NAME)
    assert state.status == "unreadable"
    assert state.message and state.message.startswith(
        f"{run.path / name}: cannot be read: Permission denied; "
    )
    assert state.message.endswith(f"chmod -R u+rX {tmp_path / 'demo'}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "events.jsonl", "validation.jsonl"])
def test_rows_that_may_not_be_read_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, snapshot: Snapshot
) -> None:
    run = plan(tmp_path / "demo")
    work(run, 1)
    forbid(run.path / name, monkeypatch)
    read = {
        "metrics": run.metrics,
        "samples": run.samples,
        "events": run.events,
        "validation": run.validations,
    }
    with snapshot.refused(UnreadableError):
        read[name.partition(".")[0]]()


def test_a_lock_that_may_not_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher_lock(tmp_path):
        forbid(tmp_path / LOCK, monkeypatch)
        assert str(describe_launcher(tmp_path)).startswith("unknown, launcher.lock ")
