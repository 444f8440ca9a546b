"""Completions that a run keeps: which, with what, once each after a resume; and two runs side by side."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import StoreError
from abrun.logs.completions import pair_samples
from abrun.runs import layout
from abrun.runs.lines import LineWriter, Sample, read_json_lines
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from abrun.trainer.loop import grpo
from abrun.trainer.loop.grpo import MAX_TEXT_LENGTH, _shorten
from tests.snapshot import Snapshot
from tests.trainer.loop.runs import group, train_here
from tests.written_runs import make_run, metric_values, run_config

__all__ = ["group"]

KEPT = ("keep_samples={prompts: 2}", "steps=4")


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "INTERVAL", 3)


def trained(folder: Path, weights: Path, *overrides: str) -> RunDir:
    directory = make_run(folder, run_config(*KEPT, *overrides), initial_weights=weights)
    train_here(directory)
    return RunDir(directory)


def test_a_run_keeps_the_first_completions_of_some_steps(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    run = trained(tmp_path / "run", warm_weights, "checkpoint.every=2")
    kept = run.samples()
    assert list(kept) == [1, 3] and all(len(of_step) == 2 for of_step in kept.values())
    for one in (sample for of_step in kept.values() for sample in of_step):
        left, right = one.prompt.rstrip("=").split("+")
        answer = str(int(left) + int(right))
        assert one.reward == float(not one.truncated and one.text.strip() == answer), one
        assert one.logprob_error is not None and 0 <= one.logprob_error < 1e-4
        assert one.num_tokens is not None and 1 <= one.num_tokens <= 6
    # the last checkpoint and what was kept after it are gone: a second attempt keeps them again, once
    (run.path / layout.RESULT).unlink()
    for folder in run.checkpoints.glob("step-000004*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    train_here(run.path)
    rows = read_json_lines(run.path / layout.SAMPLES)
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (3, 1), (3, 2)]
    assert run.samples() == kept


@pytest.mark.slow
def test_keeping_them_changes_no_number(tmp_path: Path, warm_weights: Path, group: None) -> None:
    run = trained(tmp_path / "run", warm_weights)
    without = trained(tmp_path / "without", warm_weights, "keep_samples=null")
    assert metric_values(run.path) == metric_values(without.path)
    assert not (without.path / layout.SAMPLES).exists()
    wrong = trained(tmp_path / "wrong", warm_weights, "injected_fault=labels_off_by_one")
    both = pair_samples(run.samples(), wrong.samples())
    assert [one.prompt for one in both[:2]] == [one.prompt for one in run.samples()[1]]
    assert all(one.left and one.right and one.left.text == one.right.text for one in both[:2])
    assert all(one.right and (one.right.logprob_error or 0) > 1 for one in both[:2])
    shown = CliRunner().invoke(
        app, ["completions", str(run.path), "--against", str(wrong.path), "--step", "1"]
    )
    assert shown.exit_code == 0 and "step 1: " in shown.output and "step 3" not in shown.output
    assert shown.output.count("log-prob error") == 4


def test_what_cannot_be_shown_is_said(tmp_path: Path, snapshot: Snapshot) -> None:
    run = RunDir(make_run(tmp_path / "run", run_config()))
    row = {"step": 1, "attempt": 1, "samples": [{"prompt": "1+1=", "text": 3}]}
    assert run.samples() == {}
    said = CliRunner().invoke(app, ["completions", str(run.path)])
    assert isinstance(said.exception, StoreError) and "kept: none" in str(said.exception)
    writer = LineWriter(run.path / layout.SAMPLES)
    writer.write(row)
    with pytest.raises(StoreError) as refusal:
        run.samples()
    snapshot(refusal.value)


def test_a_file_and_its_texts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a" * MAX_TEXT_LENGTH
    assert _shorten(text) == text
    assert len(_shorten(text + "b")) < MAX_TEXT_LENGTH + 10 and _shorten(text + "b").endswith("ab")
    run = RunDir(make_run(tmp_path / "run", run_config()))
    writer = begin_attempt(run)
    one = Sample(prompt="p", text="t", reward=1.0, logprob_error=0.0, num_tokens=1, truncated=False)
    monkeypatch.setattr("abrun.runs.lines.MAX_SAMPLES_BYTES", 200)
    for step in range(1, 9):
        writer.samples(step, [one])
    assert list(run.samples()) == [1, 2]
