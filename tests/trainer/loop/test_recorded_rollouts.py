"""Runs that train on the rollouts which another run recorded."""

import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import abrun
from abrun.errors import RecipeError, StoreError
from abrun.experiment.plan import make_plan
from abrun.experiment.preflight.checks import separate_job_refusals
from abrun.launch.prepare import own_experiment
from abrun.messages import sentence
from abrun.recipe.algorithms import Grpo
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.recipe.run import OwnRunConfig
from abrun.runs import rollouts
from abrun.runs.experiment import run_dir
from abrun.runs.layout import RunName
from abrun.runs.metric_names import AGAINST_SAMPLER
from abrun.runs.rollouts import find_rollouts, read_step, step_path
from abrun.runs.rundir import RunDir
from abrun.runs.state import read_state
from abrun.trainer.loop.data import RecordedGroups
from abrun.trainer.models.text import load_text
from tests.bench.launches import clockless_rows
from tests.launch.fakes import FAKE, run_to_end
from tests.trainer.loop.runs import train_plan

RECIPE = """
name: pair
algorithm: {type: grpo, prompts_per_step: 4, group_size: 4, entropy_coefficient: 0.05}
model: {preset: qwen2-tiny-128}
policy: {optimizer: {learning_rate: 1.0e-3}, logprobs: {impl: logits}}
rollout: {max_new_tokens: 6, record: true}
task: {type: arithmetic}
steps: 4
checkpoint: {every: 2}
arms:
  baseline: {}
  treatment: {rollout.engine: recorded, rollout.from: baseline}
seeds: [0, 1]
compare:
  claims: [{metric: train/grad_norm, window: all, margin: 10%}]
"""

ARMS = {"baseline": {}, "treatment": {"policy.logprobs.impl": "chunked"}}  # both train on a recording


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "pair.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def launched(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir, plan = tmp_path_factory.mktemp("runs"), make_plan(load_recipe(recipe_file))
    with own_experiment(plan, runs_dir / "pair", resume=False):
        train_plan(plan, runs_dir)
    return runs_dir / "pair"


def test_a_run_on_its_baselines_rollouts_equals_it_bit_for_bit(launched: Path) -> None:
    for seed in (0, 1):
        own, replayed = (clockless_rows(launched / arm / f"seed-{seed}") for arm in ("baseline", "treatment"))
        assert own == replayed
        assert own[4]["train/grad_norm"] > 0
    assert not (launched / "treatment" / "seed-0" / "rollouts").exists()


def test_the_recording_has_what_the_run_counted(launched: Path) -> None:
    rows = clockless_rows(launched / "baseline" / "seed-1")
    for step in range(1, 5):
        recorded = read_step(launched / "baseline" / "seed-1" / "rollouts", step)
        completions = [completion for group in recorded.groups for completion in group.completions]
        assert len(recorded.groups) == 4 and len(completions) == 16
        rewards = [completion.reward for completion in completions]
        assert np.mean(rewards) == pytest.approx(rows[step]["train/reward"])
        lengths = [len(completion.token_ids) for completion in completions]
        assert np.mean(lengths) == pytest.approx(rows[step]["train/mean_gen_tokens_per_sample"])
        # the mean of minus the sampler's log-probs is the trainer's, up to rounding
        logprobs = np.concatenate([completion.logprobs or [] for completion in completions])
        assert -logprobs.mean() == pytest.approx(rows[step]["train/approx_entropy"], rel=1e-4)
        assert recorded.origin.seed == 1


def test_the_verdict_is_about_the_trainers_alone(launched: Path) -> None:
    verdict = abrun.compare(launched, output=launched.parent / "report", formats=["json"]).content
    assert verdict["verdict"] != "INVALID"
    assert "on_recorded_rollouts" in [note["code"] for note in verdict["note_codes"]]
    assert "sampler_not_tested" in [reason["code"] for reason in verdict["not_tested_codes"]]
    evidence = verdict["evidence"]
    metrics = {record["values"]["metric"] for record in evidence if record["kind"] == "step one"}
    assert metrics and not metrics & {"train/reward", "train/mean_gen_tokens_per_sample"}
    costs = [record["values"]["quantity"] for record in evidence if record["kind"] == "cost"]
    assert not any("time" in quantity for quantity in costs)


