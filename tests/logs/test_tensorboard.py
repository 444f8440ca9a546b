"""TensorBoard: files of the real writer of tensorboard itself, which torch writes with too."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from abrun.errors import StoreError
from abrun.logs import read_log, read_logs
from tests.snapshot import Snapshot


def write(folder: Path, values: list[float], first: int = 0, tag: str = "train/reward") -> Path:
    writer = EventFileWriter(str(folder))
    for step, value in enumerate(values, first):
        writer.add_event(
            Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        )
    writer.close()
    return next(folder.glob("events*"))


def test_scalars_as_tensors(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for step in (1, 2):
        tensors = {
            "float": np.float32(step / 4),
            "double": np.float64(0.1),
            "int": np.int64(step),
            "one": np.array([2.5], np.float32),
            "vector": np.arange(3.0),
            "text": np.array("hi", dtype=object),
        }
        values = [Summary.Value(tag=tag, tensor=make_tensor_proto(value)) for tag, value in tensors.items()]
        writer.add_event(Event(step=step, summary=Summary(value=values)))
    writer.close()
    (log,) = read_logs(f"tb:{tmp_path}")
    assert {tag: series.value_at(2) for tag, series in log.metrics.items()} == {
        "float": 0.5,
        "double": 0.1,
        "int": 2.0,
        "one": 2.5,
    }


def test_files_of_a_resumed_run_are_one_run(tmp_path: Path, snapshot: Snapshot) -> None:
    write(tmp_path / "b", [5.0, 6.0], first=2).rename(tmp_path / "events.out.tfevents.10000000000.host.1.0")
    write(tmp_path / "a", [1.0, 2.0, 3.0]).rename(tmp_path / "events.out.tfevents.9999999999.host.2.0")
    (log,) = [log for log in read_logs(str(tmp_path)) if log.metrics]
    assert log.metrics["train/reward"].values.tolist() == [1.0, 2.0, 5.0, 6.0]
    snapshot(log.notes)


def test_files_that_each_begin_at_the_first_step_are_said_to_be_read_as_one_run(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    folder = tmp_path / "baseline-s0"
    write(folder, [1.0, 2.0, 3.0]).rename(folder / "events.out.tfevents.100.host")
    write(folder, [9.0, 9.0]).rename(folder / "events.out.tfevents.200.host")
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["train/reward"].values.tolist() == [9.0, 9.0, 3.0]
    snapshot(log.guesses[0])


def test_nested_runs_are_runs_each_and_one_to_who_follows_them(tmp_path: Path) -> None:
    write(tmp_path / "treatment-s1" / "runs" / "Nov21_host", [1.0], first=1)
    write(tmp_path / "baseline-s1" / "runs" / "Nov21_host", [2.0], first=1)
    assert [log.name for log in read_logs(str(tmp_path))] == [
        "baseline-s1/runs/Nov21_host",
        "treatment-s1/runs/Nov21_host",
    ]
    write(tmp_path / "baseline-s1" / "runs" / "Nov22_host", [7.0], first=2)
    log = read_log(tmp_path / "baseline-s1", "tensorboard")
    assert log.metrics["train/reward"].values.tolist() == [2.0, 7.0] and log.name == "baseline-s1"


def test_torn_and_damaged_files_are_read_to_the_last_whole_event(tmp_path: Path, snapshot: Snapshot) -> None:
    file = write(tmp_path, [float(step) for step in range(200)])
    whole = file.read_bytes()
    lengths = []
    for end in (0, 5, 30, 60, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        log = read_log(tmp_path, "tensorboard")
        series = log.metrics.get("train/reward")
        lengths.append(len(series) if series else 0)
        assert log.notes and (
            not series or series.values.tolist() == [float(step) for step in range(lengths[-1])]
        )
    assert lengths[0] == lengths[1] == 0 and 90 < lengths[-2] < 110 and lengths[-1] == 199
    for position in (len(whole) // 2, len(whole) // 2 + 11, len(whole) // 2 + 23):  # in any part of an event
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        file.write_bytes(damaged)
        (log,) = read_logs(str(tmp_path))
        assert 90 < len(log.metrics["train/reward"]) < 110
        assert log.metrics["train/reward"].values.tolist() == log.metrics["train/reward"].steps.tolist()
        snapshot(log.notes[0])


def test_long_events_are_checked_too(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for step in range(3):
        picture = Summary.Value(tag="picture", image=Summary.Image(encoded_image_string=os.urandom(200_000)))
        number = Summary.Value(tag="loss", simple_value=step)
        writer.add_event(Event(step=step, summary=Summary(value=[picture, number])))
    writer.close()
    file = next(tmp_path.glob("events*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (log,) = read_logs(str(tmp_path))
    assert log.metrics["loss"].values.tolist() == [0.0] and "torn or damaged" in log.notes[0]


@pytest.mark.parametrize("step", [2**53, -(2**63)])
def test_a_step_that_is_none_is_one_line(tmp_path: Path, step: int, snapshot: Snapshot) -> None:
    write(tmp_path, [1.0], first=step)
    with snapshot.refused(StoreError):
        read_logs(str(tmp_path))


def test_a_tensor_of_an_unknown_kind_is_no_number(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path))
    for kind in range(1, 24):
        value = Summary.Value(tag="t", tensor=TensorProto(dtype=kind, tensor_content=b"ab"))
        writer.add_event(Event(step=kind, summary=Summary(value=[value])))
    writer.close()
    assert read_log(tmp_path, "tensorboard").notes == ()


def test_garbage_is_one_line(tmp_path: Path, snapshot: Snapshot) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(os.urandom(500))
    with snapshot.refused(StoreError):
        read_logs(str(tmp_path))


def test_reading_imports_neither_tensorflow_nor_torch(tmp_path: Path) -> None:
    write(tmp_path, [1.0])
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    code = (
        "import sys; from abrun.logs import read_logs\n"
        "assert not {'wandb', 'pandas', 'pyarrow', 'tensorboard'} & set(sys.modules)\n"
        f"assert read_logs({str(tmp_path)!r})[0].metrics['train/reward'].value_at(0) == 1\n"
        "assert not {'torch', 'wandb', 'tensorboard'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_train_and_validation_folders_of_keras_are_one_run(tmp_path: Path) -> None:
    for run in ("old-s0", "old-s1"):
        write(tmp_path / run / "train", [0.1, 0.2, 0.3], tag="epoch_loss")
        write(tmp_path / run / "validation", [0.5, 0.6, 0.7], tag="epoch_loss")
    logs = read_logs(str(tmp_path))
    assert [log.name for log in logs] == ["old-s0", "old-s1"]
    assert logs[0].metrics["epoch_loss"].values.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert logs[0].metrics["validation/epoch_loss"].values.tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert logs[0].place.endswith("old-s0/train")
