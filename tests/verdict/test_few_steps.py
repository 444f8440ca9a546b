"""Metrics that move in steps (an accuracy over few prompts), and copied runs: ties are no certainty."""

import numpy as np
import pytest

from abrun.logs.recorded.experiment import RecordedRun
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.stats.equivalence import equivalence_test, limit_test
from abrun.stats.power import pairs_needed, welch_dof_per_run
from abrun.stats.sigma_margin import sigma_test
from abrun.verdict.decide import ArmVerdict, judge
from abrun.verdict.summaries import find_resolution
from tests.verdict.recorded import experiment_of, runs_of

STEPS = np.arange(10, 60, 10)
ACCURACY = "validation/accuracy"


def verdict(claim: Claim | None, metric: str, paired: bool = True, **arms: np.ndarray) -> ArmVerdict:
    """Of curves [P, S]; without a claim they are described."""
    claims = [claim] if claim else []
    runs = [runs_of(arm, {metric: curves}) for arm, curves in arms.items()]
    experiment = experiment_of(*runs, claims=claims, step_one=False, paired=paired)
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
    rng, claim = np.random.default_rng(0), Claim(metric=ACCURACY, margin=0.05, climbs=False)
    found = [
        verdict(claim, ACCURACY, baseline=left, treatment=right).verdict
        for left, right in (accuracies(rng, num_pairs, num_prompts, 0.05) for _ in range(60))
    ]
    assert found.count("MATCH") <= 6


def recorded(curves: np.ndarray) -> tuple[RecordedRun, ...]:
    """Runs of curves [R, S]."""
    return runs_of("baseline", {ACCURACY: curves})


@pytest.mark.parametrize(
    ("prompts", "digits", "float32"),
    [
        (8, None, False),
        (8, 2, False),
        (8, 2, True),
        (12, 3, False),
        (16, 2, False),
        (16, 3, True),
        (24, 2, False),
        (24, 3, False),
        (32, 2, False),
        (32, 3, False),
    ],
)
def test_the_step_of_a_rounded_accuracy_is_that_of_its_prompts(prompts, digits, float32):
    """Two-digit eighths, .12 .25 .38, were taken for no counts: three pairs alike had a spread of 0."""
    answers = np.random.default_rng(prompts).binomial(prompts, np.linspace(0.1, 0.8, 12), (6, 12)) / prompts
    curves = answers if digits is None else np.round(answers, digits)
    runs = recorded(curves.astype(np.float32).astype(np.float64) if float32 else curves)
    step = find_resolution(runs, Claim(metric=ACCURACY, margin=0.05), curves[:, -1:])
    assert step == pytest.approx(1 / prompts, abs=1.01 * 10.0 ** -(digits or 9))


@pytest.mark.parametrize(("decimals", "step"), [(None, 0.0), (12, 0.0), (4, 1e-4), (2, 1e-2)])
def test_of_continuous_values_the_step_is_the_log_s_last_digit(decimals, step):
    curves = np.random.default_rng(0).normal(0.5, 0.1, (10, 200))
    runs = recorded(curves if decimals is None else np.round(curves, decimals))
    assert find_resolution(runs, Claim(metric=ACCURACY, margin=0.05), curves[:, -1:]) == pytest.approx(step)


def test_values_that_repeat_have_a_step_though_they_lie_on_no_grid():
    curves = np.random.default_rng(0).choice([0.0, 0.13, 0.74, 1.0], (6, 10))
    claim = Claim(metric=ACCURACY, margin=0.05)
    assert find_resolution(recorded(curves), claim, curves[:, -1:]) == pytest.approx(0.13)


def test_a_window_s_step_is_divided_by_the_changes_in_it_alone():
    """Ten validations with the same answers say no more than one."""
    curves, claim = np.arange(48).reshape(4, 12) % 9 / 8, Claim(metric=ACCURACY, margin=0.05)
    still, moving = np.zeros((3, 10)), np.arange(30).reshape(3, 10) % 2 / 8
    half = np.where(np.arange(10) < 5, 0.0, 1 / 8) * np.ones((3, 1))
    steps = [find_resolution(recorded(curves), claim, window) for window in (still, half, moving)]
    assert steps == pytest.approx([1 / 8, 1 / 16, 1 / 80])


