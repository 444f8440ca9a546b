"""Metrics and validations of a run as they are read: by step, the last attempt, with checksums."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from abrun.errors import StoreError
from abrun.logs import read_logs
from abrun.runs import lines
from abrun.runs.lines import LineWriter
from abrun.runs.rundir import RunDir
from tests.snapshot import Snapshot


@pytest.mark.parametrize(
    "bad",
    [
        *("{", "[1]", "3", '{"step": "1"}', '{"step": 1.5}', '{"no": 1}', '{"step": 18446744073709551615}'),
        *('{"step": 2, "x": [1]}', '{"step": 2, "x": ' + "[" * 5000 + "]" * 5000 + "}"),
    ],
)
def test_a_corrupt_line_is_one_line_with_file_and_number(
    tmp_path: Path, bad: str, snapshot: Snapshot
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
    with pytest.raises(StoreError) as caught:
        RunDir(tmp_path).metrics()
    snapshot(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def as_lists(read: dict) -> dict:
    return {name: (one.steps.tolist(), [repr(value) for value in one.values]) for name, one in read.items()}


ROWS: list[list[dict[str, Any]]] = [  # of files that hold rows of several kinds
    [{"x": 1.0, "y": 2.0}, {"x": math.nan, "y": -math.inf}, {"x": None, "y": 1}, {"y": True}, {}, {"z": 3}],
    [{"x": 1.0}, {"step": 1, "x": 2.0}, {"x": 3.0, "z": 1.0}, {"step": 1, "z": 4.0}],
    [
        {"x": 1.0},
        {"x": 2.0, "y": 1.0},
        {"step": 1, "attempt": 2, "x": 5.0},
        {"step": 2, "attempt": 1, "y": 2.0},
    ],
    [{"attempt": 2, "x": 1.0}, {"step": 1, "attempt": 1, "y": 1.0}, {"step": -3, "x": 0.0}, {"x": 1e30}],
    [{"x": float(step % 3)} | ({"y": 1.0} if step % 7 == 0 else {}) for step in range(50)],
]


@pytest.mark.parametrize("rows", ROWS)
def test_metrics_are_what_plain_loops_gather(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    rows = [{"step": step, "attempt": 1, "time_s": 0.5, **row} for step, row in enumerate(rows, 1)]
    writer = LineWriter(tmp_path / "metrics.jsonl")
    for row in rows:
        writer.write(row)
    writer.close()
    newest: dict[int, int] = {}
    for row in rows:
        newest[row["step"]] = max(row["attempt"], newest.get(row["step"], 0))
    expected: dict[str, dict[int, Any]] = {}
    for row in rows:
        for name, value in row.items():
            is_metric = name not in ("step", "attempt", "time_s")
            if is_metric and value is not None and row["attempt"] == newest[row["step"]]:
                expected.setdefault(name, {})[row["step"]] = float(value)
    assert as_lists(RunDir(tmp_path).metrics()) == {
        name: (sorted(values), [repr(np.float64(values[step])) for step in sorted(values)])
        for name, values in expected.items()
    }


# --- checksums ---


def recorded_run(folder: Path, num_rows: int) -> RunDir:
    writer = LineWriter(folder / "metrics.jsonl")
    for step in range(1, num_rows + 1):
        writer.write({"step": step, "attempt": 1, "time_s": 0.25, "x": -step / 7, "Jy*": math.nan})
    writer.close()
    (folder / "result.json").write_text("{}")
    return RunDir(folder)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(tmp_path: Path, every: int) -> None:
    run = recorded_run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), every):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError, match=r"metrics\.jsonl, line \d: ") as caught:
            run.metrics()
        assert len(str(caught.value).splitlines()) == 1
        assert run.describe_missing_steps(3) is not None


def test_checksums_are_no_part_of_a_row(tmp_path: Path, snapshot: Snapshot) -> None:
    run = recorded_run(tmp_path, 3)
    path = tmp_path / "metrics.jsonl"
    assert [list(json.loads(line))[-1] for line in path.open()] == ["crc32"] * 3
    assert set(run.metrics()) == {"x", "Jy*"}
    assert all("crc32" not in row for row in run.metrics_reader().read())
    assert set(read_logs(f"jsonl:{path}")[0].metrics) == {"attempt", "time_s", "x", "Jy*"}
    frame = pandas.read_json(path, lines=True)
    assert frame["x"].tolist() == pytest.approx([-1 / 7, -2 / 7, -3 / 7])
    content = path.read_text()
    path.write_text(content.replace("-0.14", "-0.15"))
    with snapshot.refused(StoreError):
        read_logs(f"jsonl:{path}")


def test_a_line_without_a_checksum_is_read_until_there_is_one(tmp_path: Path, snapshot: Snapshot) -> None:
    run = recorded_run(tmp_path, 2)
    path = tmp_path / "metrics.jsonl"
    earlier, later = '{"step": -1, "x": 1.0}\n', '{"step": 3, "x": 1.0}\n'
    content = path.read_text()
    path.write_text(earlier + content)  # a run of an older version that was resumed
    assert run.metrics()["x"].steps.tolist() == [-1, 1, 2]
    followed = run.metrics_reader()
    assert len(followed.read()) == 3
    with path.open("a") as file:
        file.write(later)
    for read in (run.metrics, followed.read):
        with snapshot.refused(StoreError):
            read()
    assert [row["step"] for row in lines.read_valid_rows(path)] == [-1, 1, 2]


# --- validation ---


def validation_line(step: object, attempt: int, rewards: list) -> str:
    row = {"step": step, "attempt": attempt, "prompts_sha256": "ab", "rewards": rewards, "lengths": [3, 4]}
    return json.dumps(row) + "\n"


def test_of_several_attempts_the_last_validation_counts(tmp_path: Path) -> None:
    assert RunDir(tmp_path).validations() == {}
    lines = [
        validation_line(4, 1, [0, 0.5]),
        validation_line(0, 2, [0, 1]),
        validation_line(4, 2, [1, -0.5]),
        validation_line(8, 1, [1, 1]),  # an older attempt's last words
        '{"step": 12, "attem',
    ]
    (tmp_path / "validation.jsonl").write_text("".join(lines))
    found = RunDir(tmp_path).validations()
    assert list(found) == [0, 4, 8]
    assert found[4].rewards.tolist() == [1, -0.5] and found[4].lengths.tolist() == [3, 4]
    assert found[0].prompts_sha256 == "ab"


def test_every_flipped_bit_of_a_validation_is_noticed(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 1)
    writer = LineWriter(tmp_path / "validation.jsonl")
    for step in (0, 4):
        writer.write(json.loads(validation_line(step, 1, [0, 0.5])))
    writer.close()
    path = tmp_path / "validation.jsonl"
    content = path.read_bytes()
    assert list(run.validations()) == [0, 4]
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = run.validations()
        except StoreError:
            continue
        assert [row.rewards.tolist() for row in found.values()] == [[0, 0.5], [0, 0.5]]


@pytest.mark.parametrize(
    "line",
    [
        "{}\n",
        validation_line(1, 1, [1]),
        validation_line(1, 1, [1, "x"]),
        validation_line(1, 1, [[1, 2], [3, 4]]),
        validation_line(None, 1, [1, 2]),
        validation_line("Infinity", 1, [1, 2]),
        validation_line("4", 1, [1, 2]),
    ],
)
def test_a_corrupt_validation_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "validation.jsonl").write_text(validation_line(0, 1, [0, 0]) + line)
    with pytest.raises(StoreError, match=r"line 2: (not a validation record|got )") as raised:
        RunDir(tmp_path).validations()
    assert len(str(raised.value).splitlines()) == 1
