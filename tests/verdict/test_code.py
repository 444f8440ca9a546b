"""Runs of other code than their siblings are named in the verdict and its notes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun.messages import sentence
from abrun.messages.codes import Code
from tests.verdict.simulate import edit, write

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


def all_launched(experiment_dir: Path, git: dict[str, Any]) -> None:
    for path in experiment_dir.glob("*/*/config.json"):
        launched(path.parent, git)


NEWER = "aaaaaaa with git-527da590.diff"


def of_one_seed(experiment_dir: Path) -> None:
    launched(experiment_dir / "treatment/seed-2", NEW)


def of_attempts(experiment_dir: Path) -> None:
    for arm in ("baseline", "treatment"):
        launched(experiment_dir / arm / "seed-1", OLD, NEW)


@pytest.mark.parametrize(
    ("change", "code", "runs"),
    [
        (of_one_seed, [NEWER], ["treatment/seed-2"]),
        (of_attempts, ["aaaaaaa", NEWER], ["baseline/seed-1", "treatment/seed-1"]),
    ],
)
def test_runs_of_other_code_are_named(
    simulated, judged, snapshot, change: Callable[[Path], None], code: list[str], runs: list[str]
) -> None:
    experiment_dir = simulated()
    all_launched(experiment_dir, OLD)
    change(experiment_dir)
    comparison = judged(experiment_dir)
    content = comparison.content
    (note,) = (note for note in content.notes if note.code is Code.CODE_DIFFERS)
    assert note in content.reasons and comparison.verdict == "MATCH"
    assert Code.OTHER_CODE in [reason.code for reason in content.not_tested]
    assert note["versions"][1] == {"code": code, "runs": runs}
    snapshot(sentence(note))
    assert "git-527da590.diff" in (experiment_dir / "report/report.md").read_text()


@pytest.mark.parametrize("git", [OLD, None])
def test_one_version_and_none_known_say_nothing(simulated, judged, git) -> None:
    experiment_dir = simulated()
    if git:
        all_launched(experiment_dir, git)
    content = judged(experiment_dir).content
    assert not {Code.CODE_DIFFERS, Code.OTHER_CODE} & {
        one.code for one in (*content.notes, *content.not_tested)
    }
    assert {repr(one.environment.get("code")) for one in content.environments} == {
        repr(["aaaaaaa"] if git else None)
    }


def with_script(experiment_dir: Path, arm: str, **scripts: str) -> None:
    for path in experiment_dir.glob(f"{arm}/*/environment.json"):
        edit(path, lambda content: content.update(scripts=scripts))


def test_scripts_of_paired_runs_have_the_same_content(simulated, judged) -> None:
    experiment_dir = simulated()
    with_script(experiment_dir, "*", train="11111111")
    assert judged(experiment_dir).verdict == "MATCH"
    with_script(experiment_dir, "treatment", train="22222222")
    reason = judged(experiment_dir).content.reasons[0]
    assert sentence(reason).startswith("the command's scripts differ between baseline/seed-0 and treatment")
    assert "train 11111111 against 22222222" in sentence(reason)
    # A declared argv may name another script, and records of earlier versions name none
    with_script(experiment_dir, "treatment", other="22222222")
    assert judged(experiment_dir).verdict == "MATCH"
    with_script(experiment_dir, "treatment")
    assert judged(experiment_dir).verdict == "MATCH"
