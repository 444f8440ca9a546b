"""Runs that share no seed: said as such, tested by Welch; and one run of each arm, which is described."""

import json
import re

import jsonschema
import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.logs.recorded.sources import ReadingOptions
from abrun.logs.recorded.stored import load_experiment
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Compare, parse_claim
from abrun.report.comparing import compare_sources
from abrun.report.injected import sensitivity_columns, write_sensitivity
from abrun.verdict.guards import pair_with_all_baselines
from abrun.verdict.injected import measure_sensitivity
from tests.reasons import only
from tests.verdict.simulate import edit, edit_rows
from tests.verdict.test_verdict_file import SCHEMA

STEPS = np.arange(1, 41)


def write(folder, arm, seeds, *, shift=0.0, named="run-s{}", last=40):
    """Runs of an arm: rewards that rise by 0.6, with a sd of 0.01 over runs."""
    (folder / arm).mkdir(parents=True)
    for seed in seeds:
        rng = np.random.default_rng([seed, *arm.encode()])
        reward = 0.2 + 0.6 * (1 - np.exp(-STEPS / 8)) + shift + 0.01 * rng.standard_normal()
        rows = zip(STEPS[:last], reward + 0.005 * rng.standard_normal(40), rng.random(40) + 1, strict=False)
        text = "".join(f"{step},{one:.6f},{norm:.6f}\n" for step, one, norm in rows)
        (folder / arm / f"{named.format(seed)}.csv").write_text(f"step,train/reward,train/grad_norm\n{text}")
    return str(folder / arm)


@pytest.fixture
def compared(tmp_path):
    def run(*sources, margin="0.05", unpaired=True, formats=("json", "markdown"), **reading):
        return compare_sources(
            sources,
            ReadingOptions(unpaired=unpaired, **reading),
            claims=[parse_claim(f"train/reward:last 20%:{margin}")],
            output=tmp_path / "out",
            formats=formats,
        )

    return run


