"""Runs whose metrics have steps of their own, or are logged at different steps from arm to arm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.verdict.decide import Verdict
from abrun.verdict.grids import find_missing_steps
from tests.logs.layouts import Rows, rows, write_events, write_jsonl
from tests.snapshot import Snapshot
from tests.verdict.recorded import run_of
from tests.verdict.test_anything import described

Change = Callable[[str, Rows], Rows]
CLAIM = "train/reward:last 20%:0.05"
BY_SAMPLES = "lm loss vs samples"  # a tag of Megatron-LM


def arms(folder: Path, change: Change, seeds: range = range(3), worse: float = 0.0) -> list[str]:
    """Logs of two arms alike but for their change; the treatment's reward is lower by `worse`."""
    for seed in seeds:
        for arm, loss in (("old", 0.0), ("new", worse)):
            found = [{**row, "reward": row["reward"] - loss} for row in rows(arm, seed)]
            write_jsonl(folder / arm / f"seed-{seed}.jsonl", change(arm, found))
    return [str(folder / arm) for arm in ("old", "new")]


def unchanged(arm: str, found: Rows) -> Rows:
    return found


def every(coarser: int, finer: int) -> Change:
    return lambda arm, found: [
        row for row in found if row["step"] % (finer if arm == "old" else coarser) == 0
    ]


def test_metrics_on_another_axis_move_no_window(tmp_path: Path) -> None:
    """GPU monitors log over seconds: more of them, and much later, than the steps of training."""

    def monitored(arm: str, found: Rows) -> Rows:
        return [*found, *({"step": second, "ray/gpu_util": 80.0} for second in range(0, 4000, 10))]

    plain = described(arms(tmp_path / "plain", unchanged, worse=0.1), tmp_path / "a", CLAIM)
    watched = described(arms(tmp_path / "watched", monitored, worse=0.1), tmp_path / "b", CLAIM)
    assert plain.verdict == watched.verdict == "MISMATCH"
    assert plain.content.claims == watched.content.claims
    assert watched.arms[0].coverage == plain.arms[0].coverage
    shown = described(arms(tmp_path / "shown", monitored, worse=0.1), tmp_path / "c")
    shown = shown.content.select("description")
    assert shown[0]["metric"] == "train/reward" and shown[0]["steps"] == plain.content.claims[0].claim.steps
    assert {one["metric"]: one["steps"] for one in shown}["ray/gpu_util"] == (3200, 3990)


def test_tags_over_samples_have_windows_of_their_own(tmp_path: Path) -> None:
    for arm, loss in (("old", 0.0), ("new", 0.3)):
        for seed in (0, 1, 2):
            steps = [
                {"step": row["step"], "lm loss": row["loss"] + loss * (row["step"] > 48)}
                for row in rows(arm, seed)
            ]
            samples = [{"step": 256 * row["step"], "loss": row["lm loss"]} for row in steps]
            write_events(tmp_path / f"{arm}-s{seed}", steps, {"lm loss": "lm loss"})
            write_events(tmp_path / f"{arm}-s{seed}", samples, {"loss": BY_SAMPLES}, suffix=".samples")
    found = described([f"tb:{tmp_path}"], tmp_path / "out", baseline="old")
    by_metric = {one["metric"]: one for one in found.content.select("description")}
    assert by_metric["train/loss"]["steps"] == (49, 60)
    assert by_metric[BY_SAMPLES]["steps"] == (49 * 256, 60 * 256)
    for metric in ("train/loss", BY_SAMPLES):
        assert by_metric[metric]["difference"] == pytest.approx(0.3, abs=0.02)


def grid(first: int, last: int, every: int = 1) -> dict[str, int]:
    return {"first": first, "last": last, "every": every}


@pytest.mark.parametrize(
    ("change", "window", "steps", "values"),
    [
        (
            every(10, 5),
            "last 20%",
            (50, 60),
            {"grids": {"old": grid(5, 60, 5), "new": grid(10, 60, 10)}, "averaged": True, "num_shared": 6},
        ),
        (
            lambda arm, found: found if arm == "old" else found[:45],
            "steps 30-45",
            (30, 45),
            {"grids": {"old": grid(1, 60), "new": grid(1, 45)}, "averaged": False, "num_shared": 45},
        ),
        (
            lambda arm, found: found if arm == "new" else found[:59],
            "last 20%",
            (49, 59),
            {"grids": {"old": grid(1, 59), "new": grid(1, 60)}, "averaged": False, "num_shared": 59},
        ),
        (
            lambda arm, found: [{**row, "step": row["step"] - (arm == "old")} for row in found],
            "last 20%",
            (48, 59),
            {"grids": {"old": grid(0, 59), "new": grid(1, 60)}, "late": "new", "num_shared": 59},
        ),
    ],
)
def test_runs_are_compared_on_the_steps_that_all_have(
    tmp_path: Path,
    change: Change,
    window: str,
    steps: tuple[int, int],
    values: dict[str, Any],
    snapshot: Snapshot,
) -> None:
    found = described(arms(tmp_path, change), tmp_path / "out", f"train/reward:{window}:0.05")
    assert found.verdict == "MATCH" and found.content.claims[0].claim.steps == steps
    (note,) = [one for one in found.content.reasons if one.code in (Code.GRIDS_DIFFER, Code.COUNTERS_DIFFER)]
    assert {name: note[name] for name in values} == values
    snapshot(sentence(note))
    worse = described(arms(tmp_path, change, worse=0.2), tmp_path / "out", f"train/reward:{window}:0.05")
    assert worse.verdict == "MISMATCH"


