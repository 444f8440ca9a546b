"""Claims on the time to a target, on logs: when a run is there, in which unit, and what is refused."""

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.api import Result, compare
from abrun.errors import AbrunError, ComparisonError
from abrun.logs.recorded.experiment import RecordedRun
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, claim_option, describe_claim, parse_claim
from abrun.verdict.time_to_target import ReachTime, find_reach_time
from tests.reasons import codes_of, reason_of
from tests.verdict.recorded import run_of

ACCURACY = "validation/accuracy"
AT_MOST = "validation/accuracy:reaches 0.6:<1.1x"


def write_run(
    path: Path, reach: float, seed: int, *, every: int = 1, last: int = 200, **columns: float
) -> None:
    """Write a log whose accuracy first is at least 0.6 at step `reach`; `columns` have a value per step."""
    noise = np.random.default_rng([*path.name.encode()])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", ACCURACY, "train/reward", *columns])
        for step in range(1, last + 1):
            accuracy = 0.6 * step / reach if step < reach else 0.6 + 0.001 * (step - reach)
            accuracy += 0.001 * noise.random() * (1 if step >= reach else -1)
            logged = "" if step % every else repr(accuracy)
            reward = 0.1 * seed + (noise.random() if step > 1 else 0.0)
            writer.writerow([step, logged, reward, *columns.values()])


def write_arms(
    folder: Path,
    old: Sequence[float],
    new: Sequence[float],
    new_columns: Mapping[str, float] = {},
    **options: Any,
) -> Path:
    for seed, (before, after) in enumerate(zip(old, new, strict=True)):
        write_run(folder / f"old-s{seed}.csv", before, seed, **options)
        write_run(folder / f"new-s{seed}.csv", after, seed, **{**options, **new_columns})
    return folder


def judged(folder: Path, claim: str = AT_MOST, **options: Any) -> Result:
    return compare(folder, claim=claim, baseline="old", **options)


def outcome(result: Result) -> tuple[str, str]:
    return result.verdict, result.comparison.arms[0].claims[0].result


OLD = (100, 110, 90, 120, 105)


def test_the_headline_names_target_ratio_and_interval(tmp_path: Path) -> None:
    folder = write_arms(tmp_path, OLD, [round(1.03 * time) for time in OLD])
    result = judged(folder)
    assert outcome(result) == ("PASS", "holds")
    text = sentence(reason_of(result.comparison, Code.LIMIT_HOLDS))
    assert text.startswith(
        f"{ACCURACY}: 0.6 is reached in less than 1.1x the baseline's steps at 95 % confidence"
    )
    assert (
        "over 5 pairs, steps 1-200 (new / old is 1.03, 90 % CI [1.018, 1.045], higher in 5 of 5 seeds; p ="
        in text
    )
    row = result.content["claims"][0]
    assert (row["test"], row["window"], row["kind"]) == ("time to target", "reaches 0.6", "limit")
    assert outcome(judged(folder, "validation/accuracy:reaches 0.6:<1.02x")) == ("INCONCLUSIVE", "undecided")
    close = judged(folder, "validation/accuracy:reaches 0.6:<1.044x")
    assert re.search(
        r"about \d+ pairs show it with 80 % power if the times are as observed", close.reasons[0]
    )
    slow = judged(write_arms(tmp_path / "slow", OLD, [1.5 * time for time in OLD]))
    assert outcome(slow) == ("FAIL", "different")
    assert "0.6 is not reached in less than 1.1x" in sentence(reason_of(slow.comparison, Code.LIMIT_BROKEN))


def test_too_few_pairs_say_how_many_decide(tmp_path: Path) -> None:
    folder = write_arms(tmp_path, OLD[:3], OLD[:3][::-1])
    result = judged(folder, "validation/accuracy:reaches 0.6:<2x")
    assert outcome(result) == ("INCONCLUSIVE", "undecided")
    assert "no outcome decides before 5 pairs (one-sided level 0.05)" in result.reasons[0]
    # three runs of each arm are enough if they are independent
    assert outcome(judged(folder, "validation/accuracy:reaches 0.6:<2x", unpaired=True)) == ("PASS", "holds")


