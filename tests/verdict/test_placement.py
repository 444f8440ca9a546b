"""Pairs that did not have the same place: a note where a reader has to know, never a reason against them."""

from pathlib import Path
from typing import Any

import pytest

from abrun.messages import sentence, sentences
from abrun.reasons import Code, Reason
from abrun.report.comparing import Comparison, Reading, compare_sources
from tests.snapshot import Snapshot
from tests.verdict.simulate import edit, write_experiment

ONE_PAIR: dict[str, Any] = {"arm": "treatment", "num_differing": 1, "num_pairs": 5, "seed": 2}
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
            Code.HOURS_APART(arm="treatment", num_apart=1, num_pairs=5, seed=2, gap_s=7200.0),
        ),
        (
            {"started_s": 0.0, "hosts": ["n2", "n3"]},
            Code.OTHER_MACHINES(kind="hosts", value="n2, n3", baseline="n1", **ONE_PAIR),
        ),
        (
            {"started_s": 0.0, "drivers": ["580.1"]},
            Code.OTHER_MACHINES(kind="drivers", value="580.1", baseline="570.86", **ONE_PAIR),
        ),
    ],
)
def test_a_pair_that_was_placed_otherwise_is_a_note_and_no_more(
    tmp_path: Path, snapshot: Snapshot, treated: dict[str, Any], expected: Reason | None
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
    snapshot("\n".join(sentences(after.content.notes)))
    assert after.verdict == before.verdict


def test_other_devices_are_a_reason(tmp_path: Path) -> None:
    experiment_dir = write_experiment(tmp_path / "placed")
    edit(experiment_dir / TREATED / "environment.json", lambda content: content.update(devices=["H200"]))
    reasons = compare(experiment_dir).content.reasons
    assert [(reason.code, reason["key"]) for reason in reasons] == [(Code.ENVIRONMENT_DIFFERS, "devices")]


def test_another_precision_of_the_head_is_a_note(tmp_path: Path, snapshot: Snapshot) -> None:
    experiment_dir = write_experiment(tmp_path / "placed", seeds=[0, 1, 2, 3, 4])
    precision = {"projection": "bfloat16", "logits": "bfloat16", "engine": "bfloat16"}
    for run in sorted(experiment_dir.glob("*/seed-*")):
        place(run, 0.0, 9000.0, precision=precision)
    assert compare(experiment_dir).content.notes == []
    for run in sorted(experiment_dir.glob("treatment/seed-*")):
        place(run, 0.0, 9000.0, precision=precision | {"logits": "float32", "engine": "float32"})
    (note,) = compare(experiment_dir).content.notes
    assert note.code is Code.PRECISION_DIFFERS and note["arm"] == "treatment"
    assert set(map(tuple, note["precisions"].values())) == {("bfloat16", "float32")}
    snapshot(sentence(note))
