"""Validation: the same fixed prompts for every arm, seed and number of ranks, and training never feels it."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from abrun.recipe.policy import Model
from abrun.recipe.run import OwnRunConfig
from abrun.runs.files import read_json
from abrun.runs.lines import read_json_lines
from abrun.runs.rundir import RunDir
from abrun.trainer.loop.recorder import prompts_sha256
from abrun.trainer.models.text import load_text
from abrun.trainer.models.weights import load_network
from abrun.trainer.tasks import hold_out
from tests.trainer.loop.runs import Trainer, metrics_by_step, run_to_end, train, train_here
from tests.written_runs import make_run, metric_values, run_config

LARGE = "task.max_operand=999999999"  # so large that training meets no held-out prompt anyway
METRICS = {"accuracy", "avg_length", "truncation_rate"}


def validated(*overrides: str, arm: str = "baseline") -> OwnRunConfig:
    return run_config("validation={every: 2, num_prompts: 8}", "steps=5", *overrides, arm=arm)


def rewards(directory: Path) -> dict[int, list[float]]:
    return {step: row.rewards.tolist() for step, row in RunDir(directory).validations().items()}


def test_rows_and_files_say_the_same(tmp_path: Path, warm_weights: Path, group: None) -> None:
    config = validated("rollout.max_new_tokens=2")
    rows = train_here(make_run(tmp_path / "run", config, initial_weights=warm_weights))
    assert [step for step, row in rows.items() if "validation/accuracy" in row] == [0, 2, 4, 5]
    for step, row in rows.items():
        has = {key.removeprefix("validation/") for key in row if key.startswith("validation/")}
        assert has == (METRICS if step in (0, 2, 4, 5) else set())
        assert ("train/reward" in row) == (step > 0)
        assert ("timing/validation/total_s" in row) == bool(has)
    found = RunDir(tmp_path / "run").validations()
    assert list(found) == [0, 2, 4, 5]
    assert config.validation is not None
    prompts = [example.prompt for example in hold_out(config.task, config.validation)[1]]
    for step, row in found.items():
        assert row.prompts_sha256 == prompts_sha256(prompts)
        assert len(row.rewards) == len(row.lengths) == 8 and set(row.lengths.tolist()) <= {1.0, 2.0}
        assert rows[step]["validation/accuracy"] == row.rewards.mean()
        assert rows[step]["validation/avg_length"] == row.lengths.mean()
    lines = read_json_lines(tmp_path / "run" / "validation.jsonl")
    assert [(line["step"], line["attempt"]) for line in lines] == [(0, 1), (2, 1), (4, 1), (5, 1)]


def test_the_initial_policys_rewards_are_those_of_transformers_greedy_search(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    config = validated("steps=1", "rollout.temperature=1.3", "task.max_operand=6")
    rows = train_here(make_run(tmp_path / "run", config, initial_weights=warm_weights))
    model = Model(path=str(warm_weights))
    text = load_text(model, weights=None)
    network: Any = load_network(model, weights=None, seed=0)
    assert config.validation is not None
    expected, lengths, num_truncated = [], [], 0
    for example in hold_out(config.task, config.validation)[1]:
        encoded = text.tokenizer(example.prompt, return_tensors="pt")
        output = network.generate(**encoded, max_new_tokens=6, do_sample=False)[0]
        completion = output[encoded["input_ids"].shape[1] :].tolist()
        decoded = text.tokenizer.decode(completion, skip_special_tokens=True)
        expected.append(float(decoded == example.answer))
        lengths.append(len(completion))
        num_truncated += completion[-1] not in text.end_ids
    found = RunDir(tmp_path / "run").validations()[0]
    assert found.rewards.tolist() == expected and found.lengths.tolist() == lengths
    assert 0 < sum(expected) < 8  # the example should have right and wrong answers
    assert rows[0]["validation/truncation_rate"] == num_truncated / 8


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("temperature", [0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_training_does_not_feel_it(
    algorithm: str, temperature: float, tmp_path: Path, warm_weights: Path, group: None
) -> None:
    overrides = [LARGE, "rollout.max_new_tokens=6", "policy.optimizer.warmup_steps=0"]
    if algorithm == "sft":
        overrides.append("algorithm={type: sft, batch_size: 8}")
    temperature_set = f"validation.temperature={temperature}"
    overrides.append("steps=3")
    configs = {"with": validated(*overrides, temperature_set), "without": run_config(*overrides)}
    values = {}
    for name, config in configs.items():
        directory = make_run(tmp_path / name, config, initial_weights=warm_weights)
        train_here(directory)
        values[name] = {k: v for k, v in metric_values(directory).items() if not k.startswith("validation/")}
        values[name]["prompts"] = [read_json(directory / "environment.json")["prompts_sha256"]]
    assert values["with"] == values["without"]


def test_arms_and_seeds_share_the_prompts_and_arms_the_draws(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    digests, found = set(), {}
    for name, arm, seed in (("a", "baseline", 0), ("b", "treatment", 0), ("c", "baseline", 1)):
        config = validated(
            "validation.temperature=1.5", "validation.num_prompts=32", "task.max_operand=99", arm=arm
        )
        directory = make_run(tmp_path / name, config.model_copy(update={"steps": 1}), seed=seed)
        train_here(directory)
        first = RunDir(directory).validations()[0]
        digests.add(first.prompts_sha256)
        found[name] = first.lengths.tolist()
    assert len(digests) == 1
    assert found["a"] == found["b"]


@pytest.mark.slow
def test_sampled_validation_differs_by_seed_and_step(tmp_path: Path, warm_weights: Path, group: None) -> None:
    overrides = ("validation.temperature=3.0", "policy.optimizer.learning_rate=1.0e-30")
    lengths = []
    for seed in (0, 1):
        config = validated(*overrides, "rollout.max_new_tokens=30")
        directory = make_run(tmp_path / str(seed), config, seed=seed, initial_weights=warm_weights)
        train_here(directory)
        lengths += [tuple(row.lengths.tolist()) for row in RunDir(directory).validations().values()]
    assert len(set(lengths)) > 4


@pytest.mark.parametrize("temperature", [0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_ranks_change_nothing(temperature: float, tmp_path: Path, warm_weights: Path, group: None) -> None:
    found = {}
    for ranks in (1, 2):
        config = validated(f"cluster.cpu_ranks={ranks}", f"validation.temperature={temperature}", "steps=1")
        rows = train(tmp_path / str(ranks), config, initial_weights=warm_weights)
        found[ranks] = [
            (
                step,
                row.rewards.tolist(),
                row.lengths.tolist(),
                row.prompts_sha256,
                rows[step]["validation/accuracy"],
            )
            for step, row in RunDir(tmp_path / str(ranks)).validations().items()
        ]
    assert found[1] == found[2] and len(found[1]) == 2


def test_a_resumed_run_validates_as_one_that_never_stopped(tmp_path: Path, warm_weights: Path) -> None:
    whole = make_run(tmp_path / "whole", validated("steps=7"), initial_weights=warm_weights)
    run_to_end(whole)
    directory = make_run(tmp_path / "killed", validated("steps=7"), initial_weights=warm_weights)
    trainer = Trainer(directory)
    trainer.wait_for_step(4)
    trainer.send(signal.SIGKILL)
    trainer.wait()
    run_to_end(directory)
    assert rewards(directory) == rewards(whole) and list(rewards(whole)) == [0, 2, 4, 6, 7]
    assert metric_values(directory) == metric_values(whole)
    attempts = [row["attempt"] for row in read_json_lines(directory / "validation.jsonl")]
    assert attempts == sorted(attempts) and set(attempts) == {1, 2}


# --- verifiers of one's own, and truncation ---

VERIFIERS = """
def yes(prompt, completion, answer):
    return 2.5