def test_runs_that_never_reach_the_target_are_slower_than_their_end(tmp_path: Path) -> None:
    never = 10_000
    one_of_six = judged(write_arms(tmp_path / "1", (*OLD, 100), (*OLD, never)))
    assert outcome(one_of_six) == ("INCONCLUSIVE", "undecided")
    assert "1 of 6 treated runs and 0 of 6 baseline runs do not reach the target" in one_of_six.reasons[0]
    one_of_ten = judged(write_arms(tmp_path / "2", OLD * 2, (*OLD, *OLD[:4], never), last=190))
    assert outcome(one_of_ten) == ("INCONCLUSIVE", "undecided")  # although the ranks allow for it
    both = judged(write_arms(tmp_path / "5", (*OLD, *OLD[:4], never), (*OLD, *OLD[:4], never), last=190))
    assert outcome(both) == ("PASS", "holds")
    all_fail = judged(write_arms(tmp_path / "3", OLD, [never] * 5))
    assert outcome(all_fail) == ("FAIL", "different")
    baseline_fails = judged(write_arms(tmp_path / "4", [never] * 5, OLD))
    assert outcome(baseline_fails) == ("PASS", "holds")
    assert json.loads(json.dumps(baseline_fails.content))["claims"][0]["limited"] is None


def test_ties_on_a_coarse_grid_show_only_the_grid(tmp_path: Path) -> None:
    folder = write_arms(tmp_path, [95] * 5, [96, 97, 98, 99, 100], every=20, last=400)
    result = judged(folder)
    assert outcome(result) == ("INCONCLUSIVE", "undecided")
    assert "even equal times show only 1.25x; evaluate more often" in result.reasons[0]
    assert outcome(judged(folder, "validation/accuracy:reaches 0.6:<1.3x")) == ("PASS", "holds")


def test_runs_may_end_at_their_target_and_evaluate_at_steps_of_their_own(tmp_path: Path) -> None:
    for seed, time in enumerate(OLD):
        write_run(tmp_path / f"old-s{seed}.csv", time, seed, every=4, last=time + 4)
        write_run(tmp_path / f"new-s{seed}.csv", time, seed, every=3, last=time + 3)
    result = judged(tmp_path, step_one=False)
    assert outcome(result) == ("PASS", "holds")
    assert "the treatment evaluates every 3 steps and the baseline every 4" in result.reasons[0]
    grids = [reason for reason in result.comparison.content.reasons if reason.code == Code.GRIDS_DIFFER]
    assert [reason["metric"] for reason in grids] == ["train/reward"]


def test_times_in_seconds_and_samples(tmp_path: Path) -> None:
    columns = {"timing/train/total_step_time_s": 2.0, "train/num_valid_samples": 64.0}
    slower = {"timing/train/total_step_time_s": 3.0}
    folder = write_arms(tmp_path, OLD, OLD, new_columns=slower, **columns)
    for unit, verdict in [("steps", "PASS"), ("samples", "PASS"), ("seconds", "FAIL")]:
        result = judged(folder, f"validation/accuracy:reaches 0.6 in {unit}:<1.1x")
        assert result.verdict == verdict, unit
    ratio = result.comparison.arms[0].claims[0].estimate.limited  # type: ignore[possibly-undefined]
    assert ratio == pytest.approx(1.5)
    without = judged(
        write_arms(tmp_path / "bare", OLD, OLD), "validation/accuracy:reaches 0.6 in seconds:<1.1x"
    )
    assert Code.TIME_NOT_RECORDED in codes_of(without.comparison)


def test_a_loss_falls_to_its_target(tmp_path: Path) -> None:
    folder = write_arms(tmp_path, OLD, OLD)
    for path in folder.glob("*.csv"):
        path.write_text(path.read_text().replace(ACCURACY, "eval/score2"))
    with pytest.raises(ComparisonError, match=r"reaches 0\.6"):
        judged(folder, "eval/score2:reaches 0.6:<1.1x")
    assert outcome(judged(folder, "eval/score2:reaches 0.6:<1.1x, higher is better")) == ("PASS", "holds")
    wrong_way = judged(folder, "eval/score2:reaches 0.6:<1.1x, lower is better")
    assert outcome(wrong_way) == (
        "INCONCLUSIVE",
        "undecided",
    )  # met at the first evaluation: nothing is known


