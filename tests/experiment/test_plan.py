"""Plans: which runs, in which order, what differs, and which share their initial weights."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from abrun.errors import RecipeError
from abrun.experiment.plan import ExperimentPlan, compare_hash, make_plan
from abrun.launch.preview import check_feasibility, render_preview
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from tests.snapshot import Snapshot

SMALL = Path(__file__).parents[1] / "launch" / "small.yaml"
FOREIGN = Path(__file__).parents[1] / "external" / "foreign.yaml"
WARM = "warm_start={steps: 50}"


def plan_of(*overrides: str) -> ExperimentPlan:
    return make_plan(load_recipe(SMALL, overrides))


def dry_run(plan: ExperimentPlan) -> str:
    shown = io.StringIO()
    Console(width=100, file=shown).print(render_preview(plan, check_feasibility(plan)))
    return shown.getvalue()


def names(plan: ExperimentPlan) -> list[str]:
    return [str(run.name) for run in plan.runs]


WHERE = {"once": "the first of 2 nodes", "every_node": "each of 2 nodes, NODE_RANK 0 to 1"}


@pytest.mark.parametrize("start", WHERE)
def test_a_dry_run_says_where_a_command_starts(start: str) -> None:
    words = ["{python}", "{script}", "{node_rank}", "{port}", "{learning_rate}", "{behaviour}", "{step_s}"]
    settings = ("cluster.nodes=2", f"trainer.start={start}", f"trainer.argv={words}")
    more = ("trainer.env={LABEL: '{label}'}", "trainer.parameters.port=7")  # which hides the placeholder
    shown = " ".join(dry_run(make_plan(load_recipe(FOREIGN, [*settings, *more]))).split())
    assert f"The command of baseline/seed-0 on {WHERE[start]}, " in shown
    assert "foreign_trainer.py NODE_RANK 7 0.5" in shown
    assert "has only this machine; use launcher: slurm or ray, or nodes: 1" in shown


def test_runs_are_interleaved_by_pair() -> None:
    assert names(plan_of("seeds=[3, 1]", "arms.other.steps=9")) == [
        *("baseline/seed-3", "treatment/seed-3", "other/seed-3"),
        *("baseline/seed-1", "treatment/seed-1", "other/seed-1"),
    ]


def test_aa_reruns_go_round_the_seeds_behind_their_pair() -> None:
    assert names(plan_of("seeds=[0, 1]", "controls.aa_reruns=3")) == [
        *("baseline/seed-0", "treatment/seed-0", "baseline/seed-0-aa1", "baseline/seed-0-aa2"),
        *("baseline/seed-1", "treatment/seed-1", "baseline/seed-1-aa1"),
    ]


def test_the_treatment_diff_is_of_the_resolved_configurations() -> None:
    plan = plan_of("arms.treatment.policy.optimizer.learning_rate=1e-3", "arms.other.steps=9")
    # 1e-3 is the base's own value: said in the arm, but no difference
    assert plan.treatment_diff == {
        "treatment": {"policy.logprobs.impl": ("logits", "chunked")},
        "other": {"steps": (3, 9)},
    }


@pytest.mark.parametrize(
    "override",
    ["compare.claims.0.metric=train/rewards/margin", "compare.step_one_tolerance={train/critic/loss: 0.1}"],
)
def test_what_an_algorithm_does_not_record_is_refused_with_all_that_it_does(
    override: str, snapshot: Snapshot
) -> None:
    with snapshot.refused(RecipeError):
        plan_of(override)


def test_claims_that_can_be_judged_are_planned() -> None:
    for window in ("all", "last 50%", "steps 2-3"):
        assert plan_of(f"compare.claims.0.window={window}").runs
    assert plan_of(
        "compare.claims.0.metric=validation/accuracy", "validation={every: 1, num_prompts: 8}"
    ).runs
    for metric, option in (
        ("train/kl_penalty", "algorithm.kl_coefficient=0.1"),
        ("train/num_tokens", "algorithm.metrics=full"),
        ("train/dynamic_sampling_tries", "algorithm.dynamic_sampling={}"),
        ("memory/logprobs/peak_allocated_bytes", "cluster.gpus_per_node=1"),
    ):
        assert plan_of(f"compare.claims.0.metric={metric}", option).runs
    # A foreign trainer may log anything; when its runs end is known
    assert make_plan(load_recipe(FOREIGN, ["compare.claims.0.metric=its/own"])).runs
    assert make_plan(load_recipe(FOREIGN, ["compare.step_one_tolerance={train/critic/loss: 0.1}"])).runs
    with pytest.raises(RecipeError, match="end at step 5"):
        make_plan(load_recipe(FOREIGN, ["compare.claims.0.window=steps 2-9"]))
    with pytest.raises(RecipeError, match=r"claims\.0\.metric: got 'final_weights'"):
        make_plan(load_recipe(FOREIGN, ["compare.claims=[{metric: final_weights, below: 0.05}]"]))


def test_a_large_plan_resolves_its_arms_once_and_shows_its_first_rows() -> None:
    arms = ", ".join(f"a{number}: {{steps: {number + 4}}}" for number in range(199))
    many = [f"arms={{baseline: {{}}, {arms}}}", f"seeds={list(range(500))}"]
    plan = plan_of(*many)
    assert len(plan.runs) == 100_000 and len({id(run.config) for run in plan.runs}) == 200
    shown = dry_run(plan)
    assert "... and 99800 more" in shown and len(shown.splitlines()) < 1000
    with pytest.raises(
        RecipeError,
        match="100001 runs \\(200 arms and faults x 500 seeds, plus reruns\\); allowed: at most 100000",
    ):
        plan_of(*many, "controls.aa_reruns=1")


def test_a_recipe_s_texts_are_no_markup_of_the_dry_run() -> None:
    assert "[/x][red]\\x07" in dry_run(plan_of('model={path: "[/x][red]\\x07"}'))


def test_arms_share_a_warm_start_unless_model_or_task_differ() -> None:
    plan = plan_of(WARM)
    (key,) = plan.warm_starts
    assert {run.warm_start for run in plan.runs} == {key}
    warm_start = plan.warm_starts[key]
    assert (warm_start.algorithm.type, warm_start.steps) == ("sft", 50)
    assert warm_start.policy.logprobs.impl == "logits" and warm_start.warm_start is None
    assert len(plan_of(WARM, "arms.other.task.max_operand=7").warm_starts) == 2
    assert plan_of(WARM, "arms.other.warm_start=null").runs[2].warm_start is None
    assert plan_of().warm_starts == {}


@pytest.mark.parametrize(
    "override", ["seeds=[5, 6]", "steps=9", "wandb={}", "compare.guards.step_time_ratio=2"]
)
def test_a_cached_warm_start_serves_whatever_does_not_reach_it(override: str) -> None:
    assert list(plan_of(WARM, override).warm_starts) == list(plan_of(WARM).warm_starts)


def test_a_warm_start_stays_at_its_learning_rate_whatever_the_runs_schedule_is() -> None:
    falling = "policy.optimizer={learning_rate: 1, schedule: cosine, min_learning_rate: 0.5, warmup_steps: 4}"
    (warm_start,) = plan_of(WARM, falling).warm_starts.values()
    assert OwnRunConfig.model_validate(warm_start.model_dump()) == warm_start
    optimizer = warm_start.policy.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (1e-3, "constant", 4)


def test_a_warm_start_never_sees_what_its_runs_hold_out_however_often_they_validate() -> None:
    plans = [plan_of(WARM, f"validation={{every: {every}, num_prompts: 8}}") for every in (2, 3)]
    (warm_start,) = plans[0].warm_starts.values()
    assert warm_start.validation is not None
    assert (warm_start.validation.num_prompts, warm_start.validation.every) == (8, 50)
    assert list(plans[0].warm_starts) == list(plans[1].warm_starts) != list(plan_of(WARM).warm_starts)


@pytest.mark.parametrize("override", ["warm_start.steps=99", "policy.dtype=bfloat16", "task.max_operand=7"])
def test_a_warm_start_that_would_come_out_otherwise_has_another_key(override: str) -> None:
    assert list(plan_of(WARM, override).warm_starts) != list(plan_of(WARM).warm_starts)


def test_the_compare_hash_is_of_the_comparison_alone() -> None:
    assert compare_hash(plan_of("steps=9").recipe.compare) == compare_hash(plan_of().recipe.compare)
    other = plan_of("compare.claims=[{metric: train/reward, margin: 0.06}]")
    assert compare_hash(other.recipe.compare) != compare_hash(plan_of().recipe.compare)
