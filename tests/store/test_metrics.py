"""Metrics and validations of a run as they are read: by step, the last attempt, quickly, and from a cache."""

import io
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from abrun import layout, store
from abrun.errors import StoreError
from abrun.store import RunDir, experiment, metrics


@pytest.mark.parametrize(
    "bad",
    [
        *("{", "[1]", "3", '{"step": "1"}', '{"step": 1.5}', '{"no": 1}', '{"step": 18446744073709551615}'),
        *('{"step": 2, "x": [1]}', '{"step": 2, "x": ' + "[" * 5000 + "]" * 5000 + "}"),
    ],
)
def test_a_corrupt_line_is_one_line_with_file_and_number(tmp_path: Path, bad: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + bad + '\n{"step": 3}\n')
    with pytest.raises(StoreError, match=r"metrics.jsonl, line 2: .*got") as caught:
        RunDir(tmp_path).metrics()
    assert len(str(caught.value).splitlines()) == 1


def test_metrics_are_by_step_and_the_last_attempt_wins(tmp_path: Path) -> None:
    rows = [(1, 1, 0.1), (2, 1, 0.2), (3, 1, 0.3), (2, 2, 0.22), (3, 2, math.nan), (4, 2, 0.44)]
    writer = store.LineWriter(tmp_path / "metrics.jsonl")
    for step, attempt, reward in rows:
        writer.write({"step": step, "attempt": attempt, "train/reward": reward})
    writer.write({"step": 4, "attempt": 1, "train/reward": 9.0})  # a zombie's: an older attempt never wins
    writer.close()
    reward = RunDir(tmp_path).metrics()["train/reward"]
    assert reward.steps.tolist() == [1, 2, 3, 4]
    assert reward.values.tolist() == pytest.approx([0.1, 0.22, math.nan, 0.44], nan_ok=True)
    assert RunDir(tmp_path / "nowhere").metrics() == {}


def as_lists(read: dict) -> dict:
    return {name: (one.steps.tolist(), [repr(value) for value in one.values]) for name, one in read.items()}


@pytest.mark.parametrize(
    "odd",  # what makes one row of a usual file an unusual one
    [
        {},
        {"x": math.nan},
        {"x": math.inf, "y": -math.inf},
        {"x": None},
        {"x": None, "y": math.nan},
        {"z": 3.0},
        {"x": True},
        {"step": 2},
        {"step": 1, "attempt": 2},
    ],
)
def test_the_quick_way_of_reading_metrics_says_what_the_careful_one_says(tmp_path: Path, odd: dict) -> None:
    writer = store.LineWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        row = {"step": step, "attempt": 1, "time_s": 0.5, "x": step / 3, "y": -1e300}
        writer.write(row | (odd if step == 4 else {}))
    writer.close()
    content = (tmp_path / "metrics.jsonl").read_bytes()
    careful = as_lists(metrics._rows_of_anything(tmp_path / "metrics.jsonl"))
    assert as_lists(RunDir(tmp_path).metrics()) == careful
    quick = metrics._rows_of_numbers(content)
    assert quick is None or as_lists(quick) == careful
    if not odd or ("None" not in repr(odd) and set(odd) <= {"x", "y"}):
        assert quick is not None, "numbers alone are read quickly"


def test_the_cache_follows_its_file(tmp_path: Path) -> None:
    def write(*values: float) -> None:
        writer = store.LineWriter(tmp_path / "metrics.jsonl")
        for value in values:
            writer.write(
                {"step": round(value), "attempt": 1, "x": value, **({"y": 1.0} if value > 1 else {})}
            )
        writer.close()

    write(1, 2)
    RunDir(tmp_path).metrics()
    assert not (tmp_path / layout.METRICS_CACHE).exists(), "the run goes on"
    (tmp_path / "result.json").write_text("{}")
    first = as_lists(RunDir(tmp_path).metrics())
    assert (tmp_path / layout.METRICS_CACHE).exists() and as_lists(RunDir(tmp_path).metrics()) == first
    write(3)
    assert as_lists(RunDir(tmp_path).metrics())["x"][0] == [1, 2, 3]
    (tmp_path / layout.METRICS_CACHE).write_bytes(b"torn")
    assert as_lists(RunDir(tmp_path).metrics())["y"][0] == [2, 3]


def finished_run(folder: Path) -> bytes:
    """A run whose metrics are cached; returns what the cache is."""
    writer = store.LineWriter(folder / "metrics.jsonl")
    for step in range(1, 30):
        writer.write(
            {"step": step, "attempt": 1, "x": step / 7, "x\0": 1.0} | ({"y": 2.0} if step % 2 else {})
        )
    writer.close()
    (folder / "result.json").write_text("{}")
    assert as_lists(RunDir(folder).metrics()) == as_lists(RunDir(folder).metrics())
    return (folder / layout.METRICS_CACHE).read_bytes()


def test_a_cache_that_was_altered_is_not_trusted(tmp_path: Path) -> None:
    content = finished_run(tmp_path)
    cache, true = tmp_path / layout.METRICS_CACHE, as_lists(RunDir(tmp_path).metrics())
    with np.load(io.BytesIO(content)) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays["values"] = arrays["values"] + 1.0
    np.savez(cache, allow_pickle=False, **arrays)
    with cache.open("ab") as file:
        file.write(content[-metrics.SEAL_BYTES :])
    assert as_lists(RunDir(tmp_path).metrics()) == true
    assert cache.read_bytes() == content, "it was written again"
    draw = random.Random(0)
    for damaged in [content[:end] for end in (0, 1, 31, 32, 33, len(content) // 2)] + [
        flipped(content, draw) for _ in range(200)
    ]:
        cache.write_bytes(damaged)
        assert as_lists(RunDir(tmp_path).metrics()) == true


def test_lines_that_were_altered_are_read_again_whatever_their_size_and_time(tmp_path: Path) -> None:
    finished_run(tmp_path)
    lines = tmp_path / "metrics.jsonl"
    state = lines.stat()
    lines.write_text(lines.read_text().replace('"y": 2.0', '"y": 3.0'))
    os.utime(lines, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert lines.stat().st_size == state.st_size
    assert RunDir(tmp_path).metrics()["y"].at(1) == 3.0


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_many_large_runs_are_read_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "WORTH_A_PROCESS", 100)
    for index in range(4):
        (tmp_path / str(index)).mkdir()
        row = {"step": 1, "x": float(index)}
        (tmp_path / str(index) / "metrics.jsonl").write_text(json.dumps(row) + "\n" * (index != 3))
    directories = [RunDir(tmp_path / name) for name in ("2", "0", "gone", "3", "1")]
    found = [isinstance(one, dict) and as_lists(one).get("x") for one in store.metrics_of(directories)]
    assert found == [
        ([1], ["np.float64(2.0)"]),
        ([1], ["np.float64(0.0)"]),
        None,
        None,
        ([1], ["np.float64(1.0)"]),
    ]


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
    with pytest.raises(StoreError, match=r"validation\.jsonl, line 2: not a validation") as raised:
        RunDir(tmp_path).validations()
    assert len(str(raised.value).splitlines()) == 1
