"""Runs that train on rollouts which another framework has dumped.

The dumps are made here from a run's own recording, in the form in which each framework writes them.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import abrun
from abrun.errors import StoreError
from abrun.experiment.plan import make_plan
from abrun.metric_names import AGAINST_SAMPLER
from abrun.models import Text, load_text
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from abrun.runs.rollouts import RecordedStep, read_step
from abrun.train.foreign_rollouts import find_foreign_rollouts
from abrun.train.recordings import RecordedRollouts
from tests.bench.launches import clockless_rows
from tests.train.runs import train_plan

RECIPE = """
name: pair
algorithm: {type: grpo, prompts_per_step: 3, group_size: 4, entropy_coefficient: 0.05}
model: {preset: qwen2-tiny}
policy: {optimizer: {learning_rate: 1.0e-3}}
rollout: {max_new_tokens: 6, record: true}
task: {type: arithmetic}
steps: 2
arms: {baseline: {}, treatment: {policy.logprobs.impl: chunked}}
seeds: [0]
compare: {claims: []}
"""
ELSEWHERE = Path("/nowhere/run/seed-0")  # a run without recordings beside it


def dump_slime(recorded: RecordedStep, folder: Path, text: Text, name: str = "rollout_{}.pt") -> None:
    samples = [
        {
            "group_index": 70 + index,
            "tokens": [*group.prompt, *completion.token_ids],
            "response_length": len(completion.token_ids),
            "reward": completion.reward,
            "loss_mask": None,
            "rollout_log_probs": completion.logprobs,
            "status": "truncated" if completion.truncated else "completed",
            "remove_sample": False,
            "metadata": {},
        }
        for index, group in enumerate(recorded.groups)
        for completion in group.completions
    ]
    content = {"rollout_id": recorded.step - 1, "samples": samples}
    torch.save(content, folder / name.format(recorded.step - 1))


def dump_nemo(recorded: RecordedStep, folder: Path, text: Text) -> None:
    rows = []
    width = max(
        len(group.prompt) + len(completion.token_ids)
        for group in recorded.groups
        for completion in group.completions
    )
    for group in recorded.groups:
        for completion in group.completions:
            length = len(group.prompt) + len(completion.token_ids)
            pad, no_loss = [0] * (width - length), [0.0] * len(group.prompt)
            row = {
                "content": "",
                "rewards": completion.reward,
                "input_lengths": length,
                "token_ids": [*group.prompt, *completion.token_ids, *pad],
                "token_loss_mask": [*no_loss, *[1.0] * len(completion.token_ids), *pad],
                "sample_loss_mask": 1.0,
                "generation_logprobs": [*no_loss, *(completion.logprobs or []), *pad],
            }
            rows.append({key: [value] for key, value in row.items()} | {"idx": len(rows)})
    write_rows(folder / f"train_data_step{recorded.step}.jsonl", rows)


def dump_verl(recorded: RecordedStep, folder: Path, text: Text) -> None:
    rows = [
        {
            "input": text.decode([list(group.prompt)])[0],
            "output": text.decode([list(completion.token_ids)])[0],
            "gts": None,
            "score": completion.reward,
            "step": recorded.step,
        }
        for group in recorded.groups
        for completion in group.completions
    ]
    write_rows(folder / f"{recorded.step}.jsonl", rows[::2] + rows[1::2])  # spread over two ranks


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording, and the recipe that made it."""

    recipe: Path
    experiment: Path
    text: Text

    def dump(self, write: Callable[[RecordedStep, Path, Text], None], source: Path) -> Path:
        folder = source / "seed-0"
        folder.mkdir(parents=True)
        for step in (1, 2):
            write(self.read(step), folder, self.text)
        return source

    def read(self, step: int) -> RecordedStep:
        return read_step(self.experiment / "baseline/seed-0/rollouts", step)

    def problem(self, source: Path, *overrides: str) -> str:
        """Read all dumps as a run does; return why it cannot."""
        override = f"rollout={{engine: recorded, from: {json.dumps(str(source))}, max_new_tokens: 6}}"
        config = load_recipe(self.recipe, [override, *overrides]).run_config("baseline")
        assert isinstance(config, OwnRunConfig)
        with pytest.raises(StoreError) as error:
            rollouts = RecordedRollouts(config, self.text, ELSEWHERE, 0)
            for step in (1, 2):
                rollouts.groups(step, 0, 3, 4)
        return str(error.value)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    recipe = folder / "pair.yaml"
    recipe.write_text(RECIPE)
    train_plan(make_plan(load_recipe(recipe)), folder)
    config = load_recipe(recipe).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return Recorded(recipe, folder / "pair", load_text(config.model, weights=None))