@pytest.mark.parametrize(
    ("claim", "code"),
    [
        ("train/reward:all:0.05", "fixed_by_recording"),
        ("train/reward:all:level >-1", "fixed_by_recording"),
        ("timing/train/total_step_time_s:all:50%", "only_some_sample"),
    ],
)
def test_later_claims_cannot_use_what_the_recording_fixes(
    claim: str, code: str, launched: Path, tmp_path: Path
) -> None:
    content = abrun.compare(launched, claim=[claim], output=tmp_path / "report", formats=["json"]).content
    assert content["verdict"] != "MATCH"
    (result,) = content["claims"]
    assert result["result"] == "not tested" and code in json.dumps(result)


def test_arms_with_different_recordings_are_invalid(launched: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(launched, tmp_path / "pair")
    path = copied / "treatment" / "seed-0" / "result.json"
    sha256 = json.loads((copied / "baseline" / "seed-0" / "result.json").read_text())["rollouts_sha256"]
    path.write_text(path.read_text().replace(sha256, "0" * 64))
    verdict = abrun.compare(copied, output=tmp_path / "report", formats=["json"]).content
    assert verdict["verdict"] == "INVALID"
    assert [reason["code"] for reason in verdict["reason_codes"]] == ["rollouts_differ"]


def reading_config(source: Path, recipe_file: Path, **overrides: Any) -> OwnRunConfig:
    """Return the configuration of a run that trains on rollouts from elsewhere."""
    content = {
        "rollout.engine": "recorded",
        "rollout.from": str(source),
        "arms": ARMS,
        **overrides,
    }
    texts = [f"{key}={json.dumps(value)}" for key, value in content.items()]
    config = load_recipe(recipe_file, texts).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return config


def problem_of(source: Path, recipe_file: Path, **overrides: Any) -> str:
    """Read all groups of a recording as a run of seed 0 does; return why it cannot."""
    config = reading_config(source, recipe_file, **overrides)
    settings = config.algorithm
    assert isinstance(settings, Grpo)
    with pytest.raises(StoreError) as error:
        recorded = RecordedGroups(
            config, load_text(config.model, weights=None), Path("/nowhere/run/seed-0"), 0
        )
        for step in range(1, config.steps + 1):
            recorded.groups(step, 0, settings.prompts_per_step, settings.group_size)
    return str(error.value)


@pytest.mark.parametrize("place", ["", "baseline", "baseline/seed-0"])
def test_recordings_are_found_by_experiment_arm_and_run(
    place: str, launched: Path, recipe_file: Path
) -> None:
    config = reading_config(launched / place, recipe_file)
    recorded = RecordedGroups(config, load_text(config.model, weights=None), Path("/nowhere/run/seed-0"), 0)
    assert recorded.folder == launched / "baseline" / "seed-0" / "rollouts"


@pytest.mark.parametrize(
    ("arms", "found"), [(["fused"], "fused"), (["a", "b"], None), (["a", "baseline"], "baseline")]
)
def test_of_an_experiment_its_baseline_or_only_recording_is_taken(
    arms: list[str], found: str | None, tmp_path: Path
) -> None:
    for arm in arms:
        first = step_path(tmp_path / arm / "seed-0/rollouts", 1)
        first.parent.mkdir(parents=True)
        first.touch()
    with nullcontext() if found else pytest.raises(StoreError, match="no recorded rollouts of seed 0"):
        assert find_rollouts(str(tmp_path), tmp_path / "x/y/seed-0", 0).parts[-3] == found


def test_an_arm_can_train_on_an_earlier_recording(launched: Path, recipe_file: Path, tmp_path: Path) -> None:
    rollout = f"rollout={{engine: recorded, from: {launched}, max_new_tokens: 6}}"
    overrides = [rollout, f"arms={json.dumps(ARMS)}", "compare.claims=[]", "seeds=[1]"]
    train_plan(make_plan(load_recipe(recipe_file, overrides)), tmp_path)
    again = clockless_rows(tmp_path / "pair" / "baseline" / "seed-1")
    assert again == clockless_rows(launched / "baseline" / "seed-1")


def damage(folder: Path, **changes: Any) -> None:
    """Change arrays or the header of the rollouts of step 2, with a fitting checksum."""
    path = step_path(folder, 2)
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["abrun"])
    for name, value in changes.items():
        if name in arrays:
            arrays[name] = value(arrays[name])
        else:
            header[name] = value
    header["sha256"] = rollouts._digest(arrays)
    save_file(arrays, path, {"abrun": json.dumps(header)})