def without(*steps: int) -> Change:
    return lambda arm, found: found if arm == "old" else [row for row in found if row["step"] not in steps]


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (
            without(55),
            Code.STEPS_MISSING,
            {"num_missing": 1, "num_expected": 12, "first": 49, "last": 60, "step": 55},
        ),
        (
            lambda arm, found: found if arm == "old" else found[:45],
            Code.STEPS_MISSING,
            {"runs": ["new/seed-0", "new/seed-1", "new/seed-2"], "run_ends": 45, "step": 49},
        ),
        (
            lambda arm, found: [row for row in found if row["step"] % (5 if arm == "old" else 7) == 0],
            Code.FEW_SHARED_STEPS,
            {"metric": "train/reward", "num_shared": 0, "first": 50, "last": 60},
        ),
    ],
)
def test_a_window_that_a_run_lacks_is_invalid(
    tmp_path: Path,
    change: Change,
    code: Code,
    values: dict[str, Any],
) -> None:
    found = described(arms(tmp_path, change), tmp_path / "out", CLAIM)
    verdict: Verdict = "INVALID"
    assert found.verdict == verdict and [one.code for one in found.content.reasons][:1] == [code]
    reason = found.content.reasons[0]
    assert {name: reason[name] for name in values} == values


def test_a_run_that_ended_early_is_left_out_by_its_seed(tmp_path: Path) -> None:
    sources = arms(tmp_path, unchanged, seeds=range(4))
    path = tmp_path / "new/seed-2.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:25]))
    found = described(sources, tmp_path / "out", CLAIM)
    reason = found.content.reasons[0]
    assert found.verdict == "INVALID" and reason.code is Code.STEPS_MISSING
    assert (reason["runs"], reason["run_ends"]) == (["new/seed-2"], 25)
    assert described(sources, tmp_path / "out", CLAIM, seeds=[0, 1, 3]).verdict == "MATCH"


def test_a_ratio_is_taken_over_the_shared_steps(tmp_path: Path) -> None:
    found = described(arms(tmp_path, every(10, 5)), tmp_path / "out", "train/reward:last 20%:<1.05x")
    (claim,) = found.content.claims
    assert claim.result == "holds" and claim.estimate.limited == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("difference", [0.0, 0.2])
def test_profiling_at_step_0_changes_no_verdict(tmp_path: Path, difference: float) -> None:
    """TRL logs `profiling/*` before its first step in wandb, and not in TensorBoard."""

    def profiled(arm: str, found: Rows) -> Rows:
        return [{"step": 0, "profiling/time": 1.0}, *found]

    both: list[Any] = [
        described(arms(tmp_path, change, worse=difference), tmp_path / "out", CLAIM)
        for change in (
            unchanged,
            profiled,
            lambda arm, found: (profiled if arm == "old" else unchanged)(arm, found),
        )
    ]
    assert len({one.verdict for one in both}) == 1 and both[0].verdict == (
        "MISMATCH" if difference else "MATCH"
    )
    assert both[0].content.claims == both[1].content.claims == both[2].content.claims
    assert all(one.content.select("step one") == both[0].content.select("step one") for one in both)


@pytest.mark.parametrize(
    ("grid", "expected", "absent"),
    [
        (range(10, 70, 10), range(5, 65, 5), []),
        (range(10, 60, 10), range(5, 75, 5), [65, 70]),
        (range(1, 61), range(0, 62), []),
        ([*range(1, 30), *range(31, 61)], range(1, 61), [30]),
        ([60], range(50, 61), list(range(50, 60))),
        ([], range(3), [0, 1, 2]),
    ],
)
def test_what_a_run_lacks(grid: Any, expected: range, absent: list[int]) -> None:
    steps = np.array(list(grid), np.int64)
    run = run_of({"m": (steps, np.zeros(len(steps)))})
    assert find_missing_steps(run, "m", np.array(expected)).tolist() == absent
    assert find_missing_steps(run, "m", np.array(expected), strict=True).tolist() == sorted(
        {*expected} - {*grid}
    )
