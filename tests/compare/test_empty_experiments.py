"""Experiments that could not have shown anything: none is a match, and each says why and what to do."""

import json

import numpy as np
import pytest

from abrun.compare.judge.assay import climb_bound
from tests.compare.simulate import edit_rows, fail

STEP_TIME = "timing/train/total_step_time_s"


def everywhere(experiment_dir, change, arms=("baseline", "treatment")):
    for arm in arms:
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(directory, change)


def no_signal(directory):
    everywhere(directory, lambda row: row.update({"train/signal_share": 0.0}))


def no_advantages(directory):
    nothing = {"train/advantages/min": 0.0, "train/advantages/max": 0.0, "train/loss": 0.0}
    everywhere(directory, lambda row: row.update(nothing))


def no_gradient(directory):
    everywhere(directory, lambda row: row.update({"train/grad_norm": 0.0}))


def no_learning_rate(directory):
    everywhere(directory, lambda row: row.update({"train/lr": 0.0}))


def constant(directory):
    everywhere(directory, lambda row: row.update({"train/reward": 0.25}))


def saturated(directory):
    everywhere(
        directory, lambda row: row.update({"train/reward": min(1.0, 0.985 + 0.02 * row["train/reward"])})
    )


def dead(directory):
    """Both arms move, and neither climbs."""

    def flat(row):
        row["train/reward"] -= 0.5 / (1 + 2.718281828 ** (-(row["step"] - 11) / 5))

    everywhere(directory, flat)


def not_applied(directory):
    for seed in range(5):
        rows = (directory / f"baseline/seed-{seed}/metrics.jsonl").read_text()
        (directory / f"treatment/seed-{seed}/metrics.jsonl").write_text(rows)
        edit_rows(directory / f"treatment/seed-{seed}", lambda row: row.update({STEP_TIME: row["step"] / 9}))


def copied_seeds(directory):
    for arm, pace in (("baseline", 7), ("treatment", 9)):
        rows = (directory / f"{arm}/seed-1/metrics.jsonl").read_text()
        (directory / f"{arm}/seed-2/metrics.jsonl").write_text(rows)
        edit_rows(
            directory / f"{arm}/seed-2",
            lambda row, pace=pace: row.update(
                {STEP_TIME: row["step"] / pace, "train/loss": row["train/loss"]}
            ),
        )


def repeated_seed(directory):
    """A seed that changes nothing, on a machine that rounds differently each time."""
    for arm in ("baseline", "treatment"):
        rewards = iter(
            [json.loads(row) for row in (directory / f"{arm}/seed-1/metrics.jsonl").read_text().splitlines()]
        )
        edit_rows(
            directory / f"{arm}/seed-2",
            lambda row, rewards=rewards: row.update(
                {"train/reward": next(rewards)["train/reward"] * (1 + 1e-12 * row["step"])}
            ),
        )


def copied_run(directory):
    rows = (directory / "baseline/seed-2/metrics.jsonl").read_text()
    (directory / "treatment/seed-2/metrics.jsonl").write_text(rows)


def truncated(directory):
    """Every run ends at step 30 of 40 and says that it finished."""
    for path in directory.glob("*/*/metrics.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:30]))


def unfinished(directory):
    fail(directory / "baseline/seed-1", after_steps=10)


@pytest.mark.parametrize(
    ("empty", "verdict", "reason"),
    [
        (no_signal, "INCONCLUSIVE", "train/signal_share is 0 at every step of every baseline run"),
        (no_advantages, "INCONCLUSIVE", "all advantages are 0 at every step of every baseline run"),
        (no_gradient, "INCONCLUSIVE", "train/grad_norm is 0 at every step of every baseline run"),
        (no_learning_rate, "INCONCLUSIVE", "train/lr is 0 at every step of every baseline run"),
        (constant, "INCONCLUSIVE", "it is 0.25 at every step of every run of both arms"),
        (saturated, "INCONCLUSIVE", "not shown to climb by more than the margin of 0.02"),
        (dead, "INCONCLUSIVE", "not shown to climb by more than the margin of 0.02"),
        (not_applied, "INCONCLUSIVE", "it was not applied"),
        (copied_seeds, "INCONCLUSIVE", "baseline/seed-2 holds the numbers of baseline/seed-1 at every step"),
        (repeated_seed, "INCONCLUSIVE", "baseline/seed-2 holds the train/reward of baseline/seed-1"),
        (copied_run, "INVALID", "treatment/seed-2 is a copy of baseline/seed-2"),
        (truncated, "INCONCLUSIVE", "recorded its last step at 30 of 40 configured ones"),
        (unfinished, "INVALID", "baseline/seed-1 failed"),
    ],
)
def test_an_empty_experiment_is_no_match(simulated, judged, empty, verdict, reason):
    experiment_dir = simulated(controls={"aa_reruns": 0})
    empty(experiment_dir)
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == verdict
    assert any(reason in said for said in content.reasons)


def test_where_nothing_need_climb_a_flat_metric_can_match(simulated, judged):
    claim = {"metric": "train/reward", "margin": 0.02, "climbs": False}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"primary": [claim]})
    dead(experiment_dir)
    (arm,) = judged(experiment_dir, formats=("json",)).arms
    assert arm.verdict == "MATCH"
    assert any(one.startswith("whether the baseline learned anything") for one in arm.not_tested)


def test_a_claim_on_what_has_no_direction_needs_a_baseline_that_learns_something(simulated, judged):
    claim = {"metric": "train/grad_norm", "margin": 1.0}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"primary": [claim]})
    assert judged(experiment_dir, formats=("json",)).verdict == "MATCH"
    dead(experiment_dir)
    everywhere(
        experiment_dir, lambda row: row.update({"train/reward": row["train/reward"] - row["step"] / 100})
    )
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == "INCONCLUSIVE"
    assert "no climb of the baseline is shown up to step 40 (train/reward" in content.reasons[0]


@pytest.mark.parametrize(
    ("empty", "metric", "reason"),
    [
        (lambda row: row.update({"train/entropy": 1.0}), "train/entropy", "it is 1 at every step"),
        (lambda row: row.update({"train/lr": 1e-3}), "train/lr", "it follows from configuration and seed"),
        (lambda row: row.update({"train/grad_norm": 0.0}), "train/entropy", "train/grad_norm is 0"),
    ],
)
def test_what_nothing_moves_is_not_exact(simulated, judged, empty, metric, reason):
    claim = {"metric": metric, "exact": True}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"primary": [claim]})
    everywhere(experiment_dir, empty)
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == "INCONCLUSIVE" and reason in content.reasons[0]


def test_a_baseline_without_spread_has_no_sigma(simulated, judged):
    """The seeds differ on the way and end alike."""
    claim = {"metric": "train/reward", "margin": "1.5 sigma"}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"primary": [claim]})
    everywhere(
        experiment_dir,
        lambda row: row.update({"train/reward": 0.9} if row["step"] > 30 else {}),
        ["baseline"],
    )
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == "INCONCLUSIVE" and "no spread over seeds" in content.reasons[0]


def test_many_flat_metrics_do_not_make_one_that_climbs():
    """Of ten flat ones, one is shown to climb at 5 % in 40 % of all experiments: together they err at 5 %."""
    draws = np.random.default_rng(0).standard_normal((1000, 10, 5))
    shown = [any(climb_bound(values, 10) > 0 for values in experiment) for experiment in draws]
    assert np.mean(shown) == pytest.approx(0.05, abs=0.02)