BAD = {
    "torn": (lambda folder: os.truncate(step_path(folder, 2), 900), "unusable rollouts: "),
    "empty": (lambda folder: step_path(folder, 2).write_bytes(b""), "unusable rollouts: "),
    "missing": (lambda folder: step_path(folder, 2).unlink(), "No such file"),
    "steps": (lambda folder: step_path(folder, 4).unlink(), "it holds 3 steps, but the run takes 4"),
    "format": (lambda folder: damage(folder, format=2), "this version reads format 1, not 2"),
    "step": (lambda folder: damage(folder, step=7), "it holds step 7"),
    "seed": (lambda folder: damage(folder, seed=3), "recorded with seed 3, but the run has 0"),
    "tokenizer": (lambda folder: damage(folder, tokenizer="x"), "recorded with tokenizer x"),
    "model": (lambda folder: damage(folder, model="y"), "recorded with model y"),
    "vocabulary": (lambda folder: damage(folder, prompt_ids=lambda ids: ids + 500), "beyond the model's"),
    "reward": (lambda folder: damage(folder, rewards=lambda rewards: rewards * np.nan), "a reward that"),
    "log-probs": (lambda folder: damage(folder, inference_logprobs=lambda old: old * np.nan), "a log-prob"),
    "lengths": (lambda folder: damage(folder, prompt_lengths=lambda old: old * 0), "prompt_lengths"),
    "groups": (lambda folder: damage(folder, fetch=lambda old: old + 1), "holds 0 groups"),
}


@pytest.mark.parametrize("name", BAD)
def test_unfit_recordings_are_one_line(name: str, launched: Path, recipe_file: Path, tmp_path: Path) -> None:
    spoil, problem = BAD[name]
    copied = shutil.copytree(launched / "baseline" / "seed-0", tmp_path / "copy")
    spoil(copied / "rollouts")
    line = problem_of(copied, recipe_file)
    assert problem in line and "\n" not in line and len(line) < 400


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"rollout.temperature": 0.5}, "recorded with temperature 1.0, but the run has 0.5"),
        ({"rollout.max_new_tokens": 3}, "above rollout.max_new_tokens 3"),
        ({"algorithm.group_size": 2}, "holds 4 groups of 4 completions in fetch 1"),
        ({"model.preset": "qwen2-tiny"}, "recorded with model"),
        ({"steps": 9}, "it holds 4 steps, but the run takes 9"),
    ],
)
def test_another_recipe_than_the_recordings_is_one_line(
    overrides: dict[str, Any], problem: str, launched: Path, recipe_file: Path
) -> None:
    assert problem in problem_of(launched, recipe_file, **overrides)


