"""Validation paired by prompt: what the section says, against tables of answers with a known truth."""

import json

import numpy as np
import pytest

from abrun.reasons import Code
from abrun.recipe.claims import Compare, Primary
from abrun.recorded.stored import load_experiment
from abrun.report.context import context
from abrun.report.page import render_page
from abrun.report.planning import plan_report
from tests.report.test_planning import shown
from tests.verdict.simulate import edit, edit_rows

STEPS = (10, 20, 30, 40)
NUM_PROMPTS = 64
CLAIM = {"metric": "validation/accuracy", "window": "steps 30-40", "margin": 0.05}
RECIPE = {
    "seeds": [0, 1, 2, 3, 4],
    "validation": {"every": 10, "num_prompts": NUM_PROMPTS},
    "compare": {"primary": [CLAIM]},
}


def validated(
    experiment_dir, *, run_spread=0.0, prompts=lambda seed: "one set", arms=("baseline", "treatment")
):
    """Give every run answers of 0 or 1, which get better; `run_spread`: sd over runs of their chance."""
    for arm in arms:
        for directory in sorted((experiment_dir / arm).glob("seed-*")):
            rng = np.random.default_rng([len(arm), *directory.name.encode()])
            own, easy = run_spread * rng.standard_normal(), np.random.default_rng(9).random(NUM_PROMPTS)
            rows = []
            for step in STEPS:
                chances = np.clip(0.1 + 0.5 * easy + step / 100 + own, 0, 1)
                rewards = (rng.random(NUM_PROMPTS) < chances).astype(float).tolist()
                sha = prompts(directory.name)
                row = {"step": step, "attempt": 1, "prompts_sha256": sha, "rewards": rewards}
                rows.append({**row, "lengths": [3.0] * NUM_PROMPTS})
            (directory / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            means = {row["step"]: float(np.mean(row["rewards"])) for row in rows}
            edit_rows(
                directory,
                lambda row, means=means: row.update(
                    {"validation/accuracy": means[row["step"]]} if row["step"] in means else {}
                ),
            )


def page_of(experiment_dir, comparison):
    experiment, content = load_experiment(experiment_dir), comparison.content
    return render_page(experiment, content, context(experiment, content, None))


def test_the_table_of_answers_is_that_of_the_claim(simulated, judged):
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir)
    content = judged(experiment_dir).content
    (found,), claim = content.by_prompt, content.primaries[0]
    assert found.metric == "validation/accuracy" and found.window == claim.claim.steps == (30, 40)
    assert [one.difference for one in found.pairs] == pytest.approx(claim.estimate.differences)
    assert found.interval == pytest.approx(claim.estimate.ci90)
    assert found.parts and found.parts.sd_pairs == pytest.approx(claim.estimate.sd_difference)
    assert found.pairs_needed == claim.power.pairs_needed
    answers = {
        arm: np.array(
            [
                json.loads(
                    (experiment_dir / f"{arm}/seed-{seed}/validation.jsonl").read_text().splitlines()[-1]
                )["rewards"]
                for seed in range(5)
            ]
        )
        for arm in ("baseline", "treatment")
    }
    last = found.by_step[-1]
    assert [one.step for one in found.by_step] == list(STEPS)
    assert last.num_won == np.sum(answers["treatment"] > answers["baseline"])
    assert last.num_lost == np.sum(answers["treatment"] < answers["baseline"])
    assert (last.treatment, last.num_answers) == (pytest.approx(answers["treatment"].mean()), 5 * NUM_PROMPTS)


def test_noise_of_few_prompts_is_told_from_spread_of_seeds(simulated, judged):
    """Two experiments, which differ in what their runs differ in."""
    shares = []
    for spread in (0.0, 0.3):
        experiment_dir = simulated(name=f"spread-{spread}", **RECIPE)
        validated(experiment_dir, run_spread=spread)
        (found,) = judged(experiment_dir).content.by_prompt
        assert found.parts and found.worth_pairs
        shares.append(found.parts.noise_share)
        n, share = found.parts.num_pairs, found.parts.noise_share
        narrower = (found.parts.sd_pairs / found.sd_with_twice_the_prompts) ** 2
        assert (
            found.worth_pairs[0]
            == pytest.approx(n * (narrower - 1))
            == pytest.approx(n * share / (2 - share))
        )
        assert found.effective_pairs and found.effective_pairs > 0.8 * n
    assert shares[0] > 0.3 and shares[1] < 0.1