@pytest.mark.parametrize("write", [dump_slime, dump_nemo])
def test_both_arms_train_on_a_dump_as_on_the_recording(
    write: Callable[[RecordedStep, Path, Text], None], recorded: Recorded, tmp_path: Path
) -> None:
    source = recorded.dump(write, tmp_path / "dump")
    rollout = f"rollout={{engine: recorded, from: {source}, max_new_tokens: 6}}"
    train_plan(make_plan(load_recipe(recorded.recipe, [rollout])), tmp_path)
    native = clockless_rows(recorded.experiment / "baseline" / "seed-0")
    baseline, treatment = (
        clockless_rows(tmp_path / "pair" / arm / "seed-0") for arm in ("baseline", "treatment")
    )
    assert baseline == native
    assert treatment[2]["train/reward"] == native[2]["train/reward"]
    assert treatment[1]["train/grad_norm"] == pytest.approx(native[1]["train/grad_norm"], rel=1e-4)


def test_without_the_samplers_logprobs_only_the_metrics_against_it_are_missing(
    recorded: Recorded, tmp_path: Path
) -> None:
    source = recorded.dump(dump_verl, tmp_path / "dump")
    rollout = f"rollout={{engine: recorded, from: {source}, max_new_tokens: 6}}"
    train_plan(make_plan(load_recipe(recorded.recipe, [rollout])), tmp_path)
    native, baseline, treatment = (
        clockless_rows(experiment / arm / "seed-0")
        for experiment, arm in (
            (recorded.experiment, "baseline"),
            (tmp_path / "pair", "baseline"),
            (tmp_path / "pair", "treatment"),
        )
    )
    for step in (1, 2):
        assert set(native[step]) - set(baseline[step]) == set(AGAINST_SAMPLER)
        assert baseline[step]["train/grad_norm"] > 0
        for metric in ("train/grad_norm", "train/entropy", "train/reward"):
            assert treatment[step][metric] == pytest.approx(baseline[step][metric], rel=1e-3)
    verdict = abrun.compare(tmp_path / "pair", output=tmp_path / "report", formats=["json"]).content
    assert verdict["verdict"] != "INVALID"


def test_a_correction_needs_the_samplers_logprobs(recorded: Recorded, tmp_path: Path) -> None:
    source = recorded.dump(dump_verl, tmp_path)
    line = recorded.problem(source, "algorithm.importance_correction={type: truncated, high: 2.0}")
    assert "which importance_correction needs" in line


@pytest.mark.parametrize("write", [dump_slime, dump_nemo, dump_verl])
def test_a_dump_holds_the_recorded_completions(
    write: Callable[[RecordedStep, Path, Text], None], recorded: Recorded, tmp_path: Path
) -> None:
    """verl drops special tokens anywhere in a completion, and this untrained model samples some."""
    special, end_ids = set(recorded.text.tokenizer.all_special_ids), recorded.text.end_ids
    folder = tmp_path / "seed-0"
    folder.mkdir()
    originals = [with_rewards(recorded.read(step)) for step in (1, 2)]
    for original in originals:
        write(original, folder, recorded.text)
    dumps = find_foreign_rollouts(str(tmp_path), ELSEWHERE, 0)
    assert dumps and dumps.num_steps == 2
    num_equal = 0
    for original in originals:
        again = dumps.read_step(original.step, recorded.text, group_size=4, max_new_tokens=6)
        assert [group.prompt for group in again.groups] == [group.prompt for group in original.groups]
        for group, expected in zip(again.groups, original.groups, strict=True):
            completions = {completion.reward: completion for completion in group.completions}
            assert len(completions) == 4
            for completion in expected.completions:
                read = completions[completion.reward]
                *inner, last = completion.token_ids
                if write is dump_verl and special & {*inner, *({last} - end_ids)}:
                    continue
                num_equal += 1
                assert list(read.token_ids) == list(completion.token_ids)
                assert read.truncated == completion.truncated
                assert read.logprobs == (None if write is dump_verl else completion.logprobs)
    assert num_equal == 24 if write is not dump_verl else num_equal > 12


