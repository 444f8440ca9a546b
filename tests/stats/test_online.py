"""The online procedure against its oracle in plain loops, and campaigns of many candidates."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from abrun.stats.online import (
    MAX_SEEDS,
    OLD_RUNS_SD,
    SPENDING,
    Memory,
    Noise,
    environment_excess,
    estimate_environment,
    lord_level,
    plan_seeds,
    read_candidate,
    seeds_to_add,
    spent_level,
)
from tests.bench.bench_gate import ENVIRONMENTS, OTHERS, Outcome, Setting, simulate


def test_levels_are_those_of_the_published_rule():
    """LORD++ as an explicit sum over the discoveries, gamma_j proportional to j ** -1.3."""
    total = sum(j**-1.3 for j in range(1, 2_000_000)) + 2_000_000**-0.3 / 0.3  # with the integral of the tail
    rejected = {4, 5, 9}
    times: list[int] = []
    for t in range(1, 15):
        expected = t**-1.3 / total * 0.045
        for j, time in enumerate(times):
            expected += (t - time) ** -1.3 / total * (0.05 - 0.045 if j == 0 else 0.05)
        assert lord_level(t, times) == pytest.approx(expected, rel=1e-5)
        if t in rejected:
            times.append(t)


def test_levels_assigned_so_far_never_exceed_alpha_times_the_discoveries():
    """Also with discoveries of candidates that were open for long."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        times: list[int] = []
        spent = 0.0
        for t in range(1, 400):
            spent += lord_level(t, times)
            assert spent <= 0.05 * max(1, len(times)) + 1e-12
            times += [t] * int(rng.random() < 0.2)


def test_the_readings_share_one_level():
    spent = [float(spent_level(0.01, count, 8)) for count in range(1, 10)]
    assert spent_level(0.01, MAX_SEEDS, MAX_SEEDS) == 0.01  # planned pairs that do not suffice for `worth`
    assert spent[:2] == [0, 0] and spent[8] == 0 and spent[:8] == sorted(spent[:8])
    assert spent[7] == pytest.approx(0.01 * SPENDING) and spent[3] == pytest.approx(spent[7] / 8)


def test_pairs_are_planned_for_the_improvement_that_must_not_be_missed():
    assert [plan_seeds(worth) for worth in (0.1, 1, 2, 10)] == [100, 30, 8, 4]
    assert [seeds_to_add(count, 30) for count in (1, 2, 4, 16, 30)] == [1, 2, 4, 14, 0]


QUIET = Memory(
    old_mean=0.4, num_old=8, runs=Noise(squares=50.0, dof=50.0), pairs=Noise(squares=100.0, dof=50.0)
)
RULES: dict[str, Any] = {"level": 0.01, "worth": 2.0}


def test_a_reading_is_the_paired_t_test_with_the_pooled_variance():
    candidate, controls = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 1.3, 2.6, 0.7])
    reading = read_candidate(candidate, controls, QUIET, **RULES)
    differences = candidate - controls
    squares = 100 + ((differences - differences.mean()) ** 2).sum()
    assert reading.improvement == pytest.approx(differences.mean()) and reading.dof == 53
    assert reading.error == pytest.approx(np.sqrt(squares / 53 / 4)) and reading.sd == 1
    assert reading.p == pytest.approx(stats.t.sf(differences.mean() / reading.error, 53))
    moved = read_candidate(candidate + 7, controls + 7, QUIET, **RULES)
    assert moved.p == reading.p and moved.improvement == pytest.approx(reading.improvement)


def test_the_variance_of_a_noisy_candidate_counts_in_full():
    values = np.array([-6.0, 0.0, 6.0, 8.0])
    reading = read_candidate(values, np.zeros(4), QUIET, **RULES)
    error = np.std(values, ddof=1) / 2
    assert reading.error == pytest.approx(error) and reading.dof == 3
    assert reading.p == pytest.approx(stats.t.sf(values.mean() / error, 3))


