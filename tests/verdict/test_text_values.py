"""Numbers that a log holds as text: read, or a reason for INVALID, and never a match without them."""

import json
import math
import random
from pathlib import Path

import pytest

from abrun.errors import ComparisonError, StoreError
from abrun.messages.codes import Code
from tests.verdict.test_anything import described

CLAIM = "train/reward:last 20%:0.05"
COLLAPSED = 0.6  # how much lower the treatment ends


def curve(arm: str, seed: int, num_steps: int = 60) -> list[float]:
    draw = random.Random(f"{arm} {seed}")
    return [0.1 + 0.7 * (1 - math.exp(-step / 15)) + draw.gauss(0, 0.01) for step in range(1, num_steps + 1)]


def write_arms(folder: Path, rows_of, kind: str = "csv") -> list[str]:
    """Two arms of three seeds; `rows_of(arm, seed)` are the rows, a header first in CSV."""
    for arm in ("old", "new"):
        (folder / arm).mkdir(parents=True, exist_ok=True)
        for seed in (1, 2, 3):
            rows = rows_of(arm, seed)
            lines = [json.dumps(row) for row in rows]
            if kind == "csv":
                lines = [",".join(rows[0]), *(",".join(f'"{cell}"' for cell in row.values()) for row in rows)]
            (folder / arm / f"seed{seed}.{kind}").write_text("\n".join(lines) + "\n")
    return [str(folder / arm) for arm in ("old", "new")]


def rows(
    arm: str,
    seed: int,
    *,
    step: str = "{}",
    value: str = "{:.5f}",
    from_step: int = 0,
    collapses: bool = True,
):
    """`value` writes rewards from `from_step` on; before it they have a plain point."""
    for at, reward in enumerate(curve(arm, seed), 1):
        late = arm == "new" and collapses and at > 30
        form = value if at > from_step else "{:.5f}"
        text = form.format(reward - COLLAPSED * late)
        yield {"step": step.format(100 * at), "reward": text, "loss": f"{1.5 - reward:.5f}"}


@pytest.mark.parametrize(
    ("kind", "step"), [("csv", "{:,}"), ("jsonl", "{:,}"), ("csv", "{}/6000"), ("jsonl", "{:.3f}")]
)
def test_a_collapse_behind_steps_of_text_is_seen(tmp_path: Path, kind: str, step: str) -> None:
    sources = write_arms(tmp_path, lambda arm, seed: list(rows(arm, seed, step=step)), kind)
    found = described(sources, tmp_path / "out", CLAIM)
    (claim,) = found.content.claims
    assert found.verdict == "MISMATCH" and claim.claim.steps == (4900, 6000) and claim.claim.num_steps == 12
    assert claim.estimate.mean_difference == pytest.approx(-COLLAPSED, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "value", "from_step", "collapses"),
    [
        ("csv", "{:.2%}", 30, True),
        ("jsonl", "{:.3f} r", 55, False),
        ("csv", "diverged", 55, True),
        ("jsonl", "diverged", 30, False),
    ],
)
def test_values_left_out_of_the_window_in_every_run_are_invalid(
    tmp_path: Path, kind: str, value: str, from_step: int, collapses: bool
) -> None:
    """Of every run the same steps are left out, so that the grids agree: the rest would match."""

    def of(arm: str, seed: int):
        return list(rows(arm, seed, value=value, from_step=from_step, collapses=collapses))

    found = described(write_arms(tmp_path, of, kind), tmp_path / "out", CLAIM)
    assert found.verdict == "INVALID"
    reason = next(reason for reason in found.content.reasons if reason.code is Code.TEXT_VALUES)
    assert (reason["run"], reason["num_values"], reason["metric"], reason["step"]) == (
        "old/seed-1",
        60 - from_step,
        "train/reward",
        100 * (from_step + 1),
    )
    line = from_step + (2 if kind == "csv" else 1)
    assert f"line {line}, column reward" in reason["remedy"]


def test_the_trainers_own_mismatch_with_the_engine_may_not_be_text(tmp_path: Path) -> None:
    def of(arm: str, seed: int):
        name = "train/token_mult_prob_error"
        return [
            row | {name: "inf!" if arm == "new" and index == 20 else "1.01"}
            for index, row in enumerate(rows(arm, seed, collapses=False))
        ]

    found = described(write_arms(tmp_path, of), tmp_path / "out", CLAIM)
    assert found.verdict == "INVALID"
    values = [reason for reason in found.content.reasons if reason.code is Code.TEXT_VALUES]
    assert {(reason["metric"], reason["num_values"]) for reason in values} == {
        ("train/token_mult_prob_error", 1)
    }


def test_a_step_that_cannot_be_read_is_never_dropped(tmp_path: Path) -> None:
    def of(arm: str, seed: int):
        return [
            row | ({"step": f"{index / 10}k"} if index >= 30 else {})
            for index, row in enumerate(rows(arm, seed))
        ]

    with pytest.raises((ComparisonError, StoreError), match=r"line 32, column step: got '3\.0k' "):
        described(write_arms(tmp_path, of), tmp_path / "out", CLAIM)


@pytest.mark.parametrize("name", ["memory", "memory/gpu", "final_weights"])
def test_metrics_whose_names_mean_something_in_a_claim_are_described(tmp_path: Path, name: str) -> None:
    def of(arm: str, seed: int):
        return [
            {"step": index, name: 20 + reward, "reward": reward}
            for index, reward in enumerate(curve(arm, seed), 1)
        ]

    found = described(write_arms(tmp_path, of, "jsonl"), tmp_path / "out")
    assert name in [one["metric"] for one in found.content.select("description")]
    write_arms(
        tmp_path / "alone",
        lambda arm, seed: [{"step": r["step"], name: r[name]} for r in of(arm, seed)],
        "jsonl",
    )
    alone = [str(tmp_path / "alone" / arm) for arm in ("old", "new")]
    assert [one["metric"] for one in described(alone, tmp_path / "out2").content.select("description")] == [
        name
    ]


@pytest.mark.parametrize("in_later_start", [False, True])
def test_text_that_a_later_start_repeats_as_a_number_is_left_out_no_more(
    tmp_path: Path, in_later_start: bool
) -> None:
    """Steps 41-60 are logged by both starts of a run, and step 55 as text by one of them."""
    for arm in ("old", "new"):
        for seed in (1, 2, 3):
            found = list(rows(arm, seed, collapses=False))
            starts = {"20261120-0900": found[:58], "20261120-1100": found[40:]}
            odd = "20261120-1100" if in_later_start else "20261120-0900"
            starts[odd] = [row | ({"reward": "n/a"} if row["step"] == "5500" else {}) for row in starts[odd]]
            for name, lines in starts.items():
                path = tmp_path / arm / f"seed{seed}" / f"{name}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = described([str(tmp_path / "old"), str(tmp_path / "new")], tmp_path / "out", CLAIM)
    assert found.verdict == ("INVALID" if in_later_start else "MATCH"), found.content.reasons
