"""A run on a disk that fails at every moment, or loses what was not synced, goes on to the same numbers."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from abrun.errors import StoreError
from abrun.experiment.plan import RunName
from abrun.runs.launches import reopen
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from abrun.runs.writer import begin_attempt
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.loop import checkpoint
from tests.runs.faulty import Disk, Faults, PowerLoss
from tests.snapshot import Snapshot

NUM_STEPS, EVERY = 7, 2
ROUNDS = int(os.environ.get("ABRUN_FUZZ_ROUNDS", "500"))
SEED = int(os.environ.get("ABRUN_FUZZ_SEED", "0"))


class Walk:
    """A trainer in a few numbers: where it stands follows from all the random numbers that it drew."""

    def __init__(self) -> None:
        self.place = torch.zeros(3, dtype=torch.float64)

    def step(self) -> float:
        self.place += torch.rand(3, dtype=torch.float64) * self.place.exp()
        return float(self.place.sum())

    def local_state(self) -> dict[str, torch.Tensor]:
        return {"place": self.place}

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {}

    def load_local_state(self, state: dict[str, torch.Tensor]) -> None:
        self.place.copy_(state["place"])


def train(run: RunDir, during: Callable[[int], object] = lambda step: None) -> None:
    """What abrun.trainer.training does with the store, around a trainer that takes no time."""
    torch.manual_seed(0)
    walk, ranks, writer = Walk(), make_ranks(torch.device("cpu"), {}), begin_attempt(run)

    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        save_file(walk.local_state(), folder / "model.safetensors")

    try:
        start = checkpoint.restore(run.checkpoints, walk, ranks, writer)
        writer.event("resumed" if start else "started", step=start)
        for step in range(start + 1, NUM_STEPS + 1):
            writer.metrics(step, {"x": walk.step()})
            writer.heartbeat(step)
            during(step)
            if step % 3 == 0:
                writer.validation(step, prompts_sha256="p", rewards=[walk.step()], lengths=[step])
            if step % EVERY == 0:
                checkpoint.save(run.checkpoints, walk, ranks, step=step, keep=2, writer=writer)
        final = checkpoint.save_final(run.final_weights, ranks, write, writer)
        writer.finish(NUM_STEPS, {"final_weights": final})
    except StoreError as error:
        assert "\n" not in str(error)
        writer.fail(error.reason, exit_code=2)
        raise


def numbers(run: RunDir) -> tuple[list[str], list[str], bytes]:
    """All that a finished run is compared by."""
    assert (
        run.finished
        and run.describe_missing_steps(NUM_STEPS) is None
        and run.describe_weights_damage() is None
    )
    series = run.metrics()["x"]
    assert series.steps.tolist() == list(range(1, NUM_STEPS + 1))
    rewards = [row.rewards[0].hex() for row in run.validations().values()]
    return (
        [value.hex() for value in series.values.tolist()],
        rewards,
        (run.final_weights / "model.safetensors").read_bytes(),
    )


@pytest.fixture
def undisturbed(tmp_path: Path, group: None) -> tuple[list[str], list[str], bytes]:
    train(RunDir(tmp_path / "undisturbed"))
    return numbers(RunDir(tmp_path / "undisturbed"))


def ends_as(run: RunDir, undisturbed: object, what: object) -> None:
    """Started again, on a disk that works, a run ends as if nothing had been, and can be read meanwhile."""
    state = read_state(run, RunName(arm="baseline", seed=0))
    assert state.message is None or "\n" not in state.message, what
    if not (run.finished and run.describe_missing_steps(NUM_STEPS) is None):
        if run.finished:
            reopen(run, "its rows are gone")
        train(run)
    assert numbers(run) == undisturbed, what


def num_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    with monkeypatch.context() as patch:
        (tmp_path / "counted").mkdir()
        disk = Disk(tmp_path / "counted", patch, last=10**9)
        train(RunDir(tmp_path / "counted" / "run"))
        disk.close()
    return disk.count


def check_faults(path: Path, undisturbed: object, *, first: int, every: int, error: int) -> bool:
    run, failed = RunDir(path / "run"), False
    with pytest.MonkeyPatch.context() as patch:
        Faults(path, patch, first=first, every=every, error=error)
        for _ in range(3):  # started again while the disk still fails
            try:
                train(run)
            except StoreError:
                failed = True
            if run.finished:
                break
    ends_as(run, undisturbed, f"call {first}, then every {every}: {errno.errorcode[error]}")
    return failed


def check_power_loss(path: Path, undisturbed: object, *, last: int, seed: int | None) -> None:
    (path / "disk").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(path / "disk", patch, last=last)
        with pytest.raises(PowerLoss):
            train(RunDir(path / "disk" / "run"))
        patch.undo()
        disk.left(path / "left", None if seed is None else random.Random(seed))
        disk.close()
    ends_as(RunDir(path / "left" / "run"), undisturbed, f"power lost at call {last}, seed {seed}")


def test_after_any_call_that_fails_a_run_goes_on(
    tmp_path: Path, undisturbed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = num_calls(tmp_path, monkeypatch)
    failed = [
        check_faults(tmp_path / f"{first}", undisturbed, first=first, every=10**9, error=error)
        for first, error in zip(range(1, count, 9), [errno.ENOSPC, errno.EIO] * count, strict=False)
    ]
    assert sum(failed) > len(failed) / 2


def test_a_loss_of_power_at_any_call_loses_nothing_that_was_claimed(
    tmp_path: Path, undisturbed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for last in range(1, num_calls(tmp_path, monkeypatch), 9):
        check_power_loss(tmp_path / f"{last}", undisturbed, last=last, seed=None)


@pytest.mark.slow
def test_faults_of_the_disk_at_every_call(
    tmp_path: Path, undisturbed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, draw = num_calls(tmp_path, monkeypatch), random.Random(SEED)
    for number in range(ROUNDS):
        first = number % count + 1
        every = draw.choice([10**9, draw.randint(1, 40)])
        error = draw.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT])
        check_faults(tmp_path / f"{number}", undisturbed, first=first, every=every, error=error)


@pytest.mark.slow
def test_losses_of_power_at_every_call(
    tmp_path: Path, undisturbed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, draw = num_calls(tmp_path, monkeypatch), random.Random(SEED)
    for number in range(ROUNDS):
        seed = None if number < count else draw.getrandbits(32)
        check_power_loss(tmp_path / f"{number}", undisturbed, last=number % count + 1, seed=seed)


@pytest.mark.parametrize("step", [1, 4, NUM_STEPS])
@pytest.mark.parametrize("how", ["removed", "cut short", "replaced"])
def test_rows_that_are_lost_while_a_run_writes_them_end_it_in_one_line(
    tmp_path: Path, undisturbed: object, how: str, step: int, snapshot: Snapshot
) -> None:
    run = RunDir(tmp_path / "run")
    rows = run.path / "metrics.jsonl"

    def spoil(at: int) -> None:
        if at != step:
            return
        if how == "cut short":
            os.truncate(rows, 7)
        else:
            rows.unlink()
        if how == "replaced":
            rows.write_text("no row\n")

    with pytest.raises(StoreError) as refusal:
        train(run, spoil)
    snapshot(refusal.value)
    assert read_state(run, RunName(arm="baseline", seed=0)).status == "failed"
    ends_as(run, undisturbed, how)