def on_rank_one(prompt, completion, answer):
    return 1 / (prompt != "p1")
"""


def with_verifier(folder: Path, function: str, *overrides: str) -> OwnRunConfig:
    (folder / "verifiers_of_a_test.py").write_text(VERIFIERS)
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) + "\n" for i in range(4)))
    task = f"task={{type: jsonl, path: {path}, verifier: 'verifiers_of_a_test:{function}'}}"
    return run_config(task, "steps=1", *overrides)


def test_truncated_completions_count_with_the_reward_of_their_text(tmp_path: Path) -> None:
    config = with_verifier(tmp_path, "yes", "rollout.max_new_tokens=2")
    directory = make_run(tmp_path / "run", config)
    run_to_end(directory, path=tmp_path)
    row = metrics_by_step(directory)[1]
    assert row["train/reward"] == 2.5
    assert 0.5 < row["train/truncation_rate"] <= 1  # random weights: an end token has 1 chance in 99
    assert row["train/num_valid_samples"] == 32 and row["train/global_valid_toks"] > 32


def test_a_verifier_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    config = with_verifier(tmp_path, "on_rank_one", "cluster.cpu_ranks=2", "algorithm.prompts_per_step=2")
    # The order of the seed decides which rank has the prompt: take one that gives it to the second.
    from abrun.trainer.seeds import derive_seed
    from abrun.trainer.tasks.problems import read_problems

    problems = read_problems(config.task, config.task.path, "task.path")  # pyright: ignore
    seed = next(s for s in range(99) if problems.examples(derive_seed(s, "data"), 0, 2)[1].prompt == "p1")
    directory = make_run(tmp_path / "run", config, seed=seed)
    trainer = Trainer(directory, ranks=2, path=tmp_path)
    assert trainer.wait() == 2
    assert [process.exitcode for process in trainer.processes] == [2, 2]
    last = RunDir(directory).events()[-1]
    assert last["event"] == "failed"
    assert "'verifiers_of_a_test:on_rank_one' raised ZeroDivisionError" in last["message"]
    assert f"{tmp_path / 'problems.jsonl'}, line 2;" in last["message"]
    assert not (directory / "result.json").exists()
