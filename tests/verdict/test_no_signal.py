"""Runs that would have agreed whatever the treatment does are no match; and what an open claim says."""

import numpy as np

from abrun.reasons import Code
from abrun.recipe.claims import Primary
from abrun.verdict.claims import with_holm, with_statistics
from abrun.verdict.results import Claim, PrimaryResult
from tests.reasons import codes_of, reason_of
from tests.verdict.simulate import edit_rows

SMALL = {"seeds": [0, 1], "controls": {"aa_reruns": 0}}
CLAIM = {"primary": [{"metric": "train/reward", "margin": 0.02}]}


def set_everywhere(experiment_dir, **values):
    named = {key.replace("__", "/"): value for key, value in values.items()}
    for arm in ("baseline", "treatment"):
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(directory, lambda row: row.update(named))


def verdict_of(comparison):
    (primary,) = comparison.arms[0].primaries
    return comparison.verdict, comparison.exit_code, primary.result


NO_MATCH = ("INCONCLUSIVE", 4, "not tested")


def problem_of(comparison):
    """Why the claim of a comparison without a verdict was not tested."""
    assert verdict_of(comparison) == NO_MATCH
    problem = comparison.arms[0].primaries[0].problem
    assert reason_of(comparison, Code.CLAIM_NOT_TESTED)["problem"] == problem
    return problem


def test_runs_that_learned_nothing_propose_no_claim(simulated, judged, snapshot):
    experiment_dir = simulated(**SMALL, compare={"primary": []})
    set_everywhere(experiment_dir, train__reward=0.0, train__grad_norm=0.0, train__loss=0.0)
    (step,) = judged(experiment_dir).next_steps
    snapshot(step.text)
    assert "--set steps=80" in step.command


def test_gradients_that_are_no_numbers_are_no_match(simulated, judged):
    experiment_dir = simulated(**SMALL)
    set_everywhere(experiment_dir, train__grad_norm="NaN", train__loss="NaN")
    problem = problem_of(judged(experiment_dir))
    assert problem == Code.NOTHING_LEARNED(metric="train/grad_norm", arm="baseline", finite=False)


def test_a_treatment_without_gradients_is_no_match(simulated, judged):
    experiment_dir = simulated(**SMALL, compare={**CLAIM, "step_one": False})
    for directory in (experiment_dir / "treatment").iterdir():
        edit_rows(directory, lambda row: row.update({"train/grad_norm": 0.0}))
    problem = problem_of(judged(experiment_dir))
    assert problem == Code.NOTHING_LEARNED(metric="train/grad_norm", arm="treatment", finite=True)


def test_treated_runs_that_are_the_baselines_under_other_seeds_are_no_match(simulated, judged):
    experiment_dir = simulated(
        seeds=[0, 1, 2], controls={"aa_reruns": 0}, compare={**CLAIM, "step_one": False}
    )
    for seed in range(3):
        rows = (experiment_dir / f"baseline/seed-{seed}/metrics.jsonl").read_text()
        copied = experiment_dir / f"treatment/seed-{(seed + 1) % 3}"
        (copied / "metrics.jsonl").write_text(rows)
        edit_rows(copied, lambda row: row.update({"timing/train/total_step_time_s": 1.0 + row["step"] / 100}))
    problem = problem_of(judged(experiment_dir))
    assert problem.code == Code.ONE_RUN_AS_TWO_SEEDS
    assert (problem["run"], problem["other"]) == ("treatment/seed-1", "baseline/seed-0")


def test_memory_that_never_moves_can_be_equivalent(simulated, judged):
    experiment_dir = simulated(**SMALL)
    set_everywhere(experiment_dir, memory__logprobs__peak_allocated_bytes=2**30)
    claim = Primary(metric="memory/logprobs/peak_allocated_bytes", margin=0.05)
    assert verdict_of(judged(experiment_dir, primaries=[claim])) == ("MATCH", 0, "equivalent")


def test_a_metric_that_rose_to_its_ceiling_in_both_arms_is_a_match(simulated, judged):
    experiment_dir = simulated(**SMALL)
    for arm in ("baseline", "treatment"):
        for directory in (experiment_dir / arm).iterdir():
            slower = 20 + int(directory.name.split("-")[1]) / 10
            edit_rows(
                directory, lambda row, n=slower: row.update({"train/reward": min(row["step"] / n, 1.0)})
            )
    assert verdict_of(judged(experiment_dir)) == ("MATCH", 0, "equivalent")


def test_a_metric_that_follows_from_the_recipe_certifies_nothing(simulated, judged):
    experiment_dir = simulated(**SMALL)
    for arm in ("baseline", "treatment"):
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(directory, lambda row: row.update({"train/lr": row["step"] * 1e-7}))
    comparison = judged(experiment_dir, primaries=[Primary(metric="train/lr", margin=1e-3)])
    assert problem_of(comparison) == Code.FOLLOWS_FROM_CONFIG()


def test_a_dead_run_with_a_claim_on_its_gradients_gets_a_verdict(simulated, judged):
    experiment_dir = simulated(**SMALL)
    set_everywhere(experiment_dir, train__grad_norm=0.0)
    claim = Primary(metric="train/grad_norm", margin=0.1)
    comparison = judged(experiment_dir, primaries=[claim], formats=("json", "markdown", "html", "png"))
    assert Code.NOTHING_LEARNED in codes_of(comparison) and verdict_of(comparison) == NO_MATCH


# --- what an undecided claim says ---


def undecided(differences, margin=0.02):
    claim = Claim(
        metric="train/reward",
        window="all",
        steps=(1, 40),
        num_steps=40,
        transform="identity",
        reduction="mean",
        test="paired TOST",
        margin=margin,
        margin_unit="",
        margin_number=margin,
        margin_text=f"±{margin:g}",
        alpha=0.05,
        alpha_difference=0.04,
        num_pairs=len(differences),
        seeds=tuple(range(len(differences))),
    )
    baseline = [0.5 + 0.1 * seed for seed in range(len(differences))]
    treatment = [one + difference for one, difference in zip(baseline, differences, strict=True)]
    (result,) = with_holm(
        [
            with_statistics(
                PrimaryResult(arm="treatment", claim=claim), np.array(baseline), np.array(treatment)
            )
        ]
    )
    assert result.result == "undecided"
    return result
