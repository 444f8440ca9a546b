"""From files to arrays: what was recorded, and what was not."""

import math
import shutil

import pytest

from abrun.errors import StoreError
from abrun.messages import sentence
from abrun.reasons import Code
from abrun.recorded.experiment import stack
from abrun.recorded.stored import load_experiment
from abrun.runs.layout import RunName
from tests.reasons import only
from tests.verdict.simulate import edit, edit_rows, write, write_rows

BASELINE = RunName(arm="baseline", seed=0)


def test_nan_is_a_value_and_absence_is_not(simulated):
    experiment_dir = simulated()

    def change(row):
        if row["step"] == 3:
            row["train/entropy"] = "NaN"
        if row["step"] == 4:
            del row["train/entropy"]
        if row["step"] == 5:
            row["train/entropy"] = None

    edit_rows(experiment_dir / "baseline/seed-0", change)
    series = load_experiment(experiment_dir).runs[BASELINE].series("train/entropy")
    assert math.isnan(series.at(3) or 0.0)
    assert series.at(4) is None and series.at(5) is None and len(series) == 38


def test_a_deleted_run_is_said_in_one_line(simulated, judged, snapshot):
    """Its absence is no configuration that all others differ from."""
    experiment_dir = simulated()
    shutil.rmtree(experiment_dir / "baseline/seed-0")
    (reason,) = judged(experiment_dir).content.reasons
    assert reason == Code.RUN_NOT_FINISHED(run="baseline/seed-0", status="missing")
    snapshot(sentence(reason))


@pytest.mark.parametrize(
    ("attempt", "failure"),
    [
        ({"message": "out of memory", "exit_code": 2}, "exit code 2: out of memory"),
        (
            {
                "message": "exit code 7",
                "message_code": {"code": "exit_code", "values": {"exit_code": 7, "last_line": None}},
                "exit_code": 7,
            },
            "exit code 7",
        ),
        ({"message": "not started: no reason"}, "not started: no reason"),
        ({"exit_code": 7}, "exit code 7"),
        ({}, "no exit code"),
    ],
)
def test_how_a_run_failed_is_said_once(simulated, attempt, failure):
    experiment_dir = simulated()
    (experiment_dir / "baseline/seed-0/result.json").unlink()
    write(experiment_dir / "baseline/seed-0/attempts/0001.json", {"status": "failed", **attempt})
    assert load_experiment(experiment_dir).runs[BASELINE].failure == failure


def test_the_last_attempt_wins(simulated):
    experiment_dir = simulated()
    rows = [{"step": 1, "attempt": 1, "x": "NaN"}, {"step": 2, "attempt": 1, "x": 2.0}]
    rows += [{"step": 1, "attempt": 2, "x": 7.0}, {"step": 2, "attempt": 2}]
    write_rows(experiment_dir / "baseline/seed-0", rows)
    series = load_experiment(experiment_dir).runs[BASELINE].series("x")
    assert (series.steps.tolist(), series.values.tolist()) == ([1], [7.0])


def test_only_shared_steps_are_stacked(simulated):
    experiment_dir = simulated()
    write_rows(experiment_dir / "baseline/seed-0", [{"step": s, "x": 1.0 * s} for s in (1, 2, 4)])
    write_rows(experiment_dir / "baseline/seed-1", [{"step": s, "x": 10.0 * s} for s in (2, 3, 4)])
    runs = load_experiment(experiment_dir).runs
    steps, values = stack([runs[BASELINE], runs[RunName(arm="baseline", seed=1)]], "x")
    assert steps.tolist() == [2, 4] and values.tolist() == [[2, 4], [20, 40]]


def test_text_in_place_of_a_number_is_refused(simulated):
    experiment_dir = simulated()
    edit_rows(experiment_dir / "baseline/seed-0", lambda row: row.update({"train/entropy": "high"}))
    run = load_experiment(experiment_dir).runs[BASELINE]
    assert run.status == "unreadable" and "got 'high'" in run.failure


def test_a_corrupt_line_is_refused_with_its_number(simulated, judged):
    path = simulated() / "treatment/seed-1/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], '{"step": 5, "tr\n', *lines[5:]]))
    comparison = judged(path.parents[2])
    reason = only(comparison.content.reasons, Code.RUN_UNREADABLE)
    assert comparison.verdict == "INVALID" and reason["run"] == "treatment/seed-1"
    assert "seed-1/metrics.jsonl, line 5: got" in reason["problem"]


@pytest.mark.parametrize("key", ["recipe", "runs", "compare_sha256"])
def test_an_experiment_file_lacking_a_key_is_refused(simulated, judged, key):
    experiment_dir = simulated()
    edit(experiment_dir / "experiment.json", lambda content: content.pop(key))
    with pytest.raises(StoreError, match=rf"experiment\.json: {key}: missing"):
        judged(experiment_dir)


def test_a_recipe_of_another_version_is_refused_in_one_line(simulated, judged, snapshot):
    experiment_dir = simulated()
    edit(experiment_dir / "experiment.json", lambda content: content["recipe"].update(novelty=1))
    with pytest.raises(StoreError, match="recipe: novelty: ") as caught:
        judged(experiment_dir)
    assert "\n" not in str(caught.value)
    snapshot(str(caught.value).rpartition("; ")[2])


def test_a_field_that_abrun_has_gained_since_is_no_difference(simulated, judged):
    experiment_dir = simulated()
    for seed in (0, 1):
        path = experiment_dir / f"treatment/seed-{seed}/config.json"
        edit(path, lambda content: content["config"]["policy"]["optimizer"].pop("schedule"))
    assert judged(experiment_dir).verdict == "MATCH"
    edit(path, lambda content: content["config"]["policy"]["optimizer"].update(schedule="cosine"))
    assert judged(experiment_dir).content.reasons[0] == Code.CONFIG_DIFFERS(
        run="treatment/seed-1",
        key="policy.optimizer.schedule",
        value="cosine",
        expected="constant",
        reference="baseline/seed-0",
    )
