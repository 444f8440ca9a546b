"""Metrics that move in steps (an accuracy over few prompts), and copied runs: ties are no certainty."""

import numpy as np
import pytest

from abrun.compare.judge.verdict import ArmVerdict, judge
from abrun.compare.read.experiment import Experiment, RecordedRun
from abrun.equivalence import limit_test, paired_tost, pairs_needed, runs_needed, welch_tost
from abrun.layout import RunName
from abrun.recipe import Compare, Primary
from abrun.series import Series
from abrun.sigmas import sigma_test

STEPS = np.arange(10, 60, 10)
ACCURACY = "validation/accuracy"


def verdict(claim: Primary | None, metric: str, paired: bool = True, **arms: np.ndarray) -> ArmVerdict:
    """Of curves [P, S]; without a claim they are described."""
    claims = [claim] if claim else []
    steps = np.arange(1, next(iter(arms.values())).shape[1] + 1)
    runs = [
        RecordedRun(
            name=RunName(arm=arm, seed=seed),
            place="simulated",
            status="finished",
            metrics={metric: Series(steps, values)},
        )
        for arm, of_arm in arms.items()
        for seed, values in enumerate(of_arm)
    ]
    experiment = Experiment(
        name="simulated",
        arms=tuple(arms),
        compare=Compare(primary=claims, step_one=False, paired=paired),
        runs={run.name: run for run in runs},
    )
    return judge(experiment, claims)[0]


def accuracies(rng, num_pairs: int, num_prompts: int, lost: float) -> tuple[np.ndarray, np.ndarray]:
    """Both arms' validations: they answer 19 of 20 prompts alike, and the treatment loses a share at last."""
    size = (num_pairs, len(STEPS), num_prompts)
    chance = np.linspace(0.1, 0.8, len(STEPS))[:, None]
    baseline = rng.random(size) < chance
    treatment = np.where(rng.random(size) < 0.95, baseline, rng.random(size) < chance)
    treatment[:, -1] &= rng.random((num_pairs, num_prompts)) >= lost / 0.8
    return baseline.mean(axis=-1), treatment.mean(axis=-1)


@pytest.mark.parametrize(("num_pairs", "num_prompts"), [(2, 8), (3, 8)])
def test_ties_of_few_prompts_are_rarely_a_match_at_the_margin(num_pairs, num_prompts):
    """Taken for a spread of 0 they were one in .36 and .22 of experiments."""
    rng, claim = np.random.default_rng(0), Primary(metric=ACCURACY, margin=0.05, climbs=False)
    found = [
        verdict(claim, ACCURACY, baseline=left, treatment=right).verdict
        for left, right in (accuracies(rng, num_pairs, num_prompts, 0.05) for _ in range(60))
    ]
    assert found.count("MATCH") <= 6


@pytest.mark.parametrize("test", [paired_tost, welch_tost])
def test_ties_leave_what_one_step_may_do(test):
    """Of n pairs without a difference, one in 1 / (1 - 0.05**(1/n)) may still differ: exact."""
    found = test([0.5, 0.75, 0.5], [0.5, 0.75, 0.5], 0.1, resolution=0.25)
    bound, least = found.certified_bound, 0.25 * (1 - 0.05 ** (1 / 3))
    assert not found.equivalent
    assert bound == pytest.approx(least) if test is paired_tost else bound > least
    shifted = paired_tost([0.5, 0.75], [0.75, 1.0], 0.2, resolution=0.25)
    assert shifted.p_beyond > 0.1 > paired_tost([0.5, 0.75], [0.75, 1.0], 0.2).p_beyond == 0.0
    assert limit_test([1.0, 1.0, 1.0], 0.9, resolution=0.25).p_above > 0.05
    assert not sigma_test([0.5, 0.75, 0.5], [0.5, 0.75, 0.5], 0.5, resolution=0.25).equivalent


def test_many_pairs_in_steps_are_tested_as_ever():
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 257, 8) / 256 for _ in range(2))
    assert paired_tost(left, right, 0.1, resolution=1 / 256) == paired_tost(left, right, 0.1)


@pytest.mark.parametrize(("num_pairs", "share"), [(3, 0.0), (6, 0.1)])
def test_a_description_s_interval_is_that_of_a_claim(num_pairs, share):
    """Without what a step may do it said ±0, and that 2 pairs would do."""
    rng = np.random.default_rng(0)
    left = np.round((np.linspace(0.1, 0.8, 20) + 0.1 * rng.standard_normal((num_pairs, 20))) * 16) / 16
    right = left + (rng.random(left.shape) < share) / 16
    claim = Primary(metric=ACCURACY, margin=0.01, transform="identity", climbs=False)
    (tested,) = verdict(claim, ACCURACY, baseline=left, treatment=right).primaries
    (described,) = verdict(None, ACCURACY, baseline=left, treatment=right).descriptions
    assert described.interval == tested.interval and described.certified_bound == tested.certified_bound
    assert described.certified_bound is not None and described.certified_bound > 0
    assert described.margin and tested.standard_error is not None
    sd = tested.standard_error * np.sqrt(num_pairs)
    assert described.runs_needed == pairs_needed(described.margin, sd)


def test_runs_needed_of_a_metric_in_steps_count_what_a_step_may_do():
    """As of pairs: of runs that end alike, 2 of each arm were said to do."""
    rng = np.random.default_rng(0)
    curves = np.round((np.linspace(0.1, 0.8, 20) + 0.1 * rng.standard_normal((6, 20))) * 16) / 16
    curves[:, -4:] = 0.75
    claim = Primary(metric=ACCURACY, margin=0.01, transform="identity", climbs=False)
    arms = {"baseline": curves[:3], "treatment": curves[3:]}
    (tested,) = verdict(claim, ACCURACY, paired=False, **arms).primaries
    (described,) = verdict(None, ACCURACY, paired=False, **arms).descriptions
    assert tested.result == "undecided" and tested.interval == described.interval
    assert tested.standard_error is not None and described.margin
    sds = (tested.standard_error * np.sqrt(3 / 2),) * 2
    assert tested.pairs_needed == runs_needed(0.01, sds) == 7
    assert described.runs_needed == runs_needed(described.margin, sds)


@pytest.mark.parametrize("allowed", [{"margin": 0.02}, {"above": 0.5}])
def test_copied_runs_are_no_mismatch(allowed):
    """Two seeds of one run have a spread of 0: any difference would exceed any margin."""
    rng, climb = np.random.default_rng(0), 1 - np.exp(-np.arange(30) / 8)
    left, right = climb + 0.1 * rng.standard_normal(30), climb + 0.2 + 0.1 * rng.standard_normal(30)
    arms = {"baseline": np.array([left, left]), "treatment": np.array([right, right])}
    found = verdict(Primary(metric="train/reward", **allowed), "train/reward", True, **arms)
    assert found.verdict == "INCONCLUSIVE" and "holds the numbers of baseline/seed-0" in found.reasons[0]


def test_pairs_needed_of_margins_in_sigmas_count_a_treatment_that_varies_more():
    rng, claim = np.random.default_rng(0), Primary(metric=ACCURACY, margin="1 sigma", climbs=False)
    left, own = rng.normal(0, 1, (2, 5, 1)) + rng.normal(0, 0.01, (2, 5, 20))
    needed = []
    for ratio in (1.0, 3.0):
        right = ratio * (0.6 * left + 0.8 * own)
        (found,) = verdict(claim, ACCURACY, baseline=left, treatment=right).primaries
        needed.append(found.pairs_needed)
    assert needed[1] > 2 * needed[0], needed
