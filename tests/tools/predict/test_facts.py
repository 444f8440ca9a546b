"""Answers about memory that later launches find again, and what makes them new questions."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from abrun.recipe.experiment import load_recipe
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig
from abrun.tools.predict import facts
from abrun.tools.predict.facts import NO_MEMORY_KEYS, cache_folder, make_key, read_answer, store_answer
from abrun.tools.predict.probes import ask_longest, ask_measured, ask_predicted
from abrun.tools.predict.trace import trace

SMALL = Path(__file__).parents[2] / "launch" / "small.yaml"
ANSWER = {"peak_bytes": 7}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def config_of(*sets: str) -> OwnRunConfig:
    config = load_recipe(SMALL, [*sets]).run_config("baseline")
    assert isinstance(config, OwnRunConfig)
    return config


def changed(section: Any, key: str) -> Any:
    """The same with another value of a dotted key, allowed or not."""
    name, _, rest = key.partition(".")
    value = getattr(section, name)
    if rest:
        return section.model_copy(update={name: changed(value, rest)})
    kinds = {
        bool: lambda: not value,
        int: lambda: value + 1,
        float: lambda: 2 * value + 1,
        type(None): lambda: 7,
    }
    return section.model_copy(update={name: kinds.get(type(value), lambda: f"{value}x")()})


def test_every_setting_that_can_change_a_peak_changes_the_question() -> None:
    """All fields of the sections but four of the optimizer, which the next test traces."""
    config = config_of("algorithm.kl_coefficient=0.1")
    keys = dotted(
        {key: config.model_dump()[key] for key in ("model", "policy", "rollout", "algorithm", "cluster")}
    )
    assert len(keys) > 60
    same = []
    with warnings.catch_warnings(action="ignore"):
        known = {make_key("predicted", config, {})}
        for key in keys:
            new = make_key("predicted", changed(config, key), {})
            (same.append(key) if new in known else known.add(new))
    assert same == [key for key in keys if key in NO_MEMORY_KEYS] and len(same) == 4


def test_settings_without_effect_on_memory_leave_the_predicted_peaks_as_they_are() -> None:
    rate = "policy.optimizer={learning_rate: 0.5, min_learning_rate: 0.1, schedule: linear, warmup_steps: 2}"
    other = config_of(rate, "steps=77", "checkpoint.every=3", "keep_samples=null", "limits.retries=0")
    assert other != config_of()
    assert list(trace(other, [32], 1)) == list(trace(config_of(), [32], 1))
    assert ask_predicted("x", other, 32, 1) == ask_predicted("y", config_of(), 32, 1)
    assert ask_longest("x", other) != ask_longest("y", config_of())  # steps decide what is searched


def test_sizes_devices_files_variables_and_software_change_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    assert ask_predicted("x", config, 32, 1) != ask_predicted("x", config, 16, 2)
    h100, h200 = (ask_measured("x", config, 32, 1, 2**30, [gpu]) for gpu in ("H100", "H200"))
    assert len({h100.key, h200.key, ask_measured("x", config, 32, 1, 2**31, ["H100"]).key}) == 3
    assert ask_longest("x", config) == ask_longest("x", config_of("policy.packing=true"))
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    with_file = config_of(f"task={{type: gsm8k, path: {data}}}")
    keys = [make_key("longest", with_file, {})]
    data.write_text('{"question": "longer"}')
    keys.append(make_key("longest", with_file, {}))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    keys.append(make_key("longest", with_file, {}))
    monkeypatch.setattr(facts, "_hash_software", lambda: "another torch")
    keys.append(make_key("longest", with_file, {}))
    assert len({*keys}) == 4
    assert keys[-1] == make_key("longest", with_file, {})


def test_an_answer_is_found_again_unless_it_is_damaged() -> None:
    store_answer("a", ANSWER)
    found = read_answer("a")
    assert found and found[0] == ANSWER and len(found[1]) == len("2026-11-27")
    path = cache_folder() / "a.json"
    whole = path.read_bytes()
    for damaged in (b"", whole[:-9], whole.replace(b"7", b"8", 1), b"[]", b"\xff" * 99, b"[" * 99_999):
        path.write_bytes(damaged)
        assert read_answer("a") is None
    store_answer("a", ANSWER)
    assert read_answer("a") and read_answer("b") is None
    assert [file.name for file in cache_folder().iterdir()] == ["a.json"]


def test_the_number_of_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "MAX_ANSWERS", 3)
    for number in range(5):
        store_answer(str(number), {"number": number})
    kept = {json.loads(file.read_text())["answer"]["number"] for file in cache_folder().iterdir()}
    assert len(kept) == 3 and 4 in kept


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store_answer("a", ANSWER)
    assert read_answer("a") is None