def with_rewards(recorded: RecordedStep) -> RecordedStep:
    """Return a step with a different reward for each completion of a group."""
    groups = [
        replace(
            group,
            completions=[
                replace(completion, reward=index / 4) for index, completion in enumerate(group.completions)
            ],
        )
        for group in recorded.groups
    ]
    return replace(recorded, groups=groups)


def spoil_rows(path: Path, **changes: Any) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] = {key: value for key, value in (rows[1] | changes).items() if value is not None}
    write_rows(path, rows)


def spoil_vocabulary(path: Path) -> None:
    [token_ids] = json.loads(path.read_text().splitlines()[1])["token_ids"]
    [mask] = json.loads(path.read_text().splitlines()[1])["token_loss_mask"]
    token_ids[mask.index(1.0)] = 9**9
    spoil_rows(path, token_ids=[token_ids])


def spoil_samples(path: Path, **changes: Any) -> None:
    content = torch.load(path, weights_only=True)
    content["samples"][1] |= changes
    torch.save(content, path)


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


NEMO = {
    "torn": (lambda path: os.truncate(path, path.stat().st_size - 9), "is torn or no JSON"),
    "nan": (lambda path: spoil_rows(path, rewards=[math.nan]), "a reward of nan"),
    "no ids": (lambda path: spoil_rows(path, token_ids=None), "without 'token_ids'"),
    "text": (lambda path: spoil_rows(path, token_ids=[["a"]]), "no list of integers"),
    "vocabulary": (
        lambda path: spoil_vocabulary(path),
        "beyond the model's vocabulary",
    ),
    "masked": (lambda path: spoil_rows(path, sample_loss_mask=[0.0]), "left out of the loss"),
    "empty": (lambda path: path.write_text(""), "no completions"),
    "array": (lambda path: path.write_text("[1]\n"), "line 1 is no object"),
    "deep": (lambda path: path.write_text("[" * 100_000), "recursion|torn"),
    "missing": (lambda path: path.unlink(), "it holds 1 steps, but the run takes 2"),
    "gap": (lambda path: path.rename(path.parent / "train_data_step3.jsonl"), "lacks the dump of step 2"),
    "two": (lambda path: (path.parent / "train_data_step02.jsonl").write_text(""), "two dumps of step 2"),
    "verl": (lambda path: (path.parent / "1.jsonl").write_text(""), "dumps of verl and nemo-rl"),
}
SLIME = {
    "torn": (lambda path: os.truncate(path, 900), "torn, or not written by torch.save"),
    "empty": (lambda path: path.write_bytes(b""), "torn, or not written by torch.save"),
    "aborted": (lambda path: spoil_samples(path, status="aborted"), "status 'aborted'"),
    "reward": (lambda path: spoil_samples(path, reward={"score": 1.0}), "a reward of {'score'"),
    "lengths": (lambda path: spoil_samples(path, rollout_log_probs=[-1.0]), "1 log-probs of"),
    "tool": (lambda path: spoil_samples(path, loss_mask=[1, 0]), "masked out of the loss"),
    "code": (lambda path: torch.save(Malicious(path.parent / "owned"), path), "can run code"),
    "other": (lambda path: torch.save({"weight": torch.ones(2)}, path), "no list 'samples'"),
}


@pytest.mark.parametrize(
    ("write", "name"), [*((dump_nemo, name) for name in NEMO), *((dump_slime, name) for name in SLIME)]
)
def test_unusable_dumps_are_one_line(
    write: Callable[[RecordedStep, Path, Text], None], name: str, recorded: Recorded, tmp_path: Path
) -> None:
    source = recorded.dump(write, tmp_path)
    is_nemo = write is dump_nemo
    spoil, problems = (NEMO if is_nemo else SLIME)[name]
    spoil(source / "seed-0" / ("train_data_step2.jsonl" if is_nemo else "rollout_1.pt"))
    line = recorded.problem(source)
    assert any(problem in line for problem in problems.split("|")), line
    assert "\n" not in line and len(line) < 400
    assert not (source / "seed-0" / "owned").exists()


def test_dumps_of_no_seed_are_refused(recorded: Recorded, tmp_path: Path) -> None:
    source = recorded.dump(dump_slime, tmp_path)
    assert "move those of one run to seed-0/" in recorded.problem(source / "seed-0")


def test_trl_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "completions_00001.parquet").write_bytes(b"PAR1")
    assert "TRL logs texts without token ids" in recorded.problem(tmp_path)
