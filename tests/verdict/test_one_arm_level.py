"""Claims on the level of one arm, without another arm: tested, with exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from abrun.logs.recorded.sources import ReadingOptions, read_sources
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, parse_claim
from abrun.report.comparing import compare, compare_sources, with_options
from tests.reasons import reason_of
from tests.verdict.simulate import fail
from tests.verdict.test_seed_noise import compared, write_arm, write_run

LOSSES = 3.2789 + 0.001 * np.random.default_rng(3).standard_normal(20)


def write_scores(path: Path, values, metric: str = "val_loss") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{seed},{float(value)!r}" for seed, value in enumerate(values)]
    path.write_text("\n".join([f"seed,{metric}", *rows]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("claim", "verdict", "exit_code", "code"),
    [
        ("<3.28", "PASS", 0, Code.LIMIT_HOLDS),
        (">3.28", "FAIL", 3, Code.LIMIT_BROKEN),
        ("<3.279", "INCONCLUSIVE", 4, Code.LIMIT_UNDECIDED),
        ("<0.97x", "INCONCLUSIVE", 4, Code.CLAIM_NOT_TESTED),
        ("0.1", "INCONCLUSIVE", 4, Code.CLAIM_NOT_TESTED),
        ("exact", "INCONCLUSIVE", 4, Code.CLAIM_NOT_TESTED),
    ],
)
def test_a_level_is_tested_and_a_difference_needs_a_second_arm(tmp_path, claim, verdict, exit_code, code):
    found = compared(write_scores(tmp_path / "val_loss.csv", LOSSES), claims=[f"val_loss:all:{claim}"])
    assert (found.verdict, found.exit_code) == (verdict, exit_code)
    is_open = code is Code.LIMIT_UNDECIDED
    assert found.next_steps[0].text.startswith("Train at least two more" if is_open else "Compare runs of a")
    reason = reason_of(found, code)
    if code is Code.CLAIM_NOT_TESTED:
        assert reason["problem"].code is Code.SECOND_ARM_NEEDED
        return
    (result,) = found.content.claims
    limit = float(claim[1:])
    p_below = stats.ttest_1samp(LOSSES, limit, alternative="less").pvalue  # pyright: ignore
    p_holds = p_below if claim[0] == "<" else 1 - p_below
    interval = stats.ttest_1samp(LOSSES, limit).confidence_interval(0.9)
    assert result.estimate.p_equivalence == pytest.approx(p_holds, rel=1e-6)
    assert result.estimate.limited_interval == pytest.approx(tuple(interval), rel=1e-9)
    assert "over 20 runs, final scores" in sentence(reason)
    assert "runs needed for 80 % power" in sentence(reason) or code is not Code.LIMIT_UNDECIDED


def test_the_level_is_in_every_report(tmp_path):
    source = write_scores(tmp_path / "val_loss.csv", LOSSES)
    output = tmp_path / "report"
    claims = compared(source, claims=["val_loss:all:<3.28"]).content.claims
    found = compare_sources(
        [source], ReadingOptions(), claims=[], output=output, formats=("json", "html", "markdown")
    )
    assert found.content.claims == [] and found.exit_code == 0
    compare_sources([source], ReadingOptions(), claims=[parse_claim("val_loss:all:<3.28")], output=output)
    content = json.loads((output / "verdict.json").read_text())
    (row,) = content["claims"]
    assert (row["arm"], row["result"], row["num_runs"]) == ("val_loss", "holds", [0, 20])
    assert (content["verdict"], content["post_hoc"]) == ("PASS", True)
    assert row["p_equivalence"] == pytest.approx(claims[0].estimate.p_equivalence)
    report = (output / "report.md").read_text()
    assert "level of val_loss [90 % CI]" in report and "| 20 | 3.279 [" in report
    assert '"result":"holds"' in (output / "report.html").read_text()


def test_no_run_may_be_left_out(tmp_path):
    """A crashed run, one that ended early, and one with a NaN count: without them the claim would hold."""
    claim = ["reward:steps 41-50:>0.7"]
    whole = write_arm(tmp_path / "whole" / "runs")
    assert compared(whole, claims=claim).verdict == "PASS"
    for name, options in (("short", {"steps": 20}), ("nan", {"nan_at": 45})):
        folder = tmp_path / name / "runs"
        write_arm(folder)
        write_run(folder / "seed5.csv", 0.85, seed=5, **options)
        found = compared(str(folder), claims=claim)
        assert (found.verdict, found.exit_code) == ("INCONCLUSIVE", 4), name
        assert found.content.claims[0].result == "not tested"
    (tmp_path / "copy").mkdir()
    folder = Path(write_arm(tmp_path / "copy" / "runs"))
    (folder / "seed9.csv").write_text((folder / "seed0.csv").read_text())
    problem = compared(str(folder), claims=claim).content.claims[0].problem
    assert problem is not None and problem.code is Code.ONE_RUN_AS_TWO_SEEDS


def test_a_failed_run_keeps_the_claim_open(simulated):
    directory = simulated()
    for num_usable, verdict in ((5, "PASS"), (4, "INCONCLUSIVE")):
        read = load_experiment(directory)
        runs = {name: run for name, run in read.runs.items() if name.arm == "baseline" and not name.rerun}
        alone = replace(read, arms=("baseline",), runs=runs, controls={})
        found = compare(with_options(alone, [Claim(metric="train/reward", above=0.5)]))
        assert found.verdict == verdict
        problem = found.content.claims[0].problem
        lacking = Code.PAIRS_LACKING(usable=num_usable, planned=5, paired=False, equivalence=False)
        assert problem == (None if num_usable == 5 else lacking)
        if num_usable == 5:
            fail(directory / "baseline/seed-3", after_steps=30)


def test_a_single_run_and_equal_scores_show_no_spread(tmp_path):
    found = compared(write_scores(tmp_path / "one.csv", [3.27]), claims=["val_loss:all:<3.28"])
    assert found.exit_code == 4 and "two runs are needed" in sentence(reason_of(found, Code.LIMIT_UNDECIDED))
    found = compared(write_scores(tmp_path / "same.csv", [3.27] * 6), claims=["val_loss:all:<3.28"])
    problem = found.content.claims[0].problem
    assert found.exit_code == 4 and problem is not None and problem.code is Code.RUNS_ALIKE


@pytest.mark.parametrize(
    ("num_solved", "num", "limit", "verdict"),
    [
        (10, 10, 0.75, "INCONCLUSIVE"),
        (11, 11, 0.75, "PASS"),
        (19, 30, 0.5, "INCONCLUSIVE"),
        (3, 20, 0.5, "FAIL"),
    ],
)
def test_outcomes_have_the_binomial_test(tmp_path, num_solved, num, limit, verdict):
    """11 of 11 solved show a rate above 0.75, because 0.75**11 < 0.05; a t-test would pass any two of two."""
    values = [1] * num_solved + [0] * (num - num_solved)
    found = compared(write_scores(tmp_path / "solved.csv", values, "solved"), claims=[f"solved:all:>{limit}"])
    (result,) = found.content.claims
    expected = stats.binomtest(num_solved, num, limit, alternative="greater").pvalue
    assert found.verdict == verdict and result.estimate.p_equivalence == pytest.approx(expected)
    warning = result.warnings[0]
    assert warning.code is Code.EXACT_OUTCOMES and warning["needed"] == 11 if limit == 0.75 else 5
    assert ("the claim can hold from 11 runs on" in sentence(warning)) == (num < warning["needed"])


def test_prompts_of_one_run_are_the_sample(tmp_path):
    rows = [f"m,{seed},p{prompt},{int(prompt % 10 < 7)}" for seed in (0,) for prompt in range(100)]
    (tmp_path / "scores.csv").write_text("\n".join(["arm,seed,prompt,solved", *rows]) + "\n")
    contents = read_sources([str(tmp_path / "scores.csv")], ReadingOptions())
    if contents.experiment(may_be_one_arm=True).axis != "prompts":
        pytest.fail("the table was not read as scores of prompts")
    found = compared(str(tmp_path / "scores.csv"), claims=["solved:all:>0.6"])
    (result,) = found.content.claims
    assert found.verdict == "PASS" and result.claim.num_runs == (0, 100)
    assert result.estimate.p_equivalence == pytest.approx(
        stats.binomtest(70, 100, 0.6, alternative="greater").pvalue
    )


def test_arms_of_outcomes_are_tested_exactly(tmp_path):
    """Three pairs that all agree in one direction are no mismatch; a margin in percent is refused."""
    rows = [
        f"{arm},{seed},{value}"
        for arm, values in (("a", [0, 0, 0, 1]), ("b", [1, 1, 1, 1]))
        for seed, value in enumerate(values)
    ]
    (tmp_path / "solved.csv").write_text("\n".join(["arm,seed,solved", *rows]) + "\n")
    found = compared(str(tmp_path / "solved.csv"), claims=["solved:all:0.2"])
    result = found.content.claims[0]
    assert found.verdict == "INCONCLUSIVE" and result.warnings[0]["needed"] == 14  # 0.8**14 < 0.05
    assert result.power.pairs_needed is None or result.power.pairs_needed >= 14
    found = compared(str(tmp_path / "solved.csv"), claims=["solved:all:20%"])
    problem = found.content.claims[0].problem
    assert problem is not None and problem.code is Code.OUTCOMES_NEED_NUMBER
