"""Pairs that did not have the same place: a note where a reader has to know, never a reason against them."""

import json
from pathlib import Path
from typing import Any

import pytest

from abrun.compare import Comparison, Reading, compare_sources
from tests.compare.simulate import edit, write_experiment

ONE = "1 of 5 pairs of treatment ran"
CARE = ": times compare with care"
TREATED = "treatment/seed-2"


def compare(experiment_dir: Path) -> Comparison:
    return compare_sources([str(experiment_dir)], Reading(), formats=())


def place(run: Path, started_s: float, ended_s: float, **environment: Any) -> None:
    edit(run / "attempts" / "0001.json", lambda attempt: attempt.update(started_s=started_s, ended_s=ended_s))
    edit(run / "environment.json", lambda content: content.update(environment))


@pytest.mark.parametrize(
    ("treated", "expected"),
    [
        ({"started_s": 100.0}, None),
        ({"started_s": 9000.0}, None),  # one after the other, as on one machine
        (
            {"started_s": 9000.0 + 7200},
            f"{ONE} hours apart (seed 2: 2.0 h between its runs){CARE}",
        ),
        (
            {"started_s": 0.0, "hosts": ["n2", "n3"]},
            f"{ONE} on other hosts than their baseline (seed 2: n2, n3 against n1){CARE}",
        ),
        (
            {"started_s": 0.0, "drivers": ["580.1"]},
            f"{ONE} on other drivers than their baseline (seed 2: 580.1 against 570.86){CARE}",
        ),
    ],
)
def test_a_pair_that_was_placed_otherwise_is_a_note_and_no_more(
    tmp_path: Path, treated: dict[str, Any], expected: str | None
) -> None:
    experiment_dir = write_experiment(tmp_path / "placed", seeds=[0, 1, 2, 3, 4])
    for run in sorted(experiment_dir.glob("*/seed-*")):
        place(run, 0.0, 9000.0, hosts=["n1"], drivers=["570.86"])
    before = compare(experiment_dir)
    assert before.content.notes == []
    ended_s = treated["started_s"] + 9000.0
    place(experiment_dir / TREATED, **{"ended_s": ended_s, **treated})
    after = compare(experiment_dir)
    assert after.content.notes == ([expected] if expected else [])
    assert after.verdict == before.verdict


def test_other_devices_are_a_reason(tmp_path: Path) -> None:
    experiment_dir = write_experiment(tmp_path / "placed")
    edit(experiment_dir / TREATED / "environment.json", lambda content: content.update(devices=["H200"]))
    assert "devices differ between" in json.dumps(compare(experiment_dir).content.reasons)


def test_another_precision_of_the_head_is_a_note(tmp_path: Path) -> None:
    experiment_dir = write_experiment(tmp_path / "placed", seeds=[0, 1, 2, 3, 4])
    precision = {"projection": "bfloat16", "logits": "bfloat16", "engine": "bfloat16"}
    for run in sorted(experiment_dir.glob("*/seed-*")):
        place(run, 0.0, 9000.0, precision=precision)
    assert compare(experiment_dir).content.notes == []
    for run in sorted(experiment_dir.glob("treatment/seed-*")):
        place(run, 0.0, 9000.0, precision=precision | {"logits": "float32", "engine": "float32"})
    assert compare(experiment_dir).content.notes == [
        "treatment: the trainer's logits in float32 instead of bfloat16, the rollout engine's LM head in "
        "float32 instead of bfloat16"
    ]
