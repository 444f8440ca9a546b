"""Experiments that could not have shown anything: none is a match, and each says why and what to do."""

import json
from dataclasses import replace

import numpy as np
import pytest

from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim
from abrun.verdict.decide import judge
from abrun.verdict.sensitivity import climb_lower_bound
from tests.reasons import only
from tests.verdict.simulate import edit_rows

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


def gradients_that_are_no_numbers(directory):
    everywhere(directory, lambda row: row.update({"train/grad_norm": "NaN", "train/loss": "NaN"}))


def no_learning_rate(directory):
    everywhere(directory, lambda row: row.update({"train/lr": 0.0}))


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


@pytest.mark.parametrize(
    ("empty", "verdict", "code", "values"),
    [
        (no_signal, "INCONCLUSIVE", Code.NOTHING_LEARNED, {"metric": "train/signal_share"}),
        (no_advantages, "INCONCLUSIVE", Code.ADVANTAGES_ZERO, {}),
        (no_gradient, "INCONCLUSIVE", Code.NOTHING_LEARNED, {"metric": "train/grad_norm"}),
        (gradients_that_are_no_numbers, "INCONCLUSIVE", Code.NOTHING_LEARNED, {"finite": False}),
        (no_learning_rate, "INCONCLUSIVE", Code.NOTHING_LEARNED, {"metric": "train/lr"}),
        (saturated, "INCONCLUSIVE", Code.CLIMB_NOT_SHOWN, {"margin": 0.02}),
        (dead, "INCONCLUSIVE", Code.CLIMB_NOT_SHOWN, {"margin": 0.02}),
        (not_applied, "INCONCLUSIVE", Code.ARMS_IDENTICAL, {}),
        (
            copied_seeds,
            "INCONCLUSIVE",
            Code.ONE_RUN_AS_TWO_SEEDS,
            {"run": "baseline/seed-2", "other": "baseline/seed-1"},
        ),
        (
            repeated_seed,
            "INCONCLUSIVE",
            Code.ONE_RUN_AS_TWO_SEEDS,
            {"run": "baseline/seed-2", "other": "baseline/seed-1", "metrics": ["train/reward"]},
        ),
        (
            copied_run,
            "INVALID",
            Code.RUN_COPIED,
            {"run": "treatment/seed-2", "original": "baseline/seed-2"},
        ),
        (truncated, "INCONCLUSIVE", Code.CUT_SHORT, {"step": 30, "configured": 40}),
    ],
)
def test_an_empty_experiment_is_no_match(simulated, judged, snapshot, empty, verdict, code, values):
    experiment_dir = simulated(controls={"aa_reruns": 0})
    empty(experiment_dir)
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == verdict
    problems = [reason.values.get("problem", reason) for reason in content.reasons]
    reason = only([problem for problem in problems if isinstance(problem, Reason)], code)
    assert {name: reason[name] for name in values} == values
    snapshot(sentence(reason))


def no_gradient_of_the_treatment(directory):
    everywhere(directory, lambda row: row.update({"train/grad_norm": 0.0}), ["treatment"])


def baselines_under_other_seeds(directory):
    for seed in range(3):
        rows = (directory / f"baseline/seed-{seed}/metrics.jsonl").read_text()
        treated = directory / f"treatment/seed-{(seed + 1) % 3}"
        (treated / "metrics.jsonl").write_text(rows)
        edit_rows(treated, lambda row: row.update({STEP_TIME: 1.0 + row["step"] / 100}))


@pytest.mark.parametrize(
    ("empty", "code", "values"),
    [
        (no_gradient_of_the_treatment, Code.NOTHING_LEARNED, {"arm": "treatment", "finite": True}),
        (
            baselines_under_other_seeds,
            Code.ONE_RUN_AS_TWO_SEEDS,
            {"run": "treatment/seed-1", "other": "baseline/seed-0"},
        ),
    ],
)
def test_an_empty_treatment_is_no_match_without_step_one(simulated, judged, empty, code, values):
    compare = {"claims": [{"metric": "train/reward", "margin": 0.02}], "step_one": False}
    experiment_dir = simulated(seeds=[0, 1, 2], controls={"aa_reruns": 0}, compare=compare)
    empty(experiment_dir)
    content = judged(experiment_dir, formats=("json",)).content
    problem = content.claims[0].problem
    assert (content.verdict, content.claims[0].result) == ("INCONCLUSIVE", "not tested")
    assert problem.code is code and {name: problem[name] for name in values} == values


def test_runs_that_learned_nothing_propose_no_claim(simulated, judged, snapshot):
    experiment_dir = simulated(seeds=[0, 1], controls={"aa_reruns": 0}, compare={"claims": []})
    nothing = {"train/reward": 0.0, "train/grad_norm": 0.0, "train/loss": 0.0}
    everywhere(experiment_dir, lambda row: row.update(nothing))
    (step,) = judged(experiment_dir, formats=("json",)).next_steps
    snapshot(step.text)
    assert "--set steps=80" in step.command


