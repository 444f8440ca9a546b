"""Copies, running means, collapses and early differences: caught, and not said of equal arms by chance."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from abrun.logs.recorded.experiment import Pair
from abrun.messages import sentence, sentences
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Guards
from abrun.stats.curves import find_copies, measure_shared_changes, measure_smoothness
from abrun.verdict.sensitivity import check_distinct_seeds
from abrun.verdict.step_one import has_shared_prompts
from abrun.verdict.whole_curve import curve_warnings
from tests.replications import replicated
from tests.snapshot import Snapshot
from tests.verdict.recorded import sides_of
from tests.verdict.test_guards import guards_of

Curves = NDArray[np.float64]
REWARD = "train/reward"
STEPS = 64
PAIRS = (3, 5, 8, 10)


def noise(rng: np.random.Generator, shape: tuple[int, ...], persistence: float) -> Curves:
    """Stationary AR(1) noise of sd 1 along the last axis."""
    values = rng.standard_normal(shape)
    for step in range(1, shape[-1]):
        fresh = np.sqrt(1 - persistence**2) * values[..., step]
        values[..., step] = persistence * values[..., step - 1] + fresh
    return values


def learning(rng: np.random.Generator, num_runs: int, sd: float = 0.02, persistence: float = 0.5) -> Curves:
    """Rewards [R, S] that rise from 0.1 to 0.7, with step noise and a level of each seed."""
    trend = 0.1 + 0.6 * (1 - np.exp(-np.arange(STEPS) / 10))
    level = 0.01 * rng.standard_normal((num_runs, 1))
    return trend + level + sd * noise(rng, (num_runs, STEPS), persistence)


def repeated(baseline: Curves, treatment: Curves, **options: Any) -> Reason | None:
    return check_distinct_seeds(sides_of({REWARD: baseline}, {REWARD: treatment}, **options), REWARD)


def warnings_of(arms: Sequence[Curves]) -> list[Reason]:
    """What is said of a claim within 0.05 over the last 20 % that holds."""
    sides = sides_of({REWARD: arms[0]}, {REWARD: arms[1]})
    return list(curve_warnings(sides, REWARD, "identity", (52, 64), 0.05, holds=True))


# --- copies ---


def test_a_steep_fall_that_all_seeds_share_makes_no_copies() -> None:
    """The losses of a speedrun: 8 seeds that differ by 0.001 in a fall from 11 to 3.3."""
    fall = 3.3 + 7.7 * np.exp(-np.arange(40) / 3)
    values = fall + 0.001 * np.random.default_rng(0).standard_normal((8, 40))
    assert not find_copies(values).any(where=~np.eye(8, dtype=bool))
    copies = np.concatenate([values, values[:1] + 1e-6 * np.random.default_rng(1).standard_normal((1, 40))])
    assert np.argwhere(find_copies(copies) & ~np.eye(9, dtype=bool)).tolist() == [[0, 8], [8, 0]]


@pytest.mark.parametrize("paired", [True, False])
def test_a_pair_and_its_noisy_copies_are_one_run(paired: bool) -> None:
    rng = np.random.default_rng(0)
    pair = [learning(rng, 1) for _ in range(2)]
    arms = [np.repeat(one, 5, axis=0) + 1e-4 * rng.standard_normal((5, STEPS)) for one in pair]
    found = repeated(*arms, paired=paired)
    assert found and found.code == Code.ONE_RUN_AS_TWO_SEEDS
    assert (found["other"], found["correlation"]) == ("baseline/seed-0", 0.99)


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_an_export_rounded_is_one_run(digits: int) -> None:
    rng = np.random.default_rng(digits)
    baseline, treatment = learning(rng, 3), learning(rng, 3)
    baseline[2] = np.round(baseline[0], digits)
    assert repeated(baseline, treatment)


def test_a_treatment_that_is_another_seeds_treatment_is_one_run() -> None:
    rng = np.random.default_rng(1)
    baseline, treatment = learning(rng, 3), learning(rng, 3)
    treatment[2] = treatment[0] + 1e-4 * rng.standard_normal(STEPS)
    found = repeated(baseline, treatment)
    assert found and (found["run"], found["other"]) == ("treatment/seed-2", "treatment/seed-0")


def test_arms_of_one_seed_may_move_alike() -> None:
    rng = np.random.default_rng(2)
    baseline = learning(rng, 5)
    treatment = baseline + 1e-5 * rng.standard_normal(baseline.shape)
    assert repeated(baseline, treatment) is None
    assert repeated(baseline, treatment, paired=False) is None


def test_copies_of_a_discrete_metric_show_in_the_others(snapshot: Snapshot) -> None:
    rng = np.random.default_rng(3)
    rate = np.full(STEPS, 1e-4)
    distinct = [
        {
            REWARD: np.round(4 * learning(rng, 3)) / 4,
            "train/grad_norm": np.exp(noise(rng, (3, STEPS), 0.0)),
            "schedule": np.repeat([np.cos(np.arange(STEPS) / 9)], 3, axis=0),
            "coefficient": np.repeat([rate], 3, axis=0),
        }
        for _ in range(2)
    ]
    assert check_distinct_seeds(sides_of(*distinct), REWARD) is None
    norms = distinct[0]["train/grad_norm"]
    norms[2] = norms[1] * (1 + 1e-5 * rng.standard_normal(STEPS))
    found = check_distinct_seeds(sides_of(*distinct), REWARD)
    assert found and (found["run"], found["metrics"]) == ("baseline/seed-2", ["train/grad_norm"])
    snapshot(sentence(found))


@pytest.mark.parametrize(
    ("num_steps", "sd", "jump"),
    [
        (10, 0.02, 0.0),
        (10, 0.002, 0.0),
        (10, 0.02, 1.0),
        (10, 0.002, 1.0),
        (32, 0.002, 1.0),
        (64, 0.02, 1.0),
        (64, 0.002, 0.0),
    ],
)
def test_seeds_that_follow_one_trend_are_not_one_run(num_steps: int, sd: float, jump: float) -> None:
    """A steep common trend, or one common jump, moves all seeds alike; their noise does not."""
    rng = np.random.default_rng(num_steps)
    steps = np.arange(num_steps)
    trend = 2 * np.exp(-steps / 8) + jump * (steps >= num_steps // 2)
    found = sum(
        find_copies(trend + sd * noise(rng, (10, num_steps), persistence))[np.triu_indices(10, 1)].any()
        for persistence in (0.0, 0.5, 0.9)
        for _ in range(70)
    )
    assert found == 0


@pytest.mark.parametrize("num_steps", [10, 20, 64])
@pytest.mark.parametrize("num_pairs", PAIRS)
def test_seeds_that_see_the_same_batches_are_not_one_run(num_pairs: int, num_steps: int) -> None:
    """Step noise of the batches, ten times that of a seed, moves all runs alike, and a treatment its arm."""
    rng = np.random.default_rng(num_pairs)
    found = 0
    for _ in range(50):
        batches = 0.1 * rng.standard_normal(num_steps)
        of_arms = 0.005 * np.repeat(rng.standard_normal((2, num_steps)), num_pairs, axis=0)
        curves = batches + of_arms + 0.01 * rng.standard_normal((2 * num_pairs, num_steps))
        found += bool(find_copies(curves)[np.triu_indices(2 * num_pairs, 1)].any())
    assert found <= 1


def test_every_run_a_repeat_of_one_is_one_run() -> None:
    """As where the seed never reaches the trainer, and the arms hardly differ."""
    rng = np.random.default_rng(4)
    curves = learning(rng, 1) + 1e-5 * rng.standard_normal((6, STEPS))
    assert repeated(curves[:3], curves[3:])


# --- running means ---


def smoothed(values: Curves, keep: float) -> Curves:
    means = values.copy()
    for step in range(1, values.shape[1]):
        means[:, step] = keep * means[:, step - 1] + (1 - keep) * values[:, step]
    return means


def test_running_means_are_said_and_raw_curves_are_not() -> None:
    rng = np.random.default_rng(4)
    raw = [learning(rng, 4, sd=0.01) for _ in range(2)]
    assert not any(warning.code == Code.RUNNING_MEAN for warning in warnings_of(raw))
    for kind in (
        [smoothed(one, 0.99) for one in raw],
        [one.cumsum(axis=1) / np.arange(1, STEPS + 1) for one in raw],
    ):
        assert any(warning.code == Code.RUNNING_MEAN for warning in warnings_of(kind))
    coefficients = [measure_smoothness(learning(rng, 5, persistence=0.9)) or 0.0 for _ in range(100)]
    assert max(coefficients) < 0.9


# --- collapse and early differences ---


def test_a_collapse_of_both_arms_is_said(snapshot: Snapshot) -> None:
    rng = np.random.default_rng(5)
    arms = [learning(rng, 3) for _ in range(2)]
    for one in arms:
        one[:, 40:] -= 0.48
    warnings = warnings_of(arms)
    assert [(warning.code, warning["arm"]) for warning in warnings] == [
        (Code.COLLAPSED, "baseline"),
        (Code.COLLAPSED, "treatment"),
    ]
    assert 0.2 <= warnings[0]["level"] < 0.3 and 0.6 <= warnings[0]["best"] < 0.7
    snapshot("\n".join(sentences(warnings)))


def test_a_baseline_that_collapses_to_a_treatment_that_never_learned_is_said(
    snapshot: Snapshot,
) -> None:
    rng = np.random.default_rng(6)
    baseline, treatment = learning(rng, 4), 0.22 + 0.02 * noise(rng, (4, STEPS), 0.5)
    baseline[:, 40:] = 0.22 + 0.02 * noise(rng, (4, STEPS - 40), 0.5)
    collapsed, differs = warnings_of([baseline, treatment])
    assert (collapsed.code, collapsed["arm"]) == (Code.COLLAPSED, "baseline")
    assert differs.code == Code.DIFFERS_EARLIER and "25-32" in differs["blocks"]
    snapshot(sentence(differs))


def chance_of_a_warning(num_pairs: int, drop: float, gap: float, num: int) -> float:
    """The share of experiments with a warning, of a drop and a difference in one eighth, margin 0.05."""
    rng = np.random.default_rng([num_pairs, round(100 * drop), round(100 * gap)])
    warned = 0
    for _ in range(num):
        arms = [0.7 + 0.02 * noise(rng, (num_pairs, STEPS), 0.9) for _ in range(2)]
        arms[0][:, 48:] -= drop
        arms[1][:, 48:] -= drop
        arms[1][:, 16:24] -= gap
        warned += bool(warnings_of(arms))
    return warned / num


@replicated(300)
@pytest.mark.parametrize("num_pairs", PAIRS)
def test_noise_alone_is_no_collapse_and_no_early_difference(num_pairs: int, num: int) -> None:
    assert chance_of_a_warning(num_pairs, 0.0, 0.0, num) <= binom.ppf(0.999, num, 0.01) / num


@pytest.mark.slow
@pytest.mark.parametrize("num_pairs", PAIRS)
def test_at_the_margin_a_warning_keeps_its_level(num_pairs: int) -> None:
    num = 1000
    for drop, gap in ((0.0, 0.05), (0.05, 0.0)):
        share = chance_of_a_warning(num_pairs, drop, gap, num)
        assert share <= binom.ppf(0.999, num, 0.10) / num  # two arms, each at 5 %
    assert chance_of_a_warning(num_pairs, 0.3, 0.0, 200) > 0.95


# --- guards where both arms break the limit ---


@replicated(200)
@pytest.mark.parametrize("num_pairs", PAIRS)
def test_a_guard_that_both_arms_break_is_decided_by_its_test(num_pairs: int, num: int) -> None:
    rng = np.random.default_rng(num_pairs)
    alarms = called = 0
    for _ in range(num):
        arms = [
            1
            + 0.07
            * np.exp(0.1 * noise(rng, (num_pairs, 40), 0.5) + 0.05 * rng.standard_normal((num_pairs, 1)))
            for _ in range(2)
        ]
        alarms += guards_of(arms[0], arms[1], Guards())["token_mult_prob_error_median"] == "fail"
        far = 1 + 700 * (arms[1] - 1)
        called += guards_of(arms[0], far, Guards())["token_mult_prob_error_median"] == "fail"
    assert alarms <= binom.ppf(0.999, num, 0.01 / 4)
    assert called == num


@pytest.mark.parametrize("num_pairs", PAIRS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_an_error_that_is_no_number_is_above_the_limit(num_pairs: int, broken: float) -> None:
    rng = np.random.default_rng(num_pairs)
    baseline, treatment = 1.01 + 0.001 * rng.random((2, num_pairs, 40))
    treatment[:, 1:] = broken
    found = guards_of(baseline, treatment, Guards())
    assert found["token_mult_prob_error_median"] == found["token_mult_prob_error_share"] == "fail"
    found = guards_of(treatment, baseline, Guards())
    assert found["token_mult_prob_error_median"] == found["token_mult_prob_error_share"] == "pass"
    found = guards_of(treatment, treatment, Guards())
    assert found["token_mult_prob_error_median"] == "baseline too"


# --- the first reward ---


def first_rewards(baseline: Curves, treatment: Curves) -> list[Pair]:
    sides = sides_of({REWARD: baseline}, {REWARD: treatment})
    return [
        Pair(seed=left.name.seed, baseline=left, treatment=right, reruns=())
        for left, right in zip(sides.baselines, sides.treatments, strict=True)
    ]


@pytest.mark.parametrize(
    ("rewards", "shared"),
    [
        ([0.1, 0.2, 0.3], True),
        ([0.1, 0.1, 0.2, 0.3], True),
        ([0.1, 0.2], False),
        ([0.0, 0.0, 0.0, 0.1], False),
    ],
)
def test_first_rewards_that_are_equal_within_pairs_show_shared_prompts(
    rewards: list[float], shared: bool
) -> None:
    values = np.array(rewards)[:, None]
    assert has_shared_prompts(first_rewards(values, values)) == shared
    moved = values.copy()
    moved[0] += 0.05
    assert not has_shared_prompts(first_rewards(values, moved))


def test_other_prompts_seldom_give_equal_first_rewards() -> None:
    rng = np.random.default_rng(7)
    for num_prompts, rate in ((3, 0.5), (8, 0.5), (64, 0.02)):
        for num_pairs in PAIRS:
            rewards = rng.binomial(num_prompts, rate, (2, 1000, num_pairs, 1)) / num_prompts
            alike = sum(
                has_shared_prompts(first_rewards(*rewards[:, i]))
                for i in range(1000)
                if (rewards[0, i] == rewards[1, i]).all()
            )
            assert alike <= binom.ppf(0.999, 1000, 0.005)


# --- a running best, a log plus noise, and seeds that are averages ---


def curves_of(rng: np.random.Generator, num: int = 5) -> Curves:
    """Curves [num, STEPS] that climb and wobble, each with its own noise."""
    return np.minimum(np.arange(STEPS) / 30, 1) + 0.05 * rng.standard_normal((num, STEPS))


def codes_of(baseline: Curves, treatment: Curves) -> set[Code]:
    return {warning.code for warning in warnings_of((baseline, treatment))}


@pytest.mark.parametrize("sign", [1, -1])
def test_an_arm_that_logs_its_best_so_far_is_named(sign: int) -> None:
    rng = np.random.default_rng(5)
    baseline, treatment = curves_of(rng), curves_of(rng)
    (best,) = (
        warning
        for warning in warnings_of((sign * baseline, sign * np.maximum.accumulate(treatment, axis=1)))
        if warning.code == Code.RUNNING_BEST
    )
    assert best["arm"] == "treatment" and "best value so far" in sentence(best)
    assert Code.RUNNING_BEST in codes_of(np.maximum.accumulate(baseline, axis=1), treatment)
    both = [np.maximum.accumulate(arm, axis=1) for arm in (baseline, treatment)]
    assert Code.RUNNING_BEST not in codes_of(*both) | codes_of(baseline, treatment)


def test_a_log_plus_noise_of_a_thousandth_is_named() -> None:
    rng = np.random.default_rng(6)
    baseline = curves_of(rng)
    tiny = 1e-6 * rng.standard_normal(baseline.shape)
    assert Code.TINY_DIFFERENCES in codes_of(baseline, baseline + tiny)
    late = tiny.copy()
    late[:, 40:] += 0.05 * rng.standard_normal((5, STEPS - 40))  # arms that part after some steps
    assert Code.TINY_DIFFERENCES not in codes_of(baseline, baseline + late)
    one_pair_differs = tiny * np.array([1.0, 1.0, 1.0, 1.0, 1e5])[:, None]
    assert Code.TINY_DIFFERENCES not in codes_of(baseline, baseline + one_pair_differs)
    assert Code.TINY_DIFFERENCES not in codes_of(baseline, baseline)  # bit-identical: refused elsewhere
    replayed = sides_of({REWARD: baseline}, {REWARD: baseline + tiny})
    treatments = tuple(replace(run, config={"rollout.engine": "recorded"}) for run in replayed.treatments)
    replayed = replace(replayed, treatments=treatments)
    assert replayed.share_rollouts
    assert not list(curve_warnings(replayed, REWARD, "identity", (52, 64), 0.05, holds=True))


def test_averages_of_the_same_runs_are_no_independent_seeds() -> None:
    """Each "seed" is the mean of all other runs of five."""
    rng = np.random.default_rng(7)
    arms = [curves_of(rng) for _ in range(2)]
    averages = [(runs.sum(axis=0) - runs) / 4 for runs in arms]
    (shared,) = (one for one in warnings_of(averages) if one.code == Code.CHANGES_SHARED)
    assert shared["correlation"] == pytest.approx(0.75, abs=0.15)
    assert "they are not independent" in sentence(shared)
    assert Code.CHANGES_SHARED not in codes_of(*arms)


@replicated(200)
@pytest.mark.parametrize("num_runs", [2, 3, 5, 10])
@pytest.mark.parametrize("num_steps", [40, 100])
def test_independent_curves_share_nothing(num_runs: int, num_steps: int, num: int) -> None:
    """White, autocorrelated, heavy-tailed and skewed noise, and noise on a shared trend."""
    rng = np.random.default_rng([num_runs, num_steps])
    trend = 3 * np.sin(6 * np.arange(num_steps) / num_steps)
    makers = {
        "white": lambda: rng.standard_normal((num_runs, num_steps)),
        "walk": lambda: rng.standard_normal((num_runs, num_steps)).cumsum(axis=1),
        "heavy": lambda: rng.standard_t(2, (num_runs, num_steps)),
        "skewed": lambda: rng.exponential(size=(num_runs, num_steps)),
        "trend": lambda: trend + 0.05 * rng.standard_normal((num_runs, num_steps)),
    }
    num_found = {
        name: sum(measure_shared_changes(make()) is not None for _ in range(num))
        for name, make in makers.items()
    }
    assert max(num_found.values()) <= binom.ppf(0.9967, num, 0.005), (
        num_found
    )  # more are one in 300 of these counts