@pytest.mark.parametrize("digits", [None, 2])
@pytest.mark.parametrize("repeated", [1, 4])
def test_three_pairs_alike_are_no_match_however_they_were_logged(digits, repeated):
    """Rounded to two digits, or with the last validation repeated, they were a match with a bound of 0."""
    answers = np.array([[1, 3, 5, 6], [2, 3, 4, 7], [1, 4, 5, 5]]) / 8
    curves = np.repeat(answers, [1, 1, 1, repeated], axis=1)
    curves = curves if digits is None else np.round(curves, digits)
    treatment = curves.copy()
    treatment[:, 1] += 0.25  # or the arms would be the same bit for bit
    claim = Claim(metric=ACCURACY, margin=0.05, window=f"steps 4-{3 + repeated}", climbs=False)
    found = verdict(claim, ACCURACY, baseline=curves, treatment=treatment)
    assert found.verdict == "INCONCLUSIVE" and Code.WIDE_STEPS() in found.reasons[0]["warnings"]
    wide = verdict(claim.model_copy(update={"margin": 0.4}), ACCURACY, baseline=curves, treatment=treatment)
    assert wide.verdict == "MATCH" and Code.WIDE_STEPS() not in wide.reasons[0]["warnings"]


@pytest.mark.parametrize("test", [equivalence_test, equivalence_test])
def test_ties_leave_what_one_step_may_do(test):
    """Of n pairs without a difference, one in 1 / (1 - 0.05**(1/n)) may still differ: exact."""
    found = test([0.5, 0.75, 0.5], [0.5, 0.75, 0.5], 0.1, resolution=0.25)
    bound, least = found.certified_bound, 0.25 * (1 - 0.05 ** (1 / 3))
    assert not found.equivalent
    assert bound == pytest.approx(least) if test is equivalence_test else bound > least
    shifted = equivalence_test([0.5, 0.75], [0.75, 1.0], 0.2, resolution=0.25)
    assert shifted.p_beyond > 0.1 > equivalence_test([0.5, 0.75], [0.75, 1.0], 0.2).p_beyond == 0.0
    assert limit_test([1.0, 1.0, 1.0], 0.9, resolution=0.25).p_above > 0.05
    assert not sigma_test([0.5, 0.75, 0.5], [0.5, 0.75, 0.5], 0.5, resolution=0.25).equivalent


def test_many_pairs_in_steps_are_tested_as_ever():
    rng = np.random.default_rng(0)
    left, right = (rng.integers(0, 257, 8) / 256 for _ in range(2))
    assert equivalence_test(left, right, 0.1, resolution=1 / 256) == equivalence_test(left, right, 0.1)


def test_a_curve_that_every_pair_repeats_differs_by_zero():
    """Values in steps gave arms that are the same at every step an interval of ±0.03."""
    left = np.random.default_rng(0).integers(0, 17, (3, 20)) / 16
    (described,) = verdict(None, ACCURACY, baseline=left, treatment=left).select("description")
    assert described["interval"] == (0, 0)


@pytest.mark.parametrize(("num_pairs", "share"), [(3, 0.05), (6, 0.1)])
def test_a_description_s_interval_is_that_of_a_claim(num_pairs, share):
    """Without what a step may do it said ±0, and that 2 pairs would do."""
    rng = np.random.default_rng(0)
    left = np.round((np.linspace(0.1, 0.8, 20) + 0.1 * rng.standard_normal((num_pairs, 20))) * 16) / 16
    right = left + (rng.random(left.shape) < share) / 16
    claim = Claim(metric=ACCURACY, margin=0.01, transform="identity", climbs=False)
    (tested,) = verdict(claim, ACCURACY, baseline=left, treatment=right).claims
    (described,) = verdict(None, ACCURACY, baseline=left, treatment=right).select("description")
    assert (
        described["interval"] == tested.estimate.interval
        and described["certified_bound"] == tested.estimate.certified_bound
    )
    assert described["certified_bound"] is not None and described["certified_bound"] > 0
    assert described["margin"] and tested.estimate.standard_error is not None
    sd = tested.estimate.standard_error * np.sqrt(num_pairs)
    assert described["runs_needed"] == pairs_needed(described["margin"], sd)