def still_memory(row):
    row["memory/logprobs/peak_allocated_bytes"] = 2**30


def to_the_ceiling(row):
    row["train/reward"] = min(1.2 * row["train/reward"], 1.0) if row["step"] < 30 else 1.0


@pytest.mark.parametrize(
    ("change", "metric"),
    [(still_memory, "memory/logprobs/peak_allocated_bytes"), (to_the_ceiling, "train/reward")],
)
def test_memory_and_a_reward_at_its_ceiling_need_not_move(simulated, judged, change, metric):
    experiment_dir = simulated(controls={"aa_reruns": 0})
    everywhere(experiment_dir, change)
    claims = [Claim(metric=metric, margin=0.05)]
    assert judged(experiment_dir, claims=claims, formats=("json",)).verdict == "MATCH"


def test_where_nothing_need_climb_a_flat_metric_can_match(simulated, judged):
    claim = {"metric": "train/reward", "margin": 0.02, "climbs": False}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"claims": [claim]})
    dead(experiment_dir)
    (arm,) = judged(experiment_dir, formats=("json",)).arms
    assert arm.verdict == "MATCH"
    assert Code.LEARNING_NOT_CHECKED(metrics=["train/reward"]) in arm.not_tested


def test_a_claim_on_what_has_no_direction_needs_a_baseline_that_learns_something(simulated, judged):
    claim = {"metric": "train/grad_norm", "margin": 1.0}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"claims": [claim]})
    assert judged(experiment_dir, formats=("json",)).verdict == "MATCH"
    dead(experiment_dir)
    everywhere(
        experiment_dir, lambda row: row.update({"train/reward": row["train/reward"] - row["step"] / 100})
    )
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == "INCONCLUSIVE"
    problem = content.reasons[0]["problem"]
    assert (problem.code, problem["step"]) == (Code.NOTHING_CLIMBED, 40)
    assert "train/reward" in problem["metrics"]


@pytest.mark.parametrize(
    ("empty", "metric", "code"),
    [
        (lambda row: row.update({"train/entropy": 1.0}), "train/entropy", Code.NEVER_MOVED),
        (lambda row: row.update({"train/lr": 1e-3}), "train/lr", Code.FOLLOWS_FROM_CONFIG),
        (lambda row: row.update({"train/grad_norm": 0.0}), "train/entropy", Code.NOTHING_LEARNED),
    ],
)
def test_what_nothing_moves_is_not_exact(simulated, judged, empty, metric, code):
    claim = {"metric": metric, "exact": True}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"claims": [claim]})
    everywhere(experiment_dir, empty)
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == "INCONCLUSIVE" and content.reasons[0]["problem"].code is code


def test_a_baseline_without_spread_has_no_sigma(simulated, judged):
    """The seeds differ on the way and end alike."""
    claim = {"metric": "train/reward", "margin": "1.5 sigma"}
    experiment_dir = simulated(controls={"aa_reruns": 0}, compare={"claims": [claim]})
    everywhere(
        experiment_dir,
        lambda row: row.update({"train/reward": 0.9} if row["step"] > 30 else {}),
        ["baseline"],
    )
    content = judged(experiment_dir, formats=("json",)).content
    assert content.verdict == "INCONCLUSIVE"
    assert content.reasons[0]["problem"] == Code.BASELINE_WITHOUT_SPREAD()


def test_many_flat_metrics_do_not_make_one_that_climbs():
    """Of ten flat ones, one is shown to climb at 5 % in 40 % of all experiments: together they err at 5 %."""
    draws = np.random.default_rng(0).standard_normal((1000, 10, 5))
    shown = [any(climb_lower_bound(values, 10) > 0 for values in experiment) for experiment in draws]
    assert np.mean(shown) == pytest.approx(0.05, abs=0.02)


def test_what_did_not_change_keeps_the_warnings_of_its_claim(simulated, judged):
    """The margin is a wide one whatever the arms did; without a declared treatment they may be equal."""
    experiment = load_experiment(simulated(controls={"aa_reruns": 0}))
    baselines = [run for run in experiment.runs.values() if run.name.arm == "baseline"]
    runs = [replace(run, name=replace(run.name, arm=arm)) for run in baselines for arm in experiment.arms]
    claim = experiment.compare.claims[0].model_copy(update={"margin": 0.2})
    unchanged = replace(experiment, runs={run.name: run for run in runs}, treatment_diff=None)
    (judged_arm,) = judge(unchanged, [claim])
    (result,) = judged_arm.claims
    codes = {warning.code for warning in result.warnings}
    assert result.problem is None and codes == {Code.ARMS_IDENTICAL, Code.MARGIN_WIDE_OF_CLIMB}