@pytest.fixture
def without_logprobs(launched: Path, tmp_path: Path) -> Path:
    """The rollouts of a sampler whose log-probs are unknown."""
    for seed in (0, 1):
        folder = tmp_path / "unknown" / f"seed-{seed}"
        folder.mkdir(parents=True)
        for step in range(1, 5):
            recorded = read_step(launched / "baseline" / f"seed-{seed}" / "rollouts", step)
            groups = [
                replace(group, completions=[replace(each, logprobs=None) for each in group.completions])
                for group in recorded.groups
            ]
            step_path(folder, step).write_bytes(replace(recorded, groups=groups).encode())
    return tmp_path / "unknown"


def test_without_the_samplers_logprobs_only_the_metrics_against_it_are_missing(
    launched: Path, without_logprobs: Path, recipe_file: Path, tmp_path: Path
) -> None:
    overrides = [f"rollout={{engine: recorded, from: {without_logprobs}, max_new_tokens: 6}}"]
    plan = make_plan(
        load_recipe(
            recipe_file, [*overrides, f"arms={json.dumps(ARMS)}", "seeds=[0]", "steps=2", "compare.claims=[]"]
        )
    )
    train_plan(plan, tmp_path)
    native = clockless_rows(launched / "baseline" / "seed-0")
    baseline = clockless_rows(tmp_path / "pair" / "baseline" / "seed-0")
    for step in (1, 2):
        assert set(native[step]) - set(baseline[step]) == set(AGAINST_SAMPLER)
        assert baseline[step]["train/grad_norm"] == native[step]["train/grad_norm"] > 0


def test_a_correction_needs_the_samplers_logprobs(without_logprobs: Path, recipe_file: Path) -> None:
    correction = {"type": "truncated", "high": 2.0}
    line = problem_of(without_logprobs, recipe_file, **{"algorithm.importance_correction": correction})
    assert "which importance_correction needs" in line


def test_a_folder_without_rollouts_is_one_line(recipe_file: Path, tmp_path: Path) -> None:
    assert "has no recorded rollouts of seed 0" in problem_of(tmp_path / "none", recipe_file)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("rollout.record=false", "an arm that does not record its rollouts"),
        ("validation={every: 2, num_prompts: 4}", "which samples none"),
        ("compare.claims.0.metric=train/reward", "recorded rollouts, which hold it"),
        ("compare.claims.0.metric=timing/train/total_step_time_s", "only some of the arms sample"),
        ("arms.treatment={rollout.engine: recorded}", "got null with engine 'recorded'"),
        ("arms.treatment={rollout.from: baseline}", "got 'baseline' with engine 'torch'"),
        ("controls.faults=[forced_eos]", "needs completions that the run samples"),
    ],
)
def test_recipes_that_cannot_work_are_refused(change: str, problem: str, recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        make_plan(load_recipe(recipe_file, [change]))


def test_controls_train_on_the_baselines_rollouts_too(recipe_file: Path) -> None:
    plan = make_plan(load_recipe(recipe_file, ["controls={ulp_reruns: 1, faults: [late_half_batch]}"]))
    waits = {str(run.name): str(run.trains_on(plan.recipe.arms)) for run in plan.runs}
    assert waits == {
        **{f"baseline/seed-{seed}": "None" for seed in (0, 1)},
        **{f"treatment/seed-{seed}": f"baseline/seed-{seed}" for seed in (0, 1)},
        **{f"fault-late_half_batch/seed-{seed}": f"baseline/seed-{seed}" for seed in (0, 1)},
        "one-ulp/seed-0": "baseline/seed-0",
    }


def test_a_run_is_not_started_without_its_recording(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "local", FAKE[1])
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"runs": {"baseline/seed-0": "fail"}}))
    plan = make_plan(load_recipe(recipe_file, ["seeds=[0]", "compare.claims=[]"]))
    assert run_to_end(plan, tmp_path).exit_code == 1
    name = RunName(arm="treatment", seed=0)
    state = read_state(RunDir(run_dir(tmp_path / "pair", name)), name)
    assert state.status != "finished" and state.reason
    assert "baseline/seed-0, whose rollouts it trains on, failed" in sentence(state.reason)


