"""MLPerf logs: axes, configuration, endings, and damaged lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.logs import Log, read_log, read_logs


def event(key: str, value: Any, time_ms: int = 0, **metadata: Any) -> str:
    content = {"namespace": "", "time_ms": time_ms, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**content, "metadata": {"file": "a.py", "lineno": 3, **metadata}})


START = [
    event("seed", 5722),
    event("global_batch_size", 16),
    event("submission_org", "x"),
    event("run_start", None, 4000),
]


def read(path: Path, *lines: str) -> Log:
    path.write_text("\n".join(["a banner", *START, *lines]) + "\n")
    (log,) = read_logs(str(path))
    return log


def values(log: Log, metric: str) -> dict[int, float]:
    series = log.metrics[metric]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_evaluations_are_placed_by_samples_with_their_time(tmp_path: Path) -> None:
    log = read(
        tmp_path / "result_0.txt",
        "0: " + event("train_loss", 2.0, 5000, samples_count=80, lr=1e-3),
        "0: " + event("eval_accuracy", 0.5, 9000, samples_count=160, epoch_num=1),
        event("tracked_stats", {"throughput": 3.5, "note": "x"}, samples_count=160),
        event("eval_accuracy", 0.7, 14000, samples_count=320, epoch_num=2),
        event("run_stop", 0.7, 15000, status="success", samples_count=320),
        event("train_samples", 320),
    )
    assert values(log, "eval_accuracy") == {160: 0.5, 320: 0.7}
    assert values(log, "timing/elapsed_s") == {160: 5.0, 320: 10.0}
    assert values(log, "train_loss") == {80: 2.0} and values(log, "tracked_stats/throughput") == {160: 3.5}
    assert "run_stop" not in log.metrics
    assert log.config == {"seed": 5722, "global_batch_size": 16}  # neither results nor the submitter
    assert (log.name, log.status) == ("result_0.txt", "finished")
    assert log.guesses == ("an MLPerf log: a step is 1 of its samples_count",)


def test_fractions_of_epochs_become_thousandths(tmp_path: Path) -> None:
    lines = [event("eval_accuracy", i / 10, epoch_num=0.05 * i) for i in (1, 2, 3)]
    log = read(tmp_path / "a.log", *lines, event("run_stop", None, status="aborted"))
    assert list(values(log, "eval_accuracy")) == [50, 100, 150]
    assert log.status == "finished"  # it ended by itself, without reaching its target
    whole = read(tmp_path / "a.log", event("eval_accuracy", 0.1, epoch_num=2))
    assert (list(values(whole, "eval_accuracy")), whole.status) == ([2], "unknown")


def test_a_folder_of_results_is_an_arm_with_seeds(tmp_path: Path) -> None:
    for index in (0, 1, 10):
        read(tmp_path / f"result_{index}.txt", event("eval_accuracy", 0.5, samples_count=8))
    (tmp_path / "notes.txt").write_text("no events here\n")
    assert [log.name for log in read_logs(f"mlperf:{tmp_path}")] == ["result_0", "result_1", "result_10"]


def test_damaged_lines_are_counted_and_bad_positions_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    log = read(path, event("eval_accuracy", 0.5, samples_count=8), ":::MLLOG {torn", ":::MLLOG [1]")
    assert log.notes == ("2 damaged MLLOG lines were left out",) and values(log, "eval_accuracy") == {8: 0.5}
    with pytest.raises(StoreError, match=r"a.txt, line 6: samples_count: got -8; allowed: 0 to"):
        read(path, event("eval_accuracy", 0.5, samples_count=-8))
    path.write_text("no events\n")
    assert read_log(path, "mlperf").notes == ("nothing is recorded in it yet",)
    with pytest.raises(StoreError, match="not a metrics file"):
        read_logs(str(path))
