"""Series in one JSON object: golden values of other projects, on one line or indented."""

import json
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.logs import read_logs
from tests.logs.test_spellings import written
from tests.logs.test_tables import one, values


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["metrics.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "document",
    [
        {"loss": {"1": 0.5, "6": 0.25}},
        {"loss": {"start_step": 1, "end_step": 7, "step_interval": 5, "values": [0.5, 0.25]}},
        {"loss": {"start_step": 1, "end_step": 7, "step_interval": 5, "values": {"1": 0.5, "6": 0.25}}},
        {"loss": {"steps": [1, 6], "values": [0.5, 0.25]}},
        {"loss": [0.5, 0.25], "step": [1, 6], "betas": [0.9, 0.95, 1]},
    ],
)
def test_series(tmp_path: Path, document: dict[str, Any], name: str, indent: int | None) -> None:
    written(tmp_path / name, json.dumps(document, indent=indent))
    assert values(one(tmp_path), "loss") == {1: 0.5, 6: 0.25} == values(one(tmp_path / name), "loss")


def test_folders_numbers_as_text_and_other_steps(tmp_path: Path) -> None:
    document = {"train": {"loss": {"2": "nan", "1": 3}}, "val/acc": {"10": 0.5}, "seed": 7, "note": "x"}
    log = one(written(tmp_path / "golden_values_dev.json", json.dumps(document)))
    assert log.metrics.keys() == {"train/loss", "val/acc"} and values(log, "val/acc") == {10: 0.5}
    assert log.metrics["train/loss"].steps.tolist() == [1, 2]
    odd = written(tmp_path / "odd.json", json.dumps({"loss": {"1": 0.5, "2": "high", "3": 0.25}}))
    assert "odd.json, step 2, column loss: got 'high'" in one(odd).unread["loss"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (
            {"loss": [0.5, 0.25], "acc": [1, 2]},
            "lists of values without their steps: 'loss', 'acc'; add a list",
        ),
        (
            {"lr": 0.1, "layers": {"a": 1}},
            "one JSON object with 'lr', 'layers'; expected metrics by step, {metric",
        ),
    ],
)
def test_other_objects_are_refused_by_what_they_hold(
    tmp_path: Path, document: dict[str, Any], problem: str
) -> None:
    path = written(tmp_path / "a.json", json.dumps(document, indent=2))
    with pytest.raises(StoreError) as refusal:
        read_logs(str(path))
    assert str(refusal.value).startswith(f"{path}: {problem}")


def test_configurations_beside_logs_and_lists_within_rows_are_left_alone(tmp_path: Path) -> None:
    written(tmp_path / "config.json", json.dumps({"layers": {"a": 1}, "lr": 0.1}))
    written(tmp_path / "a.jsonl", json.dumps({"rewards": [1, 2], "step": 1, "loss": 0.5}) + "\n")
    log = one(tmp_path)
    assert values(log, "loss") == {1: 0.5} and not log.guesses
