"""From files to arrays: what was recorded, and what was not."""

import math

import pytest

from abrun.logs.recorded.experiment import stack_runs
from abrun.logs.recorded.stored import load_experiment
from abrun.messages.codes import Code
from abrun.runs.layout import RunName
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
    assert math.isnan(series.value_at(3) or 0.0)
    assert series.value_at(4) is None and series.value_at(5) is None and len(series) == 38


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


def test_only_shared_steps_are_stacked(simulated):
    experiment_dir = simulated()
    write_rows(experiment_dir / "baseline/seed-0", [{"step": s, "x": 1.0 * s} for s in (1, 2, 4)])
    write_rows(experiment_dir / "baseline/seed-1", [{"step": s, "x": 10.0 * s} for s in (2, 3, 4)])
    runs = load_experiment(experiment_dir).runs
    steps, values = stack_runs([runs[BASELINE], runs[RunName(arm="baseline", seed=1)]], "x")
    assert steps.tolist() == [2, 4] and values.tolist() == [[2, 4], [20, 40]]


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
