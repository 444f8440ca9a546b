"""Checkpoints: safetensors and JSON only, whole or not there, and refused where they do not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from abrun import store
from abrun.errors import StoreError
from abrun.train import checkpoint
from tests.train.runs import Trainer, events, make_run, metric_values, new_attempt, run_config, train_here


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, warm_weights: Path) -> Path:
    from tests.train.runs import single_rank

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

    def load_local_state(self, state: dict[str, torch.Tensor]) -> None:
        self.weights.copy_(state["weights/x"])


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


def test_random_states_come_back(tmp_path: Path, group: None) -> None:
    import random

    import numpy as np

    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    checkpoint.save(tmp_path, OneTensor(1.0), 1, keep=2)  # pyright: ignore
    expected = draws()
    assert draws() != expected
    backend = OneTensor(0.0)
    assert checkpoint.restore(tmp_path, backend) == 1  # pyright: ignore
    assert draws() == expected
    assert backend.weights.tolist() == [1.0] * 3


def test_a_save_that_is_cut_short_leaves_the_older_one_in_charge(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, OneTensor(1.0), 1, keep=2)  # pyright: ignore
    for broken in ("abrun.train.checkpoint.save_file", "abrun.store.write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(tmp_path, OneTensor(2.0), 2, keep=2)  # pyright: ignore
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]
        backend = OneTensor(0.0)
        assert checkpoint.restore(tmp_path, backend) == 1  # pyright: ignore
        assert backend.weights.tolist() == [1.0] * 3
    checkpoint.save(tmp_path, OneTensor(2.0), 2, keep=2)  # pyright: ignore  # over the rest of the broken one
    assert checkpoint.restore(tmp_path, backend) == 2  # pyright: ignore


def interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_one_line(tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        from safetensors import SafetensorError

        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("abrun.train.checkpoint.save_file", full)
    with pytest.raises(StoreError, match="No space left") as raised:
        checkpoint.save(tmp_path, OneTensor(1.0), 1, keep=2)  # pyright: ignore
    assert "\n" not in str(raised.value)


def test_another_number_of_ranks_is_refused(tmp_path: Path, group: None) -> None:
    checkpoint.save(tmp_path, OneTensor(1.0), 7, keep=2)  # pyright: ignore
    store.write_json(tmp_path / "step-000007" / "state.json", {"step": 7, "num_ranks": 2})
    expected = r"written by 2 ranks and this run has 1; .*resume with as many"
    with pytest.raises(StoreError, match=expected) as raised:
        checkpoint.restore(tmp_path, OneTensor(0.0))  # pyright: ignore
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "state"])
def test_a_damaged_checkpoint_is_one_line_that_names_it(damage: str, tmp_path: Path, group: None) -> None:
    checkpoint.save(tmp_path, OneTensor(1.0), 7, keep=2)  # pyright: ignore
    file = tmp_path / "step-000007" / "rank-0.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "garbage":
        file.write_bytes(b"\x00garbage" * 100)
    elif damage == "missing":
        file.unlink()
    else:
        (file := file.with_name("state.json")).write_text("{")
    with pytest.raises(StoreError) as raised:
        checkpoint.restore(tmp_path, OneTensor(0.0))  # pyright: ignore
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_damaged_checkpoint_fails_the_run_and_the_one_before_resumes(
    finished: Path, tmp_path: Path, warm_weights: Path
) -> None:
    """The whole way: the refusal on stderr, and what it advises then works and gives the same numbers."""
    config = run_config("steps=5", "checkpoint={every: 1, keep: 3}")
    directory = make_run(tmp_path / "run", config, initial_weights=warm_weights)
    (directory / "checkpoints").mkdir()
    for name in ("step-000003", "step-000004"):
        shutil.copytree(finished / "checkpoints" / name, directory / "checkpoints" / name)
    (directory / "metrics.jsonl").write_bytes((finished / "metrics.jsonl").read_bytes())
    newest = directory / "checkpoints" / "step-000004"
    (newest / "rank-0.safetensors").write_bytes(b"damaged")
    trainer = Trainer(directory)
    assert trainer.wait() == 2
    assert trainer.stderr.startswith("error: ") and trainer.stderr.count("\n") == 1
    assert f"remove {newest}" in trainer.stderr
    assert events(directory) == ["started", "failed"]
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    new_attempt(directory)
    assert Trainer(directory).wait() == 0
    assert events(directory)[2:4] == ["started", "resumed"]
    assert metric_values(directory) == metric_values(finished)