@pytest.mark.parametrize("margin", ["0.05", "8%", "12% of climb", "9 sigma"])
def test_equal_arms_match_by_welch_and_it_is_said(tmp_path, compared, margin):
    arms = write(tmp_path, "old", range(5)), write(tmp_path, "new", range(5, 9))
    found = compared(*arms, margin=margin)
    (claim,) = found.content.claims
    assert (found.verdict, found.exit_code, claim.result) == ("MATCH", 0, "equivalent")
    again = f"abrun compare {arms[0]} {arms[1]} --unpaired --claim 'train/reward:last 20%:{margin}'"
    assert [step.command for step in found.next_steps] == [f"{again} --seeds 9-12"]
    assert claim.claim.test == ("Welch sigma test" if "sigma" in margin else "Welch TOST")
    assert (claim.claim.num_runs, claim.claim.num_pairs, claim.estimate.differences) == ((5, 4), 0, ())
    reason = found.content.reasons[0]
    assert (reason.code, reason["over"]["runs"]) == (Code.CLAIM_EQUIVALENT, [5, 4])
    assert reason["over"]["welch"]
    assert found.content.paired is False and found.content.select("step one") == []
    assert (tmp_path / "out/report.md").read_text().startswith("# MATCH (post hoc, unpaired): old-vs-new")
    content = json.loads((tmp_path / "out/verdict.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)


def test_arms_without_a_common_seed_have_no_first_step_to_compare(tmp_path, compared):
    arms = write(tmp_path, "old", range(5)), write(tmp_path, "new", range(5, 9))
    found = compared(*arms, unpaired=False)
    assert found.verdict == "INVALID"
    assert only(found.content.not_tested, Code.STEP_ONE_NOT_READ)["why"] == Code.FIRST_STEP_NOT_PAIRED()


def test_what_is_open_says_how_many_runs_it_takes_and_what_pairs_would(tmp_path, compared):
    arms = write(tmp_path, "old", range(3)), write(tmp_path, "new", range(5, 8))
    found = compared(*arms, margin="0.008")
    assert found.verdict == "INCONCLUSIVE"
    reason = found.content.reasons[0]
    assert reason.code is Code.CLAIM_UNDECIDED and reason["over"]["runs"] == [3, 3]
    assert reason["power"]["pairs_if_shared"] is not None


def test_a_ratio_is_tested_and_exactness_is_not(tmp_path, compared):
    arms = write(tmp_path, "old", range(5)), write(tmp_path, "new", range(5, 9))
    ratio = compared(*arms, margin="<1.1x")
    assert (ratio.verdict, ratio.content.claims[0].result) == ("PASS", "holds")
    assert compared(*arms, margin="<0.8x").verdict == "FAIL"
    exact = compared(*arms, margin="exact")
    assert exact.verdict == "INCONCLUSIVE"
    assert exact.content.reasons[0]["problem"] == Code.PAIRS_ALONE(exact=True)


def test_runs_without_seeds_are_numbered_only_where_they_are_not_paired(tmp_path, compared):
    arms = write(tmp_path, "old", range(4), named="x{}y"), write(tmp_path, "new", range(4), named="x{}y")
    with pytest.raises(ComparisonError, match="or pass --unpaired if the runs have no seeds"):
        compared(*arms, unpaired=False)
    found = compared(*arms)
    assert found.verdict == "MATCH"
    assert {note["note"].code for note in found.content.notes} == {Code.SEED_NOT_KNOWN}
    claim = "--claim 'train/reward:last 20%:0.05'"
    assert [step.command for step in found.next_steps] == [f"abrun compare NEW NEW --unpaired {claim}"]
    both = compared(str(tmp_path), pattern="{arm}/*", baseline="old")
    assert both.content.claims[0].claim.num_runs == (4, 4)


def test_a_run_that_is_in_both_arms_is_no_match(tmp_path, compared):
    arms = write(tmp_path, "old", range(5)), write(tmp_path, "new", range(5, 9))
    (tmp_path / "new/run-s5.csv").write_text((tmp_path / "old/run-s0.csv").read_text())
    found = compared(*arms)
    assert found.verdict == "INCONCLUSIVE"
    assert found.content.reasons[0]["problem"].code is Code.ONE_RUN_AS_TWO_SEEDS


def test_guards_hold_independent_runs_against_every_baseline_run(tmp_path, compared, snapshot):
    arms = write(tmp_path, "old", range(5)), write(tmp_path, "new", range(5, 9))
    path = tmp_path / "new/run-s6.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], lines[20].rsplit(",", 1)[0] + ",nan", *lines[21:]]) + "\n")
    found = compared(*arms)
    assert found.verdict == "MISMATCH"
    broken = only(found.content.reasons, Code.GUARD_FAILS)["reason"]
    assert (broken.code, broken["metric"], broken["run"], broken["step"], broken["paired"]) == (
        Code.NOT_FINITE,
        "train/grad_norm",
        "new/seed-6",
        20,
        False,
    )
    snapshot(sentence(broken))


def test_any_run_of_the_baseline_excuses_a_nan(tmp_path, compared):
    arms = write(tmp_path, "old", range(5)), write(tmp_path, "new", range(5, 9))
    for run in ("old/run-s3.csv", "new/run-s6.csv"):
        lines = (tmp_path / run).read_text().splitlines()
        lines[20] = lines[20].rsplit(",", 1)[0] + ",nan"
        (tmp_path / run).write_text("\n".join(lines) + "\n")
    assert compared(*arms).verdict == "MATCH"


@pytest.mark.parametrize("declared", [True, False])
def test_runs_are_held_to_by_seed_unless_they_were_declared_unpaired(simulated, judged, declared):
    claim = {"metric": "train/reward", "margin": 0.1}
    experiment_dir = simulated(compare={"claims": [claim], "paired": not declared})
    found = judged(experiment_dir, unpaired=not declared)
    assert found.verdict == "MATCH" and found.content.paired is False
    first, *freeze = [step.command for step in found.next_steps]
    assert ('"paired": false' in first) != declared and bool(freeze) == declared


def test_a_recipe_can_declare_it(simulated, judged):
    claim = {"metric": "train/reward", "margin": 0.1}
    experiment_dir = simulated(compare={"claims": [claim], "paired": False})
    edit_rows(
        experiment_dir / "treatment/seed-1", lambda row: row.update({"train/token_mult_prob_error": 1.5})
    )
    found = judged(experiment_dir)
    assert not found.content.post_hoc and found.content.claims[0].claim.num_runs == (5, 5)
    share = next(
        one for one in found.content.select("guard") if one["guard"] == "token_mult_prob_error_share"
    )
    assert share.result == "open"  # one run of five: Welch does not show it at the guard's level
    with pytest.raises(ValueError, match="paired: false with interim"):
        Compare(paired=False, interim=[3, 5])
    with pytest.raises(ValueError, match="paired: false with final_weights"):
        Compare(paired=False, claims=[parse_claim("final_weights:all:<0.05")])


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({"devices": ["another"] * 2}, "INVALID"), ({"prompts_sha256": "another"}, "MATCH")],
)
def test_independent_runs_have_the_machine_in_common_and_not_the_prompts(simulated, judged, change, verdict):
    claim = {"metric": "train/reward", "margin": 0.1}
    experiment_dir = simulated(compare={"claims": [claim], "paired": False})
    edit(experiment_dir / "treatment/seed-2/environment.json", lambda content: content.update(change))
    assert judged(experiment_dir).verdict == verdict