def test_runs_needed_of_a_metric_in_steps_count_what_a_step_may_do():
    """As of pairs: of runs that end alike, 2 of each arm were said to do. Four equal values are one."""
    rng = np.random.default_rng(0)
    curves = np.round((np.linspace(0.1, 0.8, 20) + 0.1 * rng.standard_normal((6, 20))) * 16) / 16
    curves[:, -4:] = 0.75
    claim = Claim(metric=ACCURACY, margin=0.01, transform="identity", climbs=False)
    arms = {"baseline": curves[:3], "treatment": curves[3:]}
    (tested,) = verdict(claim, ACCURACY, paired=False, **arms).claims
    (described,) = verdict(None, ACCURACY, paired=False, **arms).select("description")
    assert tested.result == "undecided" and tested.estimate.interval == described["interval"]
    assert tested.estimate.standard_error is not None and described["margin"]
    sds = (tested.estimate.standard_error * np.sqrt(3 / 2),) * 2
    sd, freedom = np.hypot(*sds), welch_dof_per_run(sds)
    assert tested.power.pairs_needed == pairs_needed(0.01, sd, dof_per_pair=freedom) == 95
    assert described["runs_needed"] == pairs_needed(described["margin"], sd, dof_per_pair=freedom)


REWARD = "train/reward"


@pytest.mark.parametrize("allowed", [{"margin": 0.02}, {"margin": "0.1 sigma"}, {"above": 0.9}])
@pytest.mark.parametrize(("sizes", "paired"), [((2, 2), True), ((2, 20), False), ((20, 2), False)])
def test_two_pairs_or_two_runs_of_an_arm_are_no_mismatch(allowed, sizes, paired):
    """Two runs that failed beside two that did not were a mismatch of equal arms."""
    rng, climb = np.random.default_rng(0), 1 - np.exp(-np.arange(30) / 8)
    left, right = (climb + 0.001 * rng.standard_normal((size, 30)) for size in sizes)
    claim = Claim(metric=REWARD, climbs=False, **allowed)
    found = verdict(claim, REWARD, paired, baseline=left, treatment=right - 0.5)
    too_few = Code.TOO_FEW_FOR_MISMATCH(paired=paired, needed=3)
    assert found.verdict == "INCONCLUSIVE" and too_few in found.reasons[0]["warnings"], found.reasons
    more = tuple(climb + 0.001 * rng.standard_normal((max(3, size), 30)) for size in sizes)
    found = verdict(claim, REWARD, paired, baseline=more[0], treatment=more[1] - 0.5)
    assert found.verdict == ("FAIL" if "above" in allowed else "MISMATCH"), found.reasons


def test_a_margin_in_sigmas_says_that_the_baseline_s_seeds_are_skewed():
    """One baseline seed of eight fails in both arms: the differences are as normal as ever."""
    rng = np.random.default_rng(0)
    left = np.linspace(0, 1, 20) + 0.01 * rng.standard_normal((8, 1)) - 0.5 * (np.arange(8) == 3)[:, None]
    right = left + 0.001 * rng.standard_normal((8, 1)) + 1e-5 * rng.standard_normal((8, 20))
    for margin, said in (("1 sigma", True), (0.05, False)):
        (found,) = verdict(Claim(metric=REWARD, margin=margin), REWARD, baseline=left, treatment=right).claims
        skewed = [warning["sample"] for warning in found.warnings if warning.code == Code.SKEWED]
        assert ("baseline" in skewed) == said