@pytest.mark.slow
def test_recordings_do_not_depend_on_the_number_of_ranks(
    launched: Path, recipe_file: Path, tmp_path: Path
) -> None:
    overrides = ["cluster.cpu_ranks=2", "steps=1", "seeds=[0]", "compare.claims=[]"]
    assert run_to_end(make_plan(load_recipe(recipe_file, overrides)), tmp_path).exit_code == 0
    one, two = (
        read_step(runs / "pair" / "baseline" / "seed-0" / "rollouts", 1)
        for runs in (launched.parent, tmp_path)
    )
    assert [group.prompt for group in one.groups] == [group.prompt for group in two.groups]
    assert [completion.token_ids for group in one.groups for completion in group.completions] == [
        completion.token_ids for group in two.groups for completion in group.completions
    ]
    own, replayed = (clockless_rows(tmp_path / "pair" / arm / "seed-0") for arm in ("baseline", "treatment"))
    assert own == replayed


ALGORITHMS = {
    "dynamic sampling": (
        "algorithm.dynamic_sampling={max_tries: 3}",
        "warm_start={steps: 30}",
        "task.max_operand=3",
    ),
    "ppo": ("algorithm={type: ppo, prompts_per_step: 8}",),
    "documents": ("algorithm.documents_per_step=24",),
    "several updates": ("algorithm.epochs_per_step=2", "algorithm.minibatches_per_step=2"),
    "penalties": ("algorithm.overlong_punishment={buffer: 2, factor: 1.0}", "algorithm.kl_coefficient=0.1"),
    "gspo": ("algorithm.loss=gspo",),
}


QUICK = ("dynamic sampling", "ppo")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_every_algorithm_can_train_on_a_recording(name: str, recipe_file: Path, tmp_path: Path) -> None:
    overrides = [*ALGORITHMS[name], "steps=3", "seeds=[0]", "compare.claims=[]"]
    train_plan(make_plan(load_recipe(recipe_file, overrides)), tmp_path)
    own, replayed = (clockless_rows(tmp_path / "pair" / arm / "seed-0") for arm in ("baseline", "treatment"))
    assert own == replayed and own[3]["train/grad_norm"] > 0


@pytest.mark.slow
def test_killed_runs_resume_their_recording_exactly(recipe_file: Path, tmp_path: Path) -> None:
    overrides = ["steps=30", "checkpoint.every=7", "seeds=[0]", "compare.claims=[]", "limits.retries=3"]
    plan = make_plan(load_recipe(recipe_file, overrides))
    assert run_to_end(plan, tmp_path / "undisturbed").exit_code == 0
    victims = {"baseline": 10, "treatment": 12}

    def kill_each_once() -> None:
        for arm, step in victims.items():
            run = RunDir(run_dir(tmp_path / "killed" / "pair", RunName(arm=arm, seed=0)))
            while not run.exists or run.heartbeat().step < step:
                time.sleep(0.02)
            os.kill(json.loads((run.path / "heartbeat.json").read_text())["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_each_once, daemon=True)
    killer.start()
    assert run_to_end(plan, tmp_path / "killed").exit_code == 0
    killer.join(timeout=1)
    for arm in victims:
        runs = [RunDir(tmp_path / name / "pair" / arm / "seed-0") for name in ("undisturbed", "killed")]
        assert clockless_rows(runs[0].path) == clockless_rows(runs[1].path)
        assert runs[0].result.rollouts_sha256 == runs[1].result.rollouts_sha256
        assert len(runs[1].launches()) == 2


def test_separate_jobs_cannot_wait_for_a_recording(recipe_file: Path) -> None:
    plan = make_plan(load_recipe(recipe_file, []))
    (refusal,) = separate_job_refusals(plan)
    assert "separate jobs do not wait for each other" in refusal