def test_no_baseline_opposes_nothing(simulated, judged):
    from abrun.logs.recorded.experiment import Sides

    assert pair_with_all_baselines(Sides(baselines=(), treatments=(), paired=False)) == []


@pytest.mark.parametrize(
    ("claim", "shift", "step"),
    [
        ({"margin": 0.02}, 0.0, "runs of each arm give 80 % power"),
        ({"margin": 1e-4}, 0.0, "takes more than 1000 runs of each arm"),
        ({"margin": 0.03, "window": "all"}, 0.2, "Confirm it on fresh seeds"),
        ({"margin": "1 sigma"}, 0.0, "runs of each arm give 80 % power"),
        ({"above": 0.7}, 0.0, "Four times as many runs of each arm"),
    ],
)
def test_nothing_is_said_of_pairs_where_none_are(simulated, judged, claim, shift, step):
    claim = {"metric": "train/reward", "window": "last 20%", "transform": "identity", **claim}
    compare = {"claims": [claim], "paired": False, "guards": {"step_time_ratio": 3.0}}
    controls = {"faults": [{"name": "misgrouped"}]}
    experiment_dir = simulated(compare=compare, controls=controls, shift=shift, noise=0.02)
    found = judged(experiment_dir)
    assert any(step in suggested.text for suggested in found.next_steps)
    if "above" in claim:
        assert "--seeds 5-24 " in found.next_steps[0].command
    report = (experiment_dir / "report/report.md").read_text()
    experiment = load_experiment(experiment_dir)
    faults = measure_sensitivity(experiment)
    assert faults
    of_faults = write_sensitivity(faults, {}, experiment_dir / "report", "mine", experiment.compare)
    assert "(5 runs of " in of_faults.read_text() and " of 40 steps)" in of_faults.read_text()
    said = [
        report,
        of_faults.read_text(),
        *sensitivity_columns(paired=False),
        *(step.text for step in found.next_steps),
        *(sentence(reason) for fault in faults for reason in (fault.reason, fault["advice"]) if reason),
    ]
    assert "5 and 5 unpaired" in str(said)
    assert re.findall(r".*\bpairs?\b.*", "\n".join(said)) == []