def recorded(values: Mapping[int, float], **metrics: Any) -> RecordedRun:
    return run_of({ACCURACY: ([*values], [*values.values()]), **metrics}, "a")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({10: 0.1, 20: 0.6, 30: 0.2}, ReachTime(after=10, by=20)),  # the first time, whatever comes later
        ({10: 0.1, 20: float("nan"), 30: 0.7}, ReachTime(after=20, by=30)),
        ({10: 0.1, 20: 0.59}, ReachTime(after=20, by=np.inf)),
        ({10: 0.8}, ReachTime(after=0, by=10)),
        ({0: 0.1, 5: 0.8}, ReachTime(after=0, by=5)),
    ],
)
def test_reach_times(values: Mapping[int, float], expected: ReachTime) -> None:
    claim = parse_claim(AT_MOST)
    assert claim.target and find_reach_time(recorded(values), claim, claim.target) == expected


def test_a_target_met_before_training_is_no_target() -> None:
    claim = parse_claim(AT_MOST)
    assert claim.target
    reason = find_reach_time(recorded({0: 0.7, 5: 0.8}), claim, claim.target)
    assert not isinstance(reason, ReachTime) and reason.code == Code.TARGET_MET_BEFORE_TRAINING


def test_amounts_of_steps_stand_for_the_steps_before_them() -> None:
    claim = parse_claim("validation/accuracy:reaches 0.6 in seconds:<1.1x")
    assert claim.target
    logged = ([2, 4, 6], [5.0, 1.0, 1.0])  # every second step
    run = recorded({3: 0.1, 5: 0.7}, **{"timing/train/total_step_time_s": logged})
    assert find_reach_time(run, claim, claim.target) == ReachTime(after=11, by=13)


@pytest.mark.parametrize(
    "text",
    [AT_MOST, "eval_accuracy:reaches -3.3 in samples:<0.9x, lower is better", "a:b:reaches 3 in seconds:<2x"],
)
def test_claims_survive_their_text(text: str) -> None:
    claim = parse_claim(text)
    assert claim_option(claim) == text and claim.target


def test_bad_claims_are_one_line(abrun: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    folder = write_arms(tmp_path, OLD[:2], OLD[:2])
    for claim, message in [
        ("reaches 0.6:0.02", "got margin: 0.02 for window 'reaches 0.6'; allowed: below: a ratio of times"),
        ("reaches 0.6:<500", "got below: 500.0 for window 'reaches 0.6'"),
        ("reaches 0.6:>1.1x", "got above: 1.1x for window 'reaches 0.6'"),
        (
            "reaches:<1.1x",
            "window: got 'reaches'; allowed: 'last 20%', 'steps 10-50', 'all' or 'reaches 0.6'",
        ),
        ("reaches 0.6 in hours:<1.1x", "window: got 'reaches 0.6 in hours'"),
    ]:
        code, output, errors = abrun("compare", folder, "--claim", f"validation/accuracy:{claim}")
        assert (code, output, errors.count("\n")) == (2, "", 1) and message in errors, errors
    with pytest.raises(AbrunError, match="of a recorded metric"):
        parse_claim("memory:reaches 0.6:<1.1x")


def test_final_scores_have_no_time_to_target(tmp_path: Path) -> None:
    table = tmp_path / "scores.csv"
    table.write_text("arm,seed,accuracy\n" + "".join(f"{arm},{s},0.{s}\n" for arm in "ab" for s in (1, 2, 3)))
    with pytest.raises(ComparisonError, match="accuracy"):
        compare(table, claim="accuracy:reaches 0.6:<1.1x")


def test_the_description_of_a_claim() -> None:
    claim = Claim.model_validate({"metric": ACCURACY, "window": "reaches 0.6 in samples", "below": "1.1x"})
    assert describe_claim(claim) == "in less than 1.1x the baseline's samples"
