"""Damaged logs of every format: read as far as their checksums hold, or refused in one line."""

import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from wandb.proto import wandb_internal_pb2

from abrun.errors import AbrunError
from abrun.logs import Log, read_log, read_logs
from tests.fuzzing import SEED, bounded, check_line, damaged, rounds

messages: Any = wandb_internal_pb2
FRAME = pd.DataFrame(
    {
        "step": range(1, 41),
        "train/reward": np.arange(40) / 7,
        "loss": [None if step % 7 == 0 else step * 0.3 for step in range(40)],
        "text": ["abc"] * 40,
    }
)


def masked_crc32c(content: bytes) -> int:
    """Bit by bit, and masked as TFRecords mask it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def tensorboard_file(events: list[bytes]) -> bytes:
    def checked(content: bytes) -> bytes:
        return content + struct.pack("<I", masked_crc32c(content))

    return b"".join(checked(struct.pack("<Q", len(event))) + checked(event) for event in events)


def tensorboard_events() -> list[bytes]:
    return [
        Event(
            step=step,
            summary=Summary(
                value=[
                    Summary.Value(tag="train/reward", simple_value=step / 8),
                    Summary.Value(tag="train/loss", simple_value=-step),
                ]
            ),
        ).SerializeToString()
        for step in range(60)
    ]


def wandb_file(records: list[bytes]) -> bytes:
    """In LevelDB's framing, every record in as many chunks as its blocks ask for."""
    content = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        left, begun = record, False
        while left or not begun:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += bytes(room)
                room = 32768
            part, left = left[: room - 7], left[room - 7 :]
            kind = {(False, True): 1, (False, False): 2, (True, False): 3, (True, True): 4}[begun, not left]
            content += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            begun = True
    return bytes(content)


def wandb_records() -> list[bytes]:
    item, record = messages.HistoryItem, messages.Record
    rows = [
        record(
            history={
                "step": {"num": step},
                "item": [
                    item(key="train/reward", value_json=str(step / 10)),
                    item(nested_key=["nested", "a"], value_json="NaN" if step == 3 else str(step)),
                    item(key="table", value_json='{"_type": "table", "rows": 3}'),
                    item(key="long", value_json='"' + "x" * 900 + '"'),
                ],
            }
        )
        for step in range(60)
    ]
    config = [{"key": "seed", "value_json": "3"}, {"nested_key": ["optim", "lr"], "value_json": "0.001"}]
    run = record(run={"run_id": "a1", "display_name": "x-s3", "config": {"update": config}})
    environment = record(environment={"python": "3.11.7", "gpu_type": "H100", "gpu_count": 2})
    end = record(exit={"exit_code": 0})
    return [each.SerializeToString() for each in (run, environment, *rows, end)]


def parquet_file(folder: Path, **options: Any) -> bytes:
    FRAME.to_parquet(folder / "x.parquet", **options)
    return (folder / "x.parquet").read_bytes()


def whole_files(folder: Path) -> dict[str, tuple[bytes, Callable[[list[bytes]], bytes] | None, list[bytes]]]:
    """By name: a file, and where it has records with checksums, how it is made of them."""
    folder.mkdir()
    events, records = tensorboard_events(), wandb_records()
    state = b'{"log_history": ' + str(FRAME.to_json(orient="records")).encode() + b"}"
    return {
        "events.out.tfevents.1.host": (tensorboard_file(events), tensorboard_file, events),
        "run-a1.wandb": (wandb_file(records), wandb_file, records),
        "a.csv": (str(FRAME.to_csv(index=False)).encode(), None, []),
        "a.jsonl": (str(FRAME.to_json(orient="records", lines=True)).encode(), None, []),
        "a.parquet": (parquet_file(folder, compression=None), None, []),
        "b.parquet": (parquet_file(folder, compression="zstd", write_page_checksum=True), None, []),
        "trainer_state.json": (state, None, []),
    }


def points(log: Log) -> set[tuple[str, int, str]]:
    return {
        (name, step, repr(value))
        for name, series in log.metrics.items()
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
    }


def fuzz(folder: Path, count: int) -> None:
    files = whole_files(folder / "whole")
    read = 0
    for round_ in range(count):
        draw = random.Random(f"{SEED} logs {round_}")
        name = list(files)[round_ % len(files)]
        content, made_of, records = files[name]
        path = folder / name
        deep = made_of is not None and draw.random() < 0.5
        if made_of is not None and deep:  # damage that the checksums know nothing of
            changed = list(records)
            for _ in range(draw.choice([1, 1, 3])):
                at = draw.randrange(len(changed))
                changed[at] = damaged(changed[at], draw)
            path.write_bytes(made_of(changed))
        else:
            path.write_bytes(damaged(content, draw))
        try:
            with bounded():
                (log,) = read_logs(str(path))
        except AbrunError as error:
            check_line(error)
            assert name in str(error)
        except Exception as error:
            raise AssertionError(f"round {round_}, {name}: {type(error).__name__}: {error}") from error
        else:
            read += 1
            texts = (log.name, log.place, log.failure, *log.notes, *log.metrics)
            assert all(text.isprintable() for text in texts), round_
            assert all((np.diff(series.steps) > 0).all() for series in log.metrics.values()), round_
            if made_of is not None and not deep:
                between_records = content.startswith(path.read_bytes())  # cut there: as a younger file was
                path.write_bytes(content)
                (whole,) = read_logs(str(path))
                assert points(log) <= points(whole), f"round {round_}: other numbers than were written"
                told = points(log) == points(whole) or log.notes or between_records
                assert told, f"round {round_}: nothing is said"
        path.unlink()
    assert read > count / 5


def test_fuzz_a_sample_of_damaged_logs(tmp_path: Path) -> None:
    fuzz(tmp_path, 70)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_fuzz_damaged_logs(tmp_path: Path) -> None:
    fuzz(tmp_path, rounds(1000))


@pytest.mark.slow
def test_fuzz_growing_logs(tmp_path: Path) -> None:
    """Whatever of a log is on the disk so far, it is no failure, and what it says stays so."""
    formats = {"events.out.tfevents.1.host": "tensorboard", "run-a1.wandb": "wandb"}
    for name, (content, _, _) in whole_files(tmp_path / "whole").items():
        if name.startswith(("b.", "trainer")):
            continue
        path, before = tmp_path / name, 0
        kind = formats.get(name, name.partition(".")[2])
        for end in range(0, len(content), max(1, len(content) // 300)):
            path.write_bytes(content[:end])
            found = len(points(read_log(path, kind)))
            assert found >= before
            before = found
