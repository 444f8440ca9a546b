"""From files to arrays: what was recorded, what was not, and which steps a window selects."""

import math

import numpy as np
import pytest

from abrun.compare.experiment import stack, window_bounds
from abrun.compare.stored import load_experiment
from abrun.errors import ComparisonError, StoreError
from abrun.plan import RunName
from tests.compare.simulate import edit, edit_rows, write_rows

GRID = np.arange(1, 101)
BASELINE = RunName(arm="baseline", seed=0)


@pytest.mark.parametrize(
    ("window", "bounds"),
    [
        ("all", (1, 100)),
        ("last 20%", (81, 100)),
        ("last 1%", (100, 100)),
        ("last 100%", (1, 100)),
        ("steps 10-50", (10, 50)),
        ("steps 100-100", (100, 100)),
    ],
)
def test_window_bounds(window, bounds):
    assert window_bounds(window, GRID, "m") == bounds


def test_a_share_of_few_steps_is_rounded_up():
    assert window_bounds("last 20%", np.arange(1, 8), "m") == (6, 7)
    assert window_bounds("last 1%", np.array([5]), "m") == (5, 5)


@pytest.mark.parametrize("window", ["steps 50-101", "steps 101-200"])
def test_a_window_beyond_the_runs_is_refused(window):
    with pytest.raises(ComparisonError, match=r"train/reward: window: got 'steps .*steps 1-100"):
        window_bounds(window, GRID, "train/reward")


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
    with pytest.raises(StoreError, match="line 1: train/entropy: got 'high'"):
        load_experiment(experiment_dir)


def test_a_corrupt_line_is_refused_with_its_number(simulated, judged):
    path = simulated() / "treatment/seed-1/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], '{"step": 5, "tr\n', *lines[5:]]))
    with pytest.raises(StoreError, match=r"seed-1/metrics\.jsonl, line 5: got"):
        judged(path.parents[2])


@pytest.mark.parametrize("key", ["recipe", "runs", "compare_sha256"])
def test_an_experiment_file_lacking_a_key_is_refused(simulated, judged, key):
    experiment_dir = simulated()
    edit(experiment_dir / "experiment.json", lambda content: content.pop(key))
    with pytest.raises(StoreError, match=rf"experiment\.json: {key}: missing"):
        judged(experiment_dir)


def test_a_recipe_of_another_version_is_refused_in_one_line(simulated, judged):
    experiment_dir = simulated()
    edit(experiment_dir / "experiment.json", lambda content: content["recipe"].update(novelty=1))
    with pytest.raises(StoreError, match=r"recipe: novelty: .* compare with the abrun") as caught:
        judged(experiment_dir)
    assert "\n" not in str(caught.value)
