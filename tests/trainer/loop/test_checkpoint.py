"""Checkpoints: safetensors and JSON only, whole or not there, and refused where they do not fit."""

import errno
import json
import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from abrun.errors import StoreError
from abrun.experiment.plan import RunName
from abrun.runs.files import fingerprint, read_json, write_json
from abrun.runs.launches import write_config
from abrun.runs.rundir import RunDir
from abrun.runs.writer import FencedError, RunWriter, begin_attempt
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.loop import checkpoint
from tests.spawn import run_ranks
from tests.trainer.loop.runs import Trainer, train_here
from tests.written_runs import events, make_run, metric_values, run_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, warm_weights: Path) -> Path:
    from tests.trainer.loop.runs import single_rank

    config = run_config("steps=5", "checkpoint={every: 1, keep: 3, final_weights: true}")
    directory = make_run(tmp_path_factory.mktemp("finished"), config, initial_weights=warm_weights)
    with single_rank():
        train_here(directory)
    return directory


class OneTensor:
    """A backend of which a checkpoint sees only its state."""

    def __init__(self, value: float) -> None:
        self.weights = torch.full((3,), value)

    def local_state(self) -> dict[str, torch.Tensor]:
        return {"weights/x": self.weights}

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {}

    def load_local_state(self, state: dict[str, torch.Tensor]) -> None:
        self.weights.copy_(state["weights/x"])


def save(run: RunDir, trained: OneTensor, step: int, writer: RunWriter | None = None) -> None:
    """A step as the loop takes it: its row, then the checkpoint."""
    writer = writer or begin_attempt(run)
    recorded = run.step_attempts()
    for each in range(1, step + 1):
        if each not in recorded:
            writer.metrics(each, {"x": float(each)})
    ranks = make_ranks(torch.device("cpu"), {})
    checkpoint.save(run.checkpoints, trained, ranks, step=step, keep=2, writer=writer)


def restore(run: RunDir, trained: OneTensor) -> int:
    ranks = make_ranks(torch.device("cpu"), {})
    return checkpoint.restore(run.checkpoints, trained, ranks, begin_attempt(run))


@pytest.fixture
def run(tmp_path: Path, group: None) -> RunDir:
    return RunDir(tmp_path / "run")


def told(run: RunDir, event: str) -> list[tuple[int, str]]:
    """Steps and reasons of the events of one kind."""
    return [(row["step"], row["reason"]) for row in run.events() if row["event"] == event]


def test_only_safetensors_and_json_and_only_the_newest(finished: Path) -> None:
    checkpoints = finished / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["final", "step-000003", "step-000004", "step-000005"]
    files = [path for path in checkpoints.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)


def test_a_checkpoint_holds_weights_optimizer_and_every_random_state(finished: Path) -> None:
    tensors = load_file(finished / "checkpoints" / "step-000005" / "rank-0.safetensors")
    kinds = {name.split("/")[0] for name in tensors}
    assert kinds == {"weights", "optimizer", "rng"}
    assert {name for name in tensors if name.startswith("rng/")} >= {"rng/torch", "rng/python", "rng/numpy"}
    weights = {name.removeprefix("weights/") for name in tensors if name.startswith("weights/")}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        prefix = f"optimizer/{key}/"
        assert {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)} == weights
    assert float(tensors["optimizer/step/" + sorted(weights)[0]]) == 5


def test_random_states_come_back(run: RunDir) -> None:
    import random

    import numpy as np

    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    save(run, OneTensor(1.0), 1)
    expected = draws()
    assert draws() != expected
    backend = OneTensor(0.0)
    assert restore(run, backend) == 1
    assert draws() == expected
    assert backend.weights.tolist() == [1.0] * 3