def test_old_runs_weigh_less_the_more_the_environment_moves():
    """Inverse-variance weights, by hand: of controls 2, of old runs 1 / (1 / 8 + environment)."""
    values, controls = np.array([2.4, 2.6]), np.array([2.0, 2.2])
    for environment in (0.0, 0.5, 1e9):
        memory = Memory(
            old_mean=0.4, num_old=8, runs=QUIET.runs, pairs=QUIET.pairs, environment=np.array(environment)
        )
        weight = 1 / (1 / 8 + environment)
        level = (2 * 2.1 + weight * 0.4) / (2 + weight)
        error = np.sqrt(1 / 2 + 1 / (2 + weight))
        reading = read_candidate(values, controls, memory, **RULES)
        assert reading.upper == pytest.approx(2.5 - level + stats.t.isf(0.25 / 4, 50) * error)


def test_old_runs_alone_allow_for_an_environment_that_moved():
    values = np.array([1.9, 2.0, 2.1, 2.0])
    reading = read_candidate(values, None, QUIET, **RULES)
    expected = (QUIET.runs.squares + 0.02) / 53 / 4 + 1 / 8 + OLD_RUNS_SD**2
    assert reading.error == pytest.approx(np.sqrt(expected)) and reading.improvement == pytest.approx(1.6)


def test_a_shift_that_a_round_shows_leaves_old_runs_aside():
    """Controls and candidate are 4 sd below the old runs: the candidate, half an sd better, is not worse."""
    values, controls = np.array([-3.4, -3.6]), np.array([-4.0, -4.0])
    reading = read_candidate(values, controls, QUIET, **RULES)
    assert not reading.worse  # by the pairs almost alone, whose error is 1
    assert reading.upper == pytest.approx(0.5 + stats.t.isf(0.25 / 4, 50), abs=0.15)


def test_the_environment_is_learned_from_the_controls_of_earlier_rounds():
    rng = np.random.default_rng(0)
    shifts = 1.5 * rng.standard_normal(4000)
    memory = Memory(old_mean=rng.normal(0, 8**-0.5, 4000), num_old=8, runs=QUIET.runs, pairs=QUIET.pairs)
    excesses = environment_excess(shifts[:, None] + rng.standard_normal((4000, 2)), memory)
    assert estimate_environment(excesses) == pytest.approx(1.5**2, rel=0.1)
    assert estimate_environment([np.nan] * 3) == pytest.approx(0.25**2)  # a guess
    assert estimate_environment([-1.0] * 3) == 0


def test_identical_runs_are_decided_by_value():
    memory = Memory(
        old_mean=1.0, num_old=3, runs=Noise(squares=0.0, dof=2.0), pairs=Noise(squares=0.0, dof=2.0)
    )
    same = np.ones(3)
    rules: dict[str, Any] = RULES | {"worth": 0.5}
    with np.errstate(all="ignore"):
        assert read_candidate(same + 1, same, memory, **rules).better
        assert not read_candidate(same, same, memory, **rules).better


def test_an_improvement_below_the_margin_is_not_better():
    rng = np.random.default_rng(3)
    candidate, controls = rng.normal(4, 0.1, 8), rng.normal(0, 0.1, 8)
    assert read_candidate(candidate, controls, QUIET, **RULES).better
    assert not read_candidate(candidate, controls, QUIET, **RULES, margin=4.2).better


def check(outcome: Outcome, *, kept: float = 0.8, runs: float = 5.5) -> None:
    assert outcome.fdr <= 0.05 + 2 * outcome.fdr_error and outcome.kept >= kept and outcome.runs <= runs


def test_a_few_campaigns_on_two_machines_keep_what_is_better_at_few_runs():
    check(
        simulate(Setting(environment="machines", size_sd=2, num_candidates=60), num_campaigns=40), kept=0.75
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_campaigns_keep_the_false_discovery_rate_whatever_the_environment(name):
    check(simulate(ENVIRONMENTS[name], num_campaigns=200))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_adverse_campaigns_keep_the_false_discovery_rate(name):
    check(simulate(OTHERS[name], num_campaigns=200, seed=1), kept=0.7, runs=20.0)