def test_an_open_claim_says_what_more_prompts_would_spare(simulated, judged, snapshot):
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir)
    comparison = judged(experiment_dir)
    (found,) = comparison.content.by_prompt
    assert comparison.verdict == "INCONCLUSIVE"
    assert found.pairs_needed_with_twice and found.pairs_needed
    assert found.pairs_needed_with_twice < found.pairs_needed
    said = [step.command for step in comparison.next_steps]
    assert said[1].endswith(
        f" --seeds 5-{4 + found.pairs_needed_with_twice} --name simulated-fresh "
        "--set validation.num_prompts=128"
    )
    report = (experiment_dir / "report" / "report.md").read_text()
    (line,) = [line for line in report.splitlines() if "**validation by prompt**" in line]
    snapshot(line)
    assert "twice the prompts" in page_of(experiment_dir, comparison)
    plan = shown(
        plan_report("next", Compare(primary=[Primary(**CLAIM)]), 5, earlier=load_experiment(experiment_dir))
    )
    assert "treatment: " in plan and "twice the prompts" in plan.replace("\n", " ")


def test_no_verdict_hangs_on_it(simulated, judged):
    """The same curves with and without answers: everything but the section is the same."""
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir)
    with_answers = judged(experiment_dir).as_json()
    for path in experiment_dir.glob("*/seed-*/validation.jsonl"):
        path.unlink()
    without = judged(experiment_dir).as_json()
    assert with_answers.pop("by_prompt") and without.pop("by_prompt") == []
    assert with_answers == without


def test_one_pair_is_two_models_and_no_change(simulated, judged, snapshot):
    experiment_dir = simulated(**{**RECIPE, "seeds": [0], "compare": {}})
    validated(experiment_dir)
    comparison = judged(experiment_dir)
    (found,) = comparison.content.by_prompt
    assert found.parts is None and found.interval is None and len(found.pairs) == 1
    low, high = found.pairs[0].interval
    assert low < found.pairs[0].difference < high
    text = (experiment_dir / "report" / "report.md").read_text()
    (line,) = [line for line in text.splitlines() if "**validation by prompt**" in line]
    snapshot(line)
    assert comparison.verdict == "INCONCLUSIVE"


def test_other_prompts_and_torn_files_are_said(simulated, judged):
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir, prompts=lambda seed: seed)
    (found,) = judged(experiment_dir).content.by_prompt
    assert found.problem == Code.PROMPTS_OF_RUNS_DIFFER()
    path = experiment_dir / "treatment/seed-1/validation.jsonl"
    path.write_text(path.read_text().replace('"rewards"', '"rewords"'))
    (found,) = judged(experiment_dir).content.by_prompt
    assert found.problem.code is Code.VALIDATION_UNREADABLE
    assert "not a validation (KeyError: 'rewards')" in found.problem["problem"]


def test_a_step_of_the_window_that_one_run_lacks_is_said(simulated, judged):
    """Else the table would be of fewer steps than the claim."""
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir)
    path = experiment_dir / "treatment/seed-1/validation.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join(others))  # before the window
    assert judged(experiment_dir).content.by_prompt[0].problem is None
    path.write_text("".join([first, *others[:-1]]))
    (found,) = judged(experiment_dir).content.by_prompt
    assert found.problem == Code.PROMPTS_OF_RUNS_DIFFER()


def test_rewards_that_are_no_accuracy_are_not_called_one(simulated, judged):
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir)
    edit_rows(
        experiment_dir / "baseline/seed-3",
        lambda row: row.update({"validation/accuracy": 0.5} if row["step"] == 40 else {}),
    )
    (found,) = judged(experiment_dir).content.by_prompt
    assert found.metric == "reward of held-out examples" and found.window == (40, 40)


def test_runs_that_did_not_finish_are_left_out(simulated, judged):
    experiment_dir = simulated(**RECIPE)
    validated(experiment_dir)
    (experiment_dir / "treatment/seed-4/result.json").unlink()
    edit(experiment_dir / "treatment/seed-4/attempts/0001.json", lambda one: one.update(status="interrupted"))
    (found,) = judged(experiment_dir).content.by_prompt
    assert [one.seed for one in found.pairs] == [0, 1, 2, 3]