def test_a_save_that_is_cut_short_leaves_the_older_one_in_charge(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, OneTensor(1.0), 1)
    for broken in ("abrun.trainer.loop.checkpoint.save_file", "abrun.trainer.loop.checkpoint.write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, interrupted)
            with pytest.raises(KeyboardInterrupt):
                save(run, OneTensor(2.0), 2)
        assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-000001"]
        backend = OneTensor(0.0)
        assert restore(run, backend) == 1
        assert backend.weights.tolist() == [1.0] * 3
    save(run, OneTensor(2.0), 2)  # over the rest of the broken one
    assert restore(run, backend) == 2


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_one_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        from safetensors import SafetensorError

        raise SafetensorError("I/O error: No space left (os error 28)")

    monkeypatch.setattr("abrun.trainer.loop.checkpoint.save_file", full)
    with pytest.raises(StoreError, match="No space left") as raised:
        save(run, OneTensor(1.0), 1)
    assert "\n" not in str(raised.value)


def test_an_older_attempt_saves_no_checkpoint_over_a_newer_ones(run: RunDir) -> None:
    older = begin_attempt(run)
    older.metrics(1, {"x": 1.0})
    save(run, OneTensor(2.0), 1)
    ranks = make_ranks(torch.device("cpu"), {})
    with pytest.raises(FencedError):
        checkpoint.save(run.checkpoints, OneTensor(1.0), ranks, step=1, keep=2, writer=older)
    backend = OneTensor(0.0)
    assert restore(run, backend) == 1 and backend.weights.tolist() == [2.0] * 3


def test_the_newest_is_the_one_of_the_highest_step(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin_attempt(run)
    monkeypatch.setattr(RunDir, "step_attempts", lambda run: dict.fromkeys(range(1, 1_000_002), 1))
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        ranks = make_ranks(torch.device("cpu"), {})
        checkpoint.save(run.checkpoints, OneTensor(float(step)), ranks, step=step, keep=2, writer=writer)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-1000000", "step-1000001"]
    assert restore(run, OneTensor(0.0)) == 1_000_001


def test_another_number_of_ranks_is_refused(run: RunDir) -> None:
    save(run, OneTensor(1.0), 7)
    path = run.checkpoints / "step-000007" / "state.json"
    state = read_json(path)
    files = {f"rank-{rank}.safetensors": state["files"]["rank-0.safetensors"] for rank in range(2)}
    write_json(path, {**state, "num_ranks": 2, "files": files})
    expected = r"written by 2 ranks, .* has 1; resume with 2"
    with pytest.raises(StoreError, match=expected) as raised:
        restore(run, OneTensor(0.0))
    assert "\n" not in str(raised.value)


# --- damage ---


def rank_file(checkpoint: Path) -> Path:
    return checkpoint / "rank-0.safetensors"


def edit_state(checkpoint: Path, **values: object) -> None:
    write_json(checkpoint / "state.json", read_json(checkpoint / "state.json") | values)


def rewrite(checkpoint: Path, **tensors: torch.Tensor | None) -> None:
    """Other tensors, with the checksum that they have."""
    content = load_file(rank_file(checkpoint))
    for key, tensor in tensors.items():
        content.pop(key.replace("__", "/"))
        if tensor is not None:
            content[key.replace("__", "/")] = tensor
    save_file(content, rank_file(checkpoint))
    edit_state(checkpoint, files={"rank-0.safetensors": fingerprint(rank_file(checkpoint))})


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit": (lambda path: flip(rank_file(path), -1), "does not match its recorded checksum"),
    "truncated": (lambda path: os.truncate(rank_file(path), 100), "rank-0.safetensors has 100 bytes"),
    "no file": (lambda path: rank_file(path).unlink(), "rank-0.safetensors is missing"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json: no such file"),
    "half a state": (lambda path: (path / "state.json").write_text("{"), "state.json: not readable as JSON"),
    "an older form": (
        lambda path: write_json(path / "state.json", {"step": 7, "num_ranks": 1}),
        "run: missing",
    ),
    "another kind": (lambda path: edit_state(path, files=[1]), r"files: got \[1\]; expected a mapping"),
    "no checksum": (
        lambda path: edit_state(path, files={"rank-0.safetensors": {}}),
        "instead of the None written",
    ),
    "other files": (lambda path: edit_state(path, files={"x": {}}), "state.json: lists 1 files for 1 ranks"),
    "num_ranks": (lambda path: edit_state(path, num_ranks=3), "state.json: lists 1 files for 3 ranks"),
    "num_ranks is text": (lambda path: edit_state(path, num_ranks="x"), "num_ranks: got 'x'"),
    "step": (lambda path: edit_state(path, step=6), "step: got 6; the folder is for step 7"),
    "no random numbers": (lambda path: rewrite(path, rng__numpy=None), "KeyError: 'rng/numpy'"),
    "short random numbers": (lambda path: rewrite(path, rng__python=torch.zeros(3)), "does not fit: "),
    "a position nowhere": (
        lambda path: rewrite(path, rng__numpy=torch.full((625,), 10**6)),
        "rng/numpy: got the position 1000000",
    ),
    "numbers too large": (lambda path: rewrite(path, rng__numpy=torch.full((625,), 2**40)), "rng/numpy"),
    "numbers below 0": (lambda path: rewrite(path, rng__python=torch.full((625,), -1)), "does not fit: Over"),
    "other numbers": (lambda path: rewrite(path, weights__x=torch.zeros(3).bool()), "is torch.bool"),
    "a file as the folder": (lambda path: (shutil.rmtree(path), path.touch()), "state.json"),
    "a link to nothing": (lambda path: (shutil.rmtree(path), path.symlink_to("/nowhere")), "state.json"),
    "a pipe": (lambda path: (rank_file(path).unlink(), os.mkfifo(rank_file(path))), "has 0 bytes"),
    "another shape": (lambda path: rewrite(path, weights__x=torch.zeros(1)), r"has the shape \[1\]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage: str, run: RunDir) -> None:
    save(run, OneTensor(1.0), 5)
    save(run, OneTensor(2.0), 7)
    spoil, reason = DAMAGES[damage]
    spoil(run.checkpoints / "step-000007")
    backend = OneTensor(0.0)
    assert restore(run, backend) == 5 and backend.weights.tolist() == [1.0] * 3
    ((step, said),) = told(run, "checkpoint_damaged")
    assert step == 7 and re.search(reason, said) and "\n" not in said
    spoil_all = [path for path in run.checkpoints.iterdir() if path.name == "step-000005"]
    shutil.rmtree(spoil_all[0])
    before = torch.get_rng_state()
    with pytest.raises(StoreError, match=rf"checkpoints are damaged \(step 7: .*{reason}.*remove") as raised:
        restore(run, backend)
    assert "\n" not in str(raised.value) and torch.equal(torch.get_rng_state(), before)


def configured(path: Path, seed: int, **config: Any) -> RunDir:
    run = RunDir(path)
    name = RunName(arm="baseline", seed=seed)
    write_config(run, "x", name, config)
    return run


@pytest.mark.parametrize(("seed", "config"), [(1, {}), (0, {"lr": 0.1})])
def test_a_checkpoint_of_another_run_is_not_taken_for_ones_own(
    group: None, tmp_path: Path, seed: int, config: dict[str, Any]
) -> None:
    """Same step, shapes and checksums: copied from a neighbour, it would be other weights in silence."""
    run, other = configured(tmp_path / "here", 0), configured(tmp_path / "there", seed, **config)
    save(run, OneTensor(1.0), 5)
    save(run, OneTensor(2.0), 7)
    save(other, OneTensor(3.0), 7)
    shutil.rmtree(run.checkpoints / "step-000007")
    shutil.copytree(other.checkpoints / "step-000007", run.checkpoints / "step-000007")
    assert restore(run, backend := OneTensor(0.0)) == 5 and backend.weights.tolist() == [1.0] * 3
    ((step, said),) = told(run, "checkpoint_damaged")
    assert step == 7 and said.startswith(f"state.json run: got 'baseline/seed-{seed} ")


def test_the_limits_of_a_run_may_change_between_its_attempts(group: None, tmp_path: Path) -> None:
    run = configured(tmp_path / "run", 0, limits={"run_s": 1})
    save(run, OneTensor(1.0), 5)
    configured(run.path, 0, limits={"run_s": 2})
    assert restore(run, OneTensor(0.0)) == 5


def test_saving_goes_on_beside_whatever_lies_among_the_checkpoints(run: RunDir, tmp_path: Path) -> None:
    save(run, OneTensor(1.0), 1)
    save(run, OneTensor(2.0), 2)
    shutil.move(run.checkpoints / "step-000001", tmp_path / "elsewhere")
    (run.checkpoints / "step-000001").symlink_to(tmp_path / "elsewhere")
    (run.checkpoints / "step-000004").touch()
    (run.checkpoints / "step-0000002").mkdir()  # another name of the same step is nobody's
    for killed in (".step-000009.partial", ".step-000009-1.partial", ".final.partial"):
        (run.checkpoints / killed).mkdir()
    assert restore(run, OneTensor(0.0)) == 2
    for step in (3, 4):
        save(run, OneTensor(1.0), step)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert left == ["step-0000002", "step-000003", "step-000004"]
    assert (tmp_path / "elsewhere" / "state.json").is_file()  # what a link leads to is not abrun's to remove


def test_a_folder_that_cannot_be_listed_is_one_line_and_no_start_from_step_0(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, OneTensor(1.0), 1)

    def fail(path: Any) -> list[str]:
        raise OSError(5, "Input/output error")

    writer = begin_attempt(run)
    monkeypatch.setattr(checkpoint.os, "listdir", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        checkpoint.restore(run.checkpoints, OneTensor(0.0), make_ranks(torch.device("cpu"), {}), writer)


def test_damaged_checkpoints_are_not_among_those_that_are_kept(run: RunDir) -> None:
    for step in (3, 5, 7):
        save(run, OneTensor(1.0), step)
    flip(rank_file(run.checkpoints / "step-000007"), -1)
    assert restore(run, OneTensor(0.0)) == 5
    save(run, OneTensor(1.0), 6)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000005", "step-000006"]


def test_a_checkpoint_is_not_restored_beyond_what_is_recorded(run: RunDir) -> None:
    save(run, OneTensor(1.0), 5)
    save(run, OneTensor(2.0), 7)
    rows = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_bytes(b"".join(rows[:6]))
    assert restore(run, OneTensor(0.0)) == 5
    ((step, said),) = told(run, "checkpoint_passed_over")
    assert step == 7 and said.startswith("step 7 is not recorded")
    writer = begin_attempt(run)
    for step in (6, 7):  # goes on from step 5 and dies before it saves: the checkpoint is of another past
        writer.metrics(step, {"x": 0.0})
    assert restore(run, OneTensor(0.0)) == 5
    step, said = told(run, "checkpoint_passed_over")[-1]
    assert step == 7 and said.startswith("step 6 ") and f" attempt {writer.attempt}" in said
    (run.path / "metrics.jsonl").write_bytes(b"".join([rows[0], b"garbage\n", *rows[2:]]))
    backend = OneTensor(0.0)
    assert restore(run, backend) == 0, "nothing supports any: from the start"
    assert backend.weights.tolist() == [0.0] * 3


def on_two_ranks(rank: int, world_size: int, directory: Path) -> list[Any]:
    """What each rank has of a fallback that rank 1 alone has reason for, then of a disk that fails there."""
    run, ranks, trained = RunDir(directory), make_ranks(torch.device("cpu"), {}), OneTensor(0.0)
    writer = begin_attempt(run) if rank == 0 else None
    for step in (1, 2):
        trained.weights.fill_(10 * step + rank)
        if writer:
            writer.metrics(step, {"x": 1.0})
        checkpoint.save(run.checkpoints, trained, ranks, step=step, keep=2, writer=writer)
    if rank == 1:
        flip(run.checkpoints / "step-000002" / "rank-1.safetensors", -1)
    ranks.barrier()
    found: list[Any] = [checkpoint.restore(run.checkpoints, trained, ranks, writer), trained.weights.tolist()]
    if rank == 1:
        checkpoint.save_file = lambda *_: os.truncate("/nowhere", 0)
    try:
        checkpoint.save(run.checkpoints, trained, ranks, step=2, keep=2, writer=writer)
    except StoreError as error:
        found.append(str(error))
    ranks.barrier()
    found.append(sorted(os.listdir(run.checkpoints)))
    return found


def test_all_ranks_agree_on_what_is_sound_and_fail_together(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, tmp_path / "run")
    assert first[:2] == [1, [10.0] * 3] and second[:2] == [1, [11.0] * 3]
    assert first[2] == second[2] and "cannot be written" in first[2]  # and neither waits for the other
    assert first[3] == ["step-000001", "step-000002"]  # and the other rank's shard goes at once
    ((step, reason),) = told(RunDir(tmp_path / "run"), "checkpoint_damaged")
    assert step == 2 and reason.startswith("rank-1.safetensors does not")


@pytest.mark.parametrize("attempt_at", ["shard", "state", "final"])
def test_what_a_failed_save_wrote_is_removed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, attempt_at: str
) -> None:
    """A full disk gets its space back at once, not at a resume that may never come."""
    ranks, writer = make_ranks(torch.device("cpu"), {}), begin_attempt(run)

    def fill_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        fill_disk()

    save(run, OneTensor(1.0), 1, writer)
    with pytest.raises(StoreError, match="No space left"):
        if attempt_at == "final":
            checkpoint.save_final(run.final_weights, ranks, write, writer)
        elif attempt_at == "state":
            monkeypatch.setattr(checkpoint, "write_json", fill_disk)
            save(run, OneTensor(2.0), 2, writer)
        else:
            monkeypatch.setattr(checkpoint, "_sync_and_fingerprint", fill_disk)  # the shard is there
            save(run, OneTensor(2.0), 2, writer)
    assert os.listdir(run.checkpoints) == ["step-000001"]


def test_checkpoints_of_a_shared_run_are_shared(run: RunDir) -> None:
    writer = begin_attempt(run)
    (run.path / "config.json").write_text("{}")
    (run.path / "config.json").chmod(0o640)
    before = os.umask(0o077)
    try:
        save(run, OneTensor(1.0), 1, writer)
    finally:
        os.umask(before)
    folder = run.checkpoints / "step-000001"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


def flipped_runs(run: RunDir, rounds: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """A bit of the newest checkpoint is turned, and put back: file, byte, bit."""
    draw = random.Random(seed)
    for _ in range(rounds):
        path = draw.choice(sorted((run.checkpoints / "step-000007").iterdir()))
        content = path.read_bytes()
        byte, bit = draw.randrange(len(content)), draw.randrange(8)
        flip(path, byte, bit)
        yield path.name, byte, bit
        path.write_bytes(content)


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_a_turned_bit_gives_no_other_weights_and_no_other_random_numbers(run: RunDir, rounds: int) -> None:
    save(run, OneTensor(1.0), 5)
    torch.rand(3)
    save(run, OneTensor(2.0), 7)
    rounds, seed = (
        int(os.environ.get(f"ABRUN_FUZZ_{name}", of)) for name, of in (("ROUNDS", rounds), ("SEED", 0))
    )
    ranks, writer = make_ranks(torch.device("cpu"), {}), begin_attempt(run)
    drawn: dict[int, float] = {}
    for path in (5, 7):
        tensors = load_file(rank_file(run.checkpoints / f"step-{path:06d}"))
        torch.set_rng_state(tensors["rng/torch"])
        drawn[path] = float(torch.rand(()))
    for where in flipped_runs(run, rounds, seed):
        backend = OneTensor(0.0)
        try:
            step = checkpoint.restore(run.checkpoints, backend, ranks, writer)
        except StoreError as error:  # the number of ranks, and all that hangs on it
            assert "\n" not in str(error), where
            continue
        assert step in (5, 7), where
        assert backend.weights.tolist() == [1.0 if step == 5 else 2.0] * 3, where
        assert float(torch.rand(())) == drawn[step], where


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    finished: Path, tmp_path: Path, warm_weights: Path
) -> None:
    """The whole way, and to the same numbers, bit for bit."""
    config = run_config("steps=5", "checkpoint={every: 1, keep: 3, final_weights: true}")
    directory = make_run(tmp_path / "run", config, initial_weights=warm_weights)
    (directory / "checkpoints").mkdir()
    for name in ("step-000003", "step-000004"):
        shutil.copytree(finished / "checkpoints" / name, directory / "checkpoints" / name)
    (directory / "metrics.jsonl").write_bytes((finished / "metrics.jsonl").read_bytes())
    flip(rank_file(directory / "checkpoints" / "step-000004"), -9)
    trainer = Trainer(directory)
    assert trainer.wait() == 0, trainer.stderr
    assert events(directory)[:3] == ["started", "checkpoint_damaged", "resumed"]
    assert metric_values(directory) == metric_values(finished)
    recorded = read_json(finished / "result.json")["final_weights"]
    assert "model.safetensors" in recorded and RunDir(finished).describe_weights_damage() is None
