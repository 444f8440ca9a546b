"""Runs that are compared more than once: the next command, the pairs of a declared look, and error rates."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.logs.recorded.claim_tests import MAX_TESTS, find_earlier_claim_tests
from abrun.logs.recorded.sources import ReadingOptions, open_sources
from abrun.messages.codes import Code
from abrun.recipe.claims import parse_claim
from abrun.report.comparing import Comparison, compare_sources, freeze_arm
from abrun.stats.sequential import interim_level
from abrun.verdict.results import ClaimEstimate
from tests.bench.bench_readings import repeated, windows_tried
from tests.reasons import refused
from tests.snapshot import Snapshot

STEPS = 60
CLAIM = "reward:last 20%:0.03"
REPORT = Path("old-vs-new-report")


def write_runs(folder: Path, seeds: range, shift: float = 0.0, noise: float = 0.03) -> None:
    """Both arms: curves that share a seed's level, the treatment's shifted after the first step."""
    for arm in ("old", "new"):
        for seed in seeds:
            rng = np.random.default_rng([seed, len(arm), ord(arm[0])])
            level = 0.02 * np.random.default_rng(seed).standard_normal() + noise * rng.standard_normal()
            path = folder / arm / f"seed-{seed}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["step", "reward"])
                for step in range(STEPS):
                    after = min(1.0, step / 10)
                    added = after * (level + (shift if arm == "new" else 0.0))
                    learned = 0.2 + 0.5 * (1 - np.exp(-step / 15))
                    rows.writerow([step + 1, learned + added + after * 0.01 * rng.standard_normal()])


def compared(*arms: str, claim: str = CLAIM, output: Path = REPORT, **reading: Any) -> Comparison:
    arms = arms or ("r/old", "r/new")
    options = "".join(
        f" --{key} {','.join(map(str, value))}" if isinstance(value, tuple) else f" --{key}"
        for key, value in reading.items()
    )
    return compare_sources(
        arms,
        ReadingOptions(**reading),
        claims=[parse_claim(claim)],
        output=output,
        formats=("json",),
        command=f"abrun compare {' '.join(arms)} --claim '{claim}'{options}",
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- what to do next ---


def test_an_open_claim_asks_for_fresh_seeds_alone(here: Path) -> None:
    write_runs(here / "r", range(4), noise=0.02)
    found = compared()
    assert found.verdict == "INCONCLUSIVE"
    (fresh,) = found.next_steps
    needed = found.content.claims[0].power.pairs_needed
    assert needed and fresh.text.startswith(f"{needed} pairs give 80 % power ")
    assert ": train both arms on seeds 4-" in fresh.text
    assert fresh.command.endswith(f"--seeds 4-{3 + needed}")
    (alone, *_) = compared(unpaired=True).next_steps
    assert "--seeds 4-" in alone.command and "--interim" not in alone.command


def test_other_seeds_of_a_reference_are_judged_alone(here: Path) -> None:
    write_runs(here / "r", range(8), noise=0.02)
    claim = parse_claim(CLAIM)
    experiment = open_sources(("r/old",), ReadingOptions(allows_one_arm=True), [claim])
    freeze_arm(experiment, "old", here / "old.json")
    for number in (3, 4, 5, 6, 7):
        (here / f"r/new/seed-{number}.csv").unlink()
    found = compare_sources(("r/new",), ReadingOptions(), reference=here / "old.json")
    assert found.verdict == "INCONCLUSIVE"
    (step,) = found.next_steps
    assert step.text.startswith("Train the remaining seeds of the reference (3, 4, 5, 6, 7), then ")
    assert step.command.endswith(" --seeds 3,4,5,6,7")


# --- the noise of earlier logs ---


def test_logs_of_one_training_inform_each_other_and_never_themselves(here: Path) -> None:
    history = here / "noise.jsonl"

    def with_noise(*seeds: int, folder: str) -> tuple[ClaimEstimate, Comparison]:
        write_runs(here / folder, range(seeds[0], seeds[-1] + 1), noise=0.01)
        found = compare_sources(
            (f"{folder}/old", f"{folder}/new"),
            ReadingOptions(),
            claims=[parse_claim(CLAIM)],
            noise=history,
            output=here / f"{folder}-report",
            formats=("json",),
        )
        assert all(note.code is not Code.NOISE_NOT_WRITTEN for note in found.content.notes)
        return found.content.claims[0].estimate, found

    assert with_noise(0, 1, 2, folder="first")[0].noise is None
    before = history.read_text()
    assert with_noise(0, 1, 2, folder="first")[0].noise is None  # the same numbers, also by another name
    assert with_noise(0, 1, 2, folder="copied")[0].noise is None
    assert with_noise(0, 1, 2, 3, folder="copied")[0].noise is None  # nor with a pair more
    estimate, found = with_noise(5, 6, 7, folder="later")
    assert len(before.splitlines()) == 1 < len(history.read_text().splitlines())
    assert estimate.noise and estimate.noise.experiments == 1
    assert estimate.interval != estimate.noise.interval_alone
    assert "noise from 1 earlier experiment" in found.as_json()["claims"][0]["warning"]
    assert history.read_text().startswith(before)


def test_a_history_of_logs_is_refused_where_it_says_nothing(simulated) -> None:
    history = Path("noise.jsonl")
    with refused("whose launch declared its history"):
        compare_sources((str(simulated()),), ReadingOptions(), noise=history)
    write_runs(Path("r"), range(3))
    with refused("without a claim to test"):
        compare_sources(("r/old", "r/new"), ReadingOptions(), noise=history)
    history.write_text("{torn\n")
    with refused("noise.jsonl"):
        compare_sources(("r/old", "r/new"), ReadingOptions(), claims=[parse_claim(CLAIM)], noise=history)


# --- declared looks ---


def test_looks_without_a_claim_are_refused(here: Path) -> None:
    write_runs(here / "r", range(3))
    with pytest.raises(ComparisonError, match="--interim: got 3,5 without a claim"):
        compare_sources(("r/old", "r/new"), ReadingOptions(interim=(3, 5)))


def test_declared_looks_test_at_their_level(here: Path) -> None:
    write_runs(here / "r", range(3))
    first = compared(interim=(3, 5, 8))
    assert first.content.claims[0].claim.alpha == interim_level((3, 5, 8))
    (step,) = first.next_steps
    assert step.text.endswith(": train both arms on seeds 3,4")
    assert step.command.endswith("--seeds 0,1,2,3,4 --interim 3,5,8")
    write_runs(here / "r", range(5))
    second = compared(interim=(3, 5, 8))
    assert [analysis.verdict is None for analysis in second.content.arms["new"].interim_analyses] == [
        False,
        False,
        True,
    ]


def test_a_look_keeps_the_pairs_of_its_report_when_pairs_of_earlier_seeds_are_added(here: Path) -> None:
    write_runs(here / "r", range(5, 8))
    first = compared(interim=(3, 5, 8))
    write_runs(here / "r", range(2))
    write_runs(here / "r", range(9, 12))
    last = compared(interim=(3, 5, 8))
    estimate = last.content.claims[0]
    assert estimate.claim.seeds[:3] == first.content.claims[0].claim.seeds == (5, 6, 7)
    assert estimate.estimate.differences[:3] == first.content.claims[0].estimate.differences
    assert compared(interim=(3, 6, 8)).content.claims[0].claim.seeds[:3] == (0, 1, 5)  # another design


def test_only_a_comparison_with_looks_leaves_a_stamp(here: Path) -> None:
    write_runs(here / "r", range(3))
    compared()
    assert not (REPORT / ".report.json").exists()
    compared(interim=(3, 5))
    assert len(json.loads((REPORT / ".report.json").read_text())["readings"]) == 1


def test_stamps_are_data_that_anyone_may_have_written(here: Path) -> None:
    write_runs(here / "r", range(3))
    first = compared(interim=(3, 5))
    stamp = first.files[0].parent / ".report.json"
    kept = json.loads(stamp.read_text())["readings"]
    (own,) = kept
    hostile: list[Any] = [
        "",
        "[" * 100_000,
        "[]",
        "\x00\xff",
        {"readings": {"question": "a"}},
        {"readings": "text"},
        {"readings": [None, 3, [], {}, {"question": 1, "pairs": []}, {"question": "a", "pairs": "b"}]},
        {"readings": [{"question": own["question"], "pairs": [1, *own["pairs"]]}]},
        {"readings": [{"question": f"{number}", "pairs": ["x"]} for number in range(2 * MAX_TESTS)]},
    ]
    for number, content in enumerate(hostile):
        (here / f"other-{number}").mkdir()
        text = content if isinstance(content, str) else json.dumps(content)
        (here / f"other-{number}/.report.json").write_text(text)
    (here / "link").symlink_to("link")
    (here / "pipe").mkdir()
    os.mkfifo(here / "pipe/.report.json")
    (here / "folder/.report.json").mkdir(parents=True)
    assert len(find_earlier_claim_tests([here])) <= 2 * MAX_TESTS
    assert compared(interim=(3, 5)).content == first.content
    assert json.loads(stamp.read_text())["readings"] == kept


@pytest.mark.parametrize(
    "options",
    [
        {"interim": (6, 8)},
        {"interim": (2, 4)},
        {"interim": (5,)},
        {"interim": (5, 3)},
        {"interim": (3, 5), "unpaired": True},
    ],
)
def test_looks_that_do_not_fit_the_runs_are_refused(here: Path, options: Any, snapshot: Snapshot) -> None:
    write_runs(here / "r", range(5))
    with snapshot.refused(ComparisonError):
        compared(**options)


# --- the rates ---


@pytest.mark.parametrize("start", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_the_same_pairs_err_and_fresh_ones_and_declared_looks_do_not(start: int) -> None:
    same, fresh, _, looks = repeated(start, 1)
    assert same > 0.1 and max(fresh, looks) < 0.056


@pytest.mark.slow
@pytest.mark.parametrize("num_pairs", [3, 5, 8, 10])
def test_windows_that_are_tried_err_as_the_page_says(num_pairs: int) -> None:
    assert windows_tried(num_pairs, 1, 0.0) < 0.065
    assert 0.2 < windows_tried(num_pairs, 20, 0.0) < 0.305
    assert 0.07 < windows_tried(num_pairs, 20, 1.0) < 0.12
