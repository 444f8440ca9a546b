"""The benchmark of full-size recipes: the recipes that it launches, and what it says of their runs."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from abrun.experiment.plan import diff_configs
from abrun.recipe.experiment import BASELINE
from abrun.recipe.policy import Dtensor
from abrun.runs.layout import RunName
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from tests.bench import bench_full_size as full_size
from tests.test_recipe_headers import named_differences

PPO, EXPERTS = "ppo-qwen2.5-1.5b-1n8g-megatron", "grpo-qwen3-30b-a3b-2n8g-fused-logprobs"


def options(device: str = "cuda", **changed: Any) -> argparse.Namespace:
    usual = {"device": device, "layers": None, "steps": 5, "gpus": 8, "set": [], "limit": 240.0}
    return argparse.Namespace(**(usual | changed))


@pytest.mark.parametrize("name", [PPO, EXPERTS])
def test_a_trial_differs_from_its_recipe_in_size_of_the_experiment_alone(name: str, tmp_path: Path) -> None:
    trial = full_size.make_trial(name, tmp_path, options())
    shipped = full_size.load_own_recipe(trial.path)
    for arm in trial.recipe.arms:
        keys = diff_configs(shipped.run_config(arm), trial.config(arm))
        sizes = {key for key in keys if key.startswith(("validation.", "cluster.", "checkpoint.", "wandb."))}
        assert {*keys} - sizes == {"model.path", "task.path", "steps"}
    texts = (tmp_path / name / "texts.jsonl").read_text().splitlines()
    assert len(texts) >= 1024 and len(set(texts)) == len(texts)


def test_every_recipe_of_one_or_two_hosts_has_an_architecture() -> None:
    names = full_size.multi_gpu_recipes()
    assert {PPO, EXPERTS, *full_size.LAUNCHED} < {*names} and len(names) >= 10
    for name in names:
        config = full_size.load_own_recipe(full_size.recipe_files()[name]).run_config(BASELINE)
        assert isinstance(config, full_size.OwnRunConfig)
        assert config.model.path in full_size.ARCHITECTURE_OF and config.task.type in full_size.FIELDS


def test_the_prediction_of_megatron_is_that_of_dtensor_with_its_layout(tmp_path: Path) -> None:
    trial = full_size.make_trial(EXPERTS, tmp_path, options())
    config = trial.config("treatment")
    stand_in = full_size.predictable(config)
    # Eight ranks hold the experts of four: dtensor repeats them in a tensor-parallel group
    expected = Dtensor(tensor_parallel=2, expert_parallel=4, sequence_parallel=True)
    assert stand_in.policy.backend == expected and full_size.predictable(stand_in) is stand_in
    assert {*diff_configs(config, stand_in)} == {"policy.backend.type", "policy.backend.expert_parallel"}


def test_differences_that_a_header_lacks_are_named(tmp_path: Path) -> None:
    trial = full_size.make_trial(PPO, tmp_path, options())
    runs: dict[str, RunDir] = {}
    for arm in trial.recipe.arms:
        runs[arm] = RunDir(tmp_path / arm)
        name, config = RunName(arm=arm, seed=0), trial.config(arm).model_dump(mode="json")
        runs[arm].write_record(RunRecord(experiment="x", name=name, initial_weights=None, config=config))
    assert named_differences(trial.path) == {"treatment": {"policy.backend.type"}}
    line = "arm treatment differs in policy.backend.type: as the header says"
    assert full_size.differences(trial, runs) == [line]
    record = runs["treatment"].record()
    record.config["policy"]["micro_batch_tokens"] = 8192
    runs["treatment"].write_record(record)
    [line] = full_size.differences(trial, runs)
    assert line.endswith(": the header lacks policy.micro_batch_tokens")
    del runs[BASELINE]
    assert full_size.differences(trial, runs) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "2"], "--steps: got 2, but the first 2 are not measured; use more"),
        (["--predict-only", "--memory", "big"], "--memory: .*big"),
        (["--recipes", "quickstart"], "--recipes: invalid choice: 'quickstart'"),
    ],
)
def test_impossible_options_are_one_line(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_full_size", *arguments])
    with pytest.raises(SystemExit) as end:
        full_size.main()
    assert end.value.code == 2 and re.search(problem, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [PPO, EXPERTS])
def test_both_arms_of_a_recipe_train_on_a_cpu(name: str, tmp_path: Path) -> None:
    asked = options("cpu", steps=3)
    lines = full_size.measure(full_size.make_trial(name, tmp_path, asked), tmp_path, asked, None)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:2]]
    assert [row[:3] for row in rows] == [[name, "baseline", "3"], [name, "treatment", "3"]], lines
    for row in rows:
        seconds = [float(cell) for cell in row[3 : 3 + 2 + len(full_size.PARTS)]]
        # Each part is that of its slowest rank: the parts together may be longer than the step
        assert seconds[0] == pytest.approx(sum(seconds[1:]), abs=0.05)
        assert min(seconds[1:]) > -0.1 * seconds[0]
    assert lines[2].endswith("as the header says") and "exit code 0" in lines[3]
