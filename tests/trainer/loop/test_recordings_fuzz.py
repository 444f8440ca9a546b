"""Damaged recordings: refused in one line, or trained on as written."""

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from abrun.errors import StoreError
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from abrun.runs import rollouts
from abrun.runs.rollouts import RecordedCompletion, RecordedGroup, RecordedStep, step_path
from abrun.trainer.loop.data import Group, RecordedGroups, origin_of
from abrun.trainer.models.text import Text, load_text
from tests.fuzzing import SEED, WORDS, bounded, check_line, damaged, rounds
from tests.trainer.loop.test_recorded_rollouts import RECIPE

ELSEWHERE = Path("/nowhere/run/seed-0")
PROMPTS, COMPLETIONS = ["1+2=", "3+4=", "0+9="], ["3", "7", "12", "5"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> OwnRunConfig:
    path = tmp_path_factory.mktemp("recipe") / "pair.yaml"
    path.write_text(RECIPE)
    config = load_recipe(path, ["steps=1"]).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return config


@pytest.fixture(scope="module")
def text(config: OwnRunConfig) -> Text:
    return load_text(config.model, weights=None)


@pytest.fixture(scope="module")
def recorded(config: OwnRunConfig, text: Text) -> RecordedStep:
    groups = []
    for prompt in PROMPTS:
        completions = []
        for number, answer in enumerate(COMPLETIONS):
            token_ids = [*text.encode_text(answer), int(text.end_id or 0)]
            logprobs = [-0.25 * (position + 1) for position in range(len(token_ids))]
            completions.append(
                RecordedCompletion(token_ids=token_ids, logprobs=logprobs, reward=number / 4, truncated=False)
            )
        groups.append(RecordedGroup(prompt=text.encode_text(prompt), completions=completions))
    return RecordedStep(step=1, groups=groups, origin=origin_of(config, text, 0))


def read(config: OwnRunConfig, text: Text, source: Path) -> list[Group] | None:
    """Read a recording as a run does; None if it is refused, which must be one line."""
    changed = config.rollout.model_copy(update={"engine": "recorded", "from": str(source), "record": False})
    try:
        with bounded():
            recorded = RecordedGroups(config.model_copy(update={"rollout": changed}), text, ELSEWHERE, 0)
            return recorded.groups(1, 0, len(PROMPTS), len(COMPLETIONS))
    except StoreError as error:
        check_line(error)
        return None


def check_groups(groups: list[Group] | None) -> None:
    """What is trained on has tokens of the vocabulary, a log-prob for each, and finite rewards."""
    for group in groups or []:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            torch.tensor([*group.prompt, *completion.token_ids])
            values = torch.tensor(completion.logprobs, dtype=torch.float32)
            assert len(values) == len(completion.token_ids) > 0 and group.prompt
            assert not torch.isinf(values).any() and math.isfinite(reward)


def draws(usual: int) -> list[random.Random]:
    return [random.Random(f"{SEED}-native-{number}") for number in range(rounds(usual))]


def damage_bytes(usual: int, recorded: RecordedStep, config: Any, text: Text, folder: Path) -> None:
    place = folder / "seed-0"
    place.mkdir()
    step_path(place, 1).write_bytes(recorded.encode())
    [path] = place.iterdir()
    content, original = path.read_bytes(), read(config, text, folder)
    assert original
    for draw in draws(usual):
        path.write_bytes(damaged(content, draw))
        groups = read(config, text, folder)
        check_groups(groups)
        assert groups in (None, original)


def test_damaged_bytes(recorded: RecordedStep, config: Any, text: Text, tmp_path: Path) -> None:
    damage_bytes(40, recorded, config, text, tmp_path)


@pytest.mark.slow
def test_many_damaged_bytes(recorded: RecordedStep, config: Any, text: Text, tmp_path: Path) -> None:
    damage_bytes(2000, recorded, config, text, tmp_path)


ARRAYS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda array: array.astype(np.float32),
    lambda array: array.astype(np.uint8),
    lambda array: array.reshape(1, -1),
    lambda array: array[:0],
    lambda array: array[:-1],
    lambda array: np.concatenate([array, array[-1:]]),
    lambda array: array[:1].reshape(()),
    lambda array: np.full_like(array, 2**62),  # a sum that overflows
    lambda array: -array.astype(np.int64),
)
HEADERS = (None, [1], {"a": 1}, True, -1, 2**70, 1e999, "a\nb", "\x1b[31m", "x" * 9000)


def test_arrays_and_headers_of_other_types(
    recorded: RecordedStep, config: Any, text: Text, tmp_path: Path
) -> None:
    """Checksums fit the changed content: what is refused here is refused for its form."""
    place = tmp_path / "seed-0"
    place.mkdir()
    path = step_path(place, 1)
    path.write_bytes(recorded.encode())
    original, header = load_file(path), rollouts._read_header(path)
    assert read(config, text, tmp_path)
    for name in original:
        for change in ARRAYS:
            arrays = {**original, name: change(original[name])}
            changed = {**header, "sha256": rollouts._digest(arrays)}
            save_file(arrays, path, {"abrun": json.dumps(changed)})
            is_equal = arrays[name].dtype == original[name].dtype and np.array_equal(
                arrays[name], original[name]
            )
            groups = read(config, text, tmp_path)
            assert groups is None or is_equal or name in ("truncated", "rewards", rollouts.LOGPROBS), name
            check_groups(groups)
    for name in header:
        for value in HEADERS:
            save_file(original, path, {"abrun": json.dumps({**header, name: value})})
            check_groups(read(config, text, tmp_path))
    for content in ("", "[]", "[" * 100_000, "{", "NaN", *(word.decode(errors="replace") for word in WORDS)):
        save_file(original, path, {"abrun": content})
        assert read(config, text, tmp_path) is None


def test_other_things_in_place_of_a_file(
    recorded: RecordedStep, config: Any, text: Text, tmp_path: Path
) -> None:
    place = tmp_path / "seed-0"
    place.mkdir()
    step_path(place, 1).write_bytes(recorded.encode())
    [path] = place.iterdir()
    moved = tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert read(config, text, tmp_path)  # a link to a file is a file
    path.unlink()
    path.symlink_to(path)
    assert read(config, text, tmp_path) is None
    path.unlink()
    path.mkdir()
    assert read(config, text, tmp_path) is None
    path.rmdir()
    os.mkfifo(path)
    assert read(config, text, tmp_path) is None
    path.unlink()
    place.rmdir()
    place.write_bytes(b"")
    assert read(config, text, tmp_path) is None
