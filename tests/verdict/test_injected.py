"""Controls with injected faults: judged as treatments are, and no part of the verdict."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from abrun.cli import app
from abrun.errors import RecipeError
from abrun.experiment.plan import group_pairs, make_plan
from abrun.launch.derived_recipes import make_sensitivity_recipe
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.experiment import Recipe
from abrun.recipe.faults import FAULTS as LIBRARY_OF_FAULTS
from abrun.report.injected import caught_sentence, count_caught, sensitivity_rows, sensitivity_summary
from abrun.verdict.injected import measure_sensitivity
from tests.snapshot import Snapshot
from tests.verdict.simulate import RECIPE, edit_rows

FAULTS: dict[str, Any] = {"aa_reruns": 1, "faults": ["misgrouped", {"name": "late_half_batch", "size": 0.25}]}
LATE = "fault-late_half_batch-0.25"


def recipe_with(**changes: Any) -> Recipe:
    return Recipe.model_validate({**RECIPE, **changes})


def test_the_plan_has_control_arms_after_all_pairs() -> None:
    plan = make_plan(recipe_with(controls={**FAULTS, "ulp_reruns": 6}))
    controls = [run for run in plan.runs if run.is_control]
    assert list(plan.runs[-len(controls) :]) == controls
    arms = [str(run.name) for run in controls if run.name.seed == 0]
    assert arms == [f"{arm}/seed-0" for arm in ("one-ulp", "one-ulp-2", "fault-misgrouped", LATE)]
    assert sum(run.name.arm.startswith("one-ulp") for run in controls) == 6
    draws = {run.config.injected_fault.draw for run in controls if run.name.arm == "one-ulp-2"}  # pyright: ignore
    assert draws == {1}
    assert plan.treatment_diff[LATE]["injected_fault.size"] == (None, 0.25)
    assert all(len(group) == 1 for group in group_pairs(plan.runs) if group[0].is_control)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"controls": {"faults": ["value_unshifted"]}},
            "controls.faults: got 'value_unshifted', which needs algorithm.type: ppo, or drop the fault",
        ),
        ({"controls": {"faults": ["one_ulp"]}}, "use controls.ulp_reruns"),
        ({"controls": {"faults": ["misgrouped", "misgrouped"]}}, "'misgrouped' twice"),
        (
            {
                "controls": {"faults": ["misgrouped"]},
                "arms": {"baseline": {}, "fault-misgrouped": {"steps": 3}},
            },
            "arms: got 'fault-misgrouped', ",
        ),
        (
            {"controls": {"ulp_reruns": 1}, "injected_fault": "misgrouped"},
            "controls.ulp_reruns: got 'one_ulp', but",
        ),
    ],
)
def test_controls_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=said):
        make_plan(recipe_with(**changes))


def test_a_fault_beyond_the_margin_is_caught_and_the_verdict_is_the_treatment_s(
    simulated: Callable[..., Path], judged: Callable[..., Any], snapshot: Snapshot
) -> None:
    directory = simulated(controls=FAULTS, shift={LATE: -0.2})
    content = judged(directory).content
    assert content.verdict == "MATCH" and list(content.arms) == ["treatment"]
    found = content.select("injected fault")
    assert count_caught(found) == (1, 2)
    missed, caught = found
    assert (missed["caught_by"], missed.result, missed["step"]) == ("nothing", "MATCH", None)
    assert (caught["caught_by"], caught["metric"], caught["step"]) == ("claim", "train/reward", 40)
    assert (caught.reason.code, caught.reason["metric"]) == (Code.CLAIM_DIFFERS, "train/reward")
    assert (caught["size"], caught["unit"], caught["num_pairs"]) == (0.25, "of the rows", 5)
    said = caught_sentence(found, paired=True)
    assert said in (directory / "report" / "report.md").read_text()
    snapshot(said)
    *first, figures, num_pairs = sensitivity_rows(found)[0]
    assert (*first, num_pairs) == ("misgrouped", "1 rows off", "MATCH", "nothing", "-", "5")
    assert re.fullmatch(
        r"train/reward differs by [+-][\d.e-]+, certified bound [\d.e-]+, margin ±0.02", figures
    )
    advice = missed["advice"]
    assert advice.code is Code.FAULT_MISSED and (advice["num_pairs"], advice["paired"]) == (None, True)
    assert advice["tolerance"]["deviation"] > advice["tolerance"]["aa_deviation"] >= 0
    assert (advice["amount"], advice["num_steps"], advice["rounded_metric"]) == (1, 40, None)
    snapshot(sentence(advice))
    assert caught["advice"] is None and caught["figures"].code == Code.MOVED_METRIC
    assert caught["figures"]["difference"] == pytest.approx(-0.2, abs=0.05)
    plain = simulated()
    assert judged(plain).content.select("injected fault") == []


def test_faults_of_which_none_was_judged_are_no_score_of_0_of_0(
    simulated: Callable[..., Path], judged: Callable[..., Any], snapshot: Snapshot
) -> None:
    directory = simulated(controls=FAULTS)
    shutil.rmtree(directory / "fault-misgrouped/seed-0")
    found = judged(directory).content.select("injected fault")
    snapshot(caught_sentence(found, paired=True))
    shutil.rmtree(directory / f"{LATE}/seed-0")
    found = judged(directory).content.select("injected fault")
    assert count_caught(found) == (0, 0) and "0 of 0" not in (directory / "report/report.md").read_text()
    snapshot(caught_sentence(found, paired=True))
    snapshot(sensitivity_summary(load_experiment(directory), found))


@pytest.mark.parametrize(
    ("changes", "faults", "can_inject"),
    [
        (
            {"arms": {"baseline": {}, "treatment": {"injected_fault": "misgrouped"}}},
            ["misgrouped in treatment"],
            True,
        ),
        (
            {"injected_fault": "misgrouped"},
            ["misgrouped in baseline and treatment"],
            False,
        ),
        ({}, [], True),
    ],
)
def test_a_fault_that_is_part_of_an_arm_is_said(
    simulated: Callable[..., Path],
    judged: Callable[..., Any],
    changes: dict[str, Any],
    faults: list[str],
    can_inject: bool,
    snapshot: Snapshot,
) -> None:
    directory = simulated(**changes)
    reason = Code.NO_FAULT_INJECTED(faults=faults, can_inject=can_inject)
    assert reason in judged(directory).content.not_tested
    snapshot(sensitivity_summary(load_experiment(directory), []))


def test_the_library_is_listed_and_one_of_it_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = CliRunner().invoke(app, ["faults"]).output
    assert all(fault.name in listed for fault in LIBRARY_OF_FAULTS)
    assert " adam_step_ahead, last_microbatch_only, " in listed
    assert "grpo or ppo" not in CliRunner().invoke(app, ["faults", "show", "last_microbatch_only"]).output
    assert "algorithm.type: grpo or ppo" in CliRunner().invoke(app, ["faults", "show", "forced_eos"]).output
    told = CliRunner().invoke(app, ["faults", "show", "rank_mean"]).output
    assert "https://github.com/PrimeIntellect-ai/prime-rl/issues/2358" in told
    assert "several data-parallel ranks; set cluster.cpu_ranks: 2" in told
    assert "injected_fault: {name: rank_mean, size: 1}" in told
    of_all = json.loads(CliRunner().invoke(app, ["faults", "--json"]).output)
    assert [one["name"] for one in of_all] == [fault.name for fault in LIBRARY_OF_FAULTS]
    assert of_all[2]["needs"] == {
        "microbatches": "needs several micro-batches; set policy.micro_batch_size"
    } and all(one["shows"] and one["source"].startswith("https://") for one in of_all)
    refused = CliRunner().invoke(app, ["faults", "show", "rank_men"])
    assert "such as 'rank_mean'" in str(refused.exception)


def test_controls_change_nothing_of_the_verdict(
    tmp_path: Path, simulated: Callable[..., Path], judged: Callable[..., Any]
) -> None:
    without = judged(simulated(controls={"aa_reruns": 1})).content
    within = judged(simulated(controls=FAULTS, shift={LATE: -0.2})).content
    assert (within.reasons, within.claims) == (without.reasons, without.claims)
    for kind in ("guard", "step one"):
        assert within.select(kind) == without.select(kind), kind
    assert set(without.not_tested) - set(within.not_tested) == {
        Code.NO_FAULT_INJECTED(faults=[], can_inject=True)
    }
    runs = load_experiment(tmp_path / "simulated")
    assert len(runs.controls) == 10 and not set(runs.controls) & set(runs.runs)


def test_sensitivity_has_the_baseline_and_faults_alone() -> None:
    recipe = recipe_with(compare={**RECIPE["compare"], "interim": [3, 5]})
    alone, lacks = make_sensitivity_recipe(recipe, None)
    assert list(alone.arms) == ["baseline"] and alone.name == "simulated-sensitivity"
    injected = {one.name for one in alone.controls.faults}
    assert {"flipped_advantages", "late_half_batch"} <= injected and not injected & set(lacks)
    assert lacks["value_unshifted"] == "needs algorithm.type: ppo"
    few, _ = make_sensitivity_recipe(recipe, "misgrouped, late_half_batch:0.25")
    assert list(few.control_arms) == ["fault-misgrouped", LATE]
    for names, said in {"misgrouped:x": "NAME:SIZE", "nonsense": "abrun faults"}.items():
        with pytest.raises(RecipeError, match=said):
            make_sensitivity_recipe(recipe, names)
    with pytest.raises(RecipeError, match="'value_unshifted', which needs"):
        make_sensitivity_recipe(recipe, "value_unshifted")


def test_a_fault_that_leaves_step_one_open_is_told_from_rounding_by_float32(
    simulated: Callable[..., Path],
) -> None:
    directory = simulated(policy={"dtype": "bfloat16"}, controls={"faults": ["misgrouped"]})
    for path in directory.glob("fault-misgrouped/*"):
        edit_rows(path, lambda row: row.update({"train/token_mult_prob_error": 1.04}))
    found = measure_sensitivity(load_experiment(directory))
    assert found[0].result == "INCONCLUSIVE"
    advice = found[0]["advice"]
    assert advice is not None and advice["rounded_metric"] == "train/token_mult_prob_error"


def test_what_one_ulp_grows_into_is_a_ratio_seed_by_seed(
    simulated: Callable[..., Path], judged: Callable[..., Any]
) -> None:
    directory = simulated(controls={"ulp_reruns": 3}, shift={"treatment": 0.1})
    content = judged(directory).as_json()
    diverging = (item["values"] for item in content["evidence"] if item["kind"] == "divergence")
    one = next(each for each in diverging if each["metric"] == "train/reward")
    runs = load_experiment(directory)
    ratios, moved, spread = [], [], []
    for seed in range(3):
        curves = []
        for arm in ("baseline", "treatment", "one-ulp"):
            of = runs.controls if arm == "one-ulp" else runs.runs
            series = next(run for name, run in of.items() if (name.arm, name.seed) == (arm, seed))
            curves.append(series.series("train/reward").values.tolist())
        apart = [[abs(b - a) for a, b in zip(curves[0], other, strict=True)] for other in curves[1:]]
        ratios.append(math.log((sum(apart[0]) / 40) / (sum(apart[1]) / 40)))
        moved.append(sum(apart[1]) / 40)
    for step in range(40):
        values = [run.series("train/reward").values[step] for run in runs.arm("baseline").values()]
        mean = sum(values) / 5
        spread.append(math.sqrt(sum((value - mean) ** 2 for value in values) / 4))
    grown = one["ulp"]
    assert grown["mean_difference"] == pytest.approx(sum(moved) / 3)
    assert grown["ratio"] == pytest.approx(math.exp(sum(ratios) / 3)) and grown["ratio"] > 5
    mean = sum(ratios) / 3
    reach = 4.302653 * math.sqrt(sum((each - mean) ** 2 for each in ratios) / 2 / 3)
    assert grown["ci95"] == pytest.approx((math.exp(mean - reach), math.exp(mean + reach)), rel=1e-5)
    assert one["seed_spread"] == pytest.approx(sum(spread) / 40)
    assert one["share_of_seed_spread"] == pytest.approx(one["mean_difference"] / one["seed_spread"])
    assert "the divergence caused by one ULP" in (directory / "report" / "report.md").read_text()
    assert content["num_pairs"] == 5
