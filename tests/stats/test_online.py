"""The online procedure against its oracle in plain loops, and campaigns of many candidates."""

import numpy as np
import pytest
from scipy import stats

from abrun.stats.online import (
    MAX_SEEDS,
    MIN_SEEDS,
    Noise,
    Sample,
    level_share,
    lord_level,
    read_candidate,
    seeds_to_add,
)
from tests.bench.bench_gate import Outcome, Setting, simulate


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
    shares = [float(level_share(count)) for count in range(1, MAX_SEEDS + 2)]
    assert sum(shares) == pytest.approx(1) and shares[: MIN_SEEDS - 1] == [0, 0] and shares[-1] == 0
    assert shares[MAX_SEEDS - 1] == max(shares)


def test_a_reading_agrees_with_the_pooled_t_test_where_no_variance_stands_out():
    candidate, incumbent = [1.0, 2.0, 3.0, 4.0], [0.0, 1.3, 2.6, 0.7, 1.9]
    spread = 1.8  # other runs, with larger variance than both
    noise = Noise(squares=spread**2 * 50, dof=50.0)
    reading = read_candidate(Sample.of(candidate), Sample.of(incumbent), noise, level=0.05, worth=1.0)
    squares = sum((x - np.mean(values)) ** 2 for values in (candidate, incumbent) for x in values)
    variance = (spread**2 * 50 + squares) / 57
    t = (np.mean(candidate) - np.mean(incumbent)) / np.sqrt(variance * (1 / 4 + 1 / 5))
    assert reading.dof == 57 and reading.sd == pytest.approx(np.sqrt(variance))
    assert reading.p == pytest.approx(stats.t.sf(t, 57))


def test_the_variance_of_a_noisy_candidate_counts_in_full():
    quiet = Sample.of(np.linspace(-1, 1, 12))
    noise = Noise(squares=60.0, dof=100.0)
    values = [-6.0, 0.0, 6.0, 8.0]
    reading = read_candidate(Sample.of(values), quiet, noise, level=0.05, worth=1.0)
    pooled = (60 + float(quiet.squares) + 3 * np.var(values, ddof=1)) / 114
    terms = np.var(values, ddof=1) / 4, pooled / 12
    assert reading.error == pytest.approx(np.sqrt(sum(terms)))
    expected_dof = sum(terms) ** 2 / (terms[0] ** 2 / 3 + terms[1] ** 2 / 114)  # Satterthwaite
    assert reading.dof == pytest.approx(expected_dof) and reading.dof < 4
    assert reading.p == pytest.approx(stats.t.sf(2.0 / reading.error, expected_dof))


def test_identical_runs_are_decided_by_value():
    same = Sample.of([1.0, 1.0, 1.0])
    none = Noise()
    higher = read_candidate(Sample.of([2.0, 2.0, 2.0]), same, none, level=0.01, worth=0.5)
    equal = read_candidate(same, same, none, level=0.01, worth=0.5)
    lower = read_candidate(Sample.of([0.5, 0.5, 0.5]), same, none, level=0.01, worth=0.5)
    assert higher.better and equal.alike and lower.worse


def test_an_improvement_below_the_margin_is_not_better():
    rng = np.random.default_rng(3)
    candidate, incumbent = Sample.of(rng.normal(1, 0.1, 8)), Sample.of(rng.normal(0, 0.1, 12))
    assert read_candidate(candidate, incumbent, Noise(), level=0.01, worth=3.0).better
    assert not read_candidate(candidate, incumbent, Noise(), level=0.01, worth=3.0, margin=1.2).better


def test_the_seeds_to_add_are_half_of_those_that_would_decide_if_the_mean_stays():
    incumbent, noise = Sample.of(np.linspace(-1.6, 1.6, 12)), Noise(squares=40.0, dof=40.0)
    candidate = Sample.of([0.6, 2.4, 1.5])

    def is_decided(num_added: int) -> bool:
        count = np.array(3.0 + num_added)
        longer = Sample(count=count, mean=candidate.mean, squares=candidate.squares * (count - 1) / 2)
        reading = read_candidate(longer, incumbent, noise, level=0.005, worth=2.0, in_sds=True)
        return bool(reading.better | reading.alike | reading.worse)

    fewest = next(num_added for num_added in range(1, MAX_SEEDS) if is_decided(num_added))
    added = seeds_to_add(candidate, incumbent, noise, level=0.005, worth=2.0, in_sds=True)
    assert fewest > 2 and added == (fewest + 1) // 2


def check(outcome: Outcome, *, fdr: float, kept: float, runs: float) -> None:
    assert outcome.fdr <= fdr and outcome.large_kept >= kept
    # Five seeds of candidate and baseline each are 10 runs a candidate
    assert outcome.candidate_runs + outcome.incumbent_runs <= runs


def test_a_few_campaigns_keep_what_is_better_at_few_runs():
    check(simulate(Setting(first=3), num_campaigns=40), fdr=0.03, kept=0.78, runs=6.0)


@pytest.mark.slow
@pytest.mark.parametrize("null_share", [0.8, 0.9])
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize(("shape", "kept"), [("normal", 0.8), ("left", 0.8), ("right", 0.6)])
def test_campaigns_keep_the_false_discovery_rate(shape, kept, first, null_share):
    """A long tail to the better side hides improvements: fewer are kept, and no more are false."""
    setting = Setting(shape=shape, null_share=null_share, first=first)
    check(simulate(setting, num_campaigns=200), fdr=0.05, kept=kept, runs=6.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(null_share=1.0),
        Setting(null_share=0.95, step=1),
        Setting(harmful_share=0.5),
        Setting(noisy_share=0.15, noisy_sd=2.0),
        Setting(noisy_share=0.15, noisy_sd=3.0),
        Setting(after_keep="reuse"),
        Setting(incumbent_seeds=4),
    ],
    ids=repr,
)
def test_adverse_campaigns_keep_the_false_discovery_rate(setting):
    outcome = simulate(setting, num_campaigns=300, seed=1)
    assert outcome.fdr <= 0.05 + 2 * outcome.fdr_error
