"""The price of a verdict: what two launches share, what they cost, and a launch that the limit stops."""

import json
import re
import sys
from pathlib import Path

import pytest

from abrun.runs.layout import RunName
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from tests.bench import bench_starts, bench_verdict_cost
from tests.bench.common import make_model
from tests.bench.launches import REPOSITORY, first_and_later, first_difference

FOREIGN = Path(__file__).parents[1] / "external" / "foreign.yaml"
SCRIPT = FOREIGN.with_name("foreign_trainer.py")


def make_run(path: Path, rows: list[dict[str, float]]) -> Path:
    run = RunDir(path)
    run.write_record(
        RunRecord(experiment="x", name=RunName(arm="baseline", seed=0), initial_weights=None, config={})
    )
    writer = run.begin_attempt()
    for step, row in enumerate(rows, 1):
        writer.metrics(step, row)
    writer.finish(len(rows))
    return path


def test_metrics_differ_by_the_last_bit_of_a_value_but_not_by_time_or_memory(tmp_path: Path) -> None:
    row = {"train/reward": 0.1, "timing/train/total_step_time_s": 1.0, "memory/train/peak_allocated_bytes": 1}
    run = make_run(tmp_path / "run", [row, row])
    slower = {**row, "timing/train/total_step_time_s": 2.0, "memory/train/peak_allocated_bytes": 2}
    assert first_difference(run, make_run(tmp_path / "slower", [slower, slower])) is None
    other_bit = {**row, "train/reward": 0.1 + 2**-56}
    text = "step 2, train/reward: 0.1 and 0.10000000000000002"
    assert first_difference(run, make_run(tmp_path / "other-bit", [row, other_bit])) == text
    extra = {**row, "train/loss": 1.0}
    text = "step 1, train/loss: null and 1.0"
    assert first_difference(run, make_run(tmp_path / "extra", [extra, row])) == text
    text = "step 2, train/reward: 0.1 and null"
    assert first_difference(run, make_run(tmp_path / "shorter", [row])) == text


def test_seconds_are_those_of_the_first_run_and_the_median_of_the_later_ones() -> None:
    assert first_and_later([30.04, 4.0, 9.0, 5.0]) == "30.0, 5.0"
    assert first_and_later([30.0]) == "30.0" and first_and_later([]) == "-"
    assert first_and_later([30.0, None, 2.0]) == "30.0, 2.0"


def bench(work: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    options = [
        "--gpus",
        "0",
        "--jobs",
        "3",
        "--recipe",
        str(FOREIGN),
        "--work",
        str(work),
        "--steps",
        "4",
        "--seeds",
        "0-1",
    ]
    options += ["--set", f"trainer.parameters.script={SCRIPT}", *arguments]
    monkeypatch.setattr(sys, "argv", ["bench_verdict_cost", *options])
    bench_verdict_cost.main()


@pytest.mark.slow
def test_an_experiment_launched_both_ways_has_one_verdict_and_equal_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, monkeypatch, "--only", "before")
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()][2:] == ["before"]
    bench(tmp_path, monkeypatch)
    *_, before, now, result = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (before, now)]
    assert [row[0] for row in cells] == ["before", "now"] and cells[0][6] == cells[1][6] == "4 of 4"
    assert float(cells[0][3]) == pytest.approx(float(cells[0][2]) / 3600, abs=2e-3)
    assert float(cells[1][3]) == pytest.approx(3 * float(cells[1][2]) / 3600, abs=2e-3)
    assert re.fullmatch(
        r"before / now: [\d.]+ times the wall time; verdict identical; metrics of 4 of 4 runs are equal bit "
        "for bit",
        result,
    )
    # Other arguments need another folder
    with pytest.raises(SystemExit, match="holds before with other arguments"):
        bench(tmp_path, monkeypatch, "--seeds", "0")


@pytest.mark.slow
def test_a_launch_that_the_limit_stops_goes_on_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ("--set", "trainer.parameters.step_s=0.5", "--only", "before")
    bench(tmp_path, monkeypatch, *slow, "--limit", "6")
    record = json.loads((tmp_path / "before" / "seconds.json").read_text())
    assert not record["is_complete"] and len(record["wall_s"]) == 1
    bench(tmp_path, monkeypatch, *slow, "--limit", "600")
    record = json.loads((tmp_path / "before" / "seconds.json").read_text())
    assert record["is_complete"] and len(record["wall_s"]) == 2
    assert "| 4 of 4 |" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_a_launch_that_fails_ends_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"before: abrun launch ended with exit code 1:\n"):
        bench(tmp_path, monkeypatch, "--set", "trainer.parameters.script=/missing.py")


@pytest.mark.slow
def test_the_runs_of_one_experiment_are_rows_with_their_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset, vocab_size, *_ = bench_starts.SHAPES["cpu"]
    make_model(preset, tmp_path / "model", "cpu", vocab_size=vocab_size)
    bench_starts.measure_engines("cpu", tmp_path, 3, REPOSITORY)
    rows = [line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    names, *seconds = zip(*rows, strict=True)
    assert [name.strip() for name in names] == [
        "baseline/seed-0",
        "treatment/seed-0",
        "baseline/seed-0-aa1",
    ]
    for first_step_s, later_step_s, run_s in zip(*seconds, strict=True):
        assert 0 < float(later_step_s) < float(first_step_s) < float(run_s)
