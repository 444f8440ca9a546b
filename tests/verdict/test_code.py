"""Runs of other code than their siblings are named in the verdict and its notes."""

from pathlib import Path
from typing import Any

import pytest

from abrun.messages import sentence
from abrun.reasons import Code, Reason
from tests.verdict.simulate import write

OLD = {"sha": "a" * 40, "dirty": False, "diff": None}
NEW = {"sha": "a" * 40, "dirty": True, "diff": "git-527da590.diff"}


def launched(directory: Path, *gits: dict[str, Any]) -> None:
    """Make a run one that was launched from each of these checkouts in turn."""
    launches = [
        {"attempts": number, "git": git, "started_s": 10.0 * number, "ended_s": 10.0 * number + 9}
        for number, git in enumerate(gits, start=1)
    ]
    write(directory / "launch.json", {"git": gits[-1], "launches": launches})
    for number in range(1, len(gits) + 1):
        status = "finished" if number == len(gits) else "failed"
        attempt = {"status": status, "started_s": 10.0 * number + 1, "exit_code": 0}
        write(directory / f"attempts/{number:04}.json", attempt)


def all_launched(experiment_dir: Path, git: dict[str, Any], arm: str = "*") -> None:
    for path in experiment_dir.glob(f"{arm}/*/config.json"):
        launched(path.parent, git)


OF_CODE = {Code.CODE_CHANGED, Code.ARMS_OF_OTHER_CODE, Code.RUNS_OF_OTHER_CODE}


def code_notes(comparison: Any) -> list[Reason]:
    content = comparison.content
    notes = [note for note in content.notes if note.code in OF_CODE]
    assert all(note in content.reasons for note in notes)
    assert bool(notes) == (Code.OTHER_CODE in [reason.code for reason in content.not_tested])
    return notes


def test_a_seed_of_other_code_is_named_with_its_diff(simulated, judged, snapshot) -> None:
    experiment_dir = simulated()
    all_launched(experiment_dir, OLD)
    launched(experiment_dir / "treatment/seed-2", NEW)
    comparison = judged(experiment_dir)
    other = Code.RUNS_OF_OTHER_CODE(
        runs=["treatment/seed-2"], code="aaaaaaa with git-527da590.diff", usual_code="aaaaaaa"
    )
    assert comparison.verdict == "MATCH" and code_notes(comparison) == [other]
    snapshot(sentence(other))
    report = (experiment_dir / "report/report.md").read_text()
    assert "git-527da590.diff" in report and "code aaaaaaa" in report


def test_attempts_of_one_run_by_several_versions(simulated, judged, snapshot) -> None:
    experiment_dir = simulated()
    all_launched(experiment_dir, OLD)
    for arm in ("baseline", "treatment"):
        launched(experiment_dir / arm / "seed-1", OLD, NEW)
    (note,) = code_notes(judged(experiment_dir))
    assert note.code is Code.CODE_CHANGED and note["runs"] == ["baseline/seed-1", "treatment/seed-1"]
    assert note["versions"] == ["aaaaaaa", "aaaaaaa with git-527da590.diff"]
    snapshot(sentence(note))


@pytest.mark.parametrize("git", [OLD, None])
def test_one_version_and_none_known_say_nothing(simulated, judged, git) -> None:
    experiment_dir = simulated()
    if git:
        all_launched(experiment_dir, git)
    comparison = judged(experiment_dir)
    assert code_notes(comparison) == []
    assert [one.environment.get("code") for one in comparison.content.environments] == [
        ["aaaaaaa"] if git else None
    ] * len(comparison.content.environments)
