"""The tester is tested: whole verdicts over thousands of simulated experiments with a known truth.

A simulated experiment has two arms of learning curves with autocorrelated noise. Each pair's window means are
normal over seeds with sd 1 (sigma) and correlation rho between the arms; the treatment is shifted by a known
amount after step one. The rates are those that error-rates.md promises.
"""

import functools
import itertools

import numpy as np
import pytest
from scipy.stats import binom

from abrun.recipe.claims import Claim
from abrun.stats.equivalence import equivalence_test
from abrun.stats.power import power_at, sd_of_difference
from abrun.stats.sigma_margin import VarianceModel, sigma_power
from abrun.verdict.decide import judge
from tests.bench import bench_one_sided
from tests.bench.bench_descriptions import rates_over_pairs, rates_over_steps
from tests.bench.bench_levels import BASELINES, FEW_PROMPTS, dying_rates, sigma_rates, welch_rates
from tests.bench.bench_verdict import LAWS, STAGES, WIDE, check, rates, stopped, unpaired_rates
from tests.verdict.recorded import experiment_of, runs_of

EXPERIMENTS = 2000
STEPS = np.arange(1, 31)
WINDOW = slice(24, 30)  # the last 20 %
PERSISTENCE = 0.9  # of the noise, from a step to the next


def curves(
    rng: np.random.Generator, num_pairs: int, rho: float, shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Reward curves [P, S] of both arms: the noise of a seed is a stationary AR(1) in both, shared by rho."""
    innovations = rng.normal(size=(3, num_pairs, len(STEPS))) * np.sqrt(1 - PERSISTENCE**2)
    innovations[:, :, 0] = rng.normal(size=(3, num_pairs))
    noise = np.empty_like(innovations)
    noise[:, :, 0] = innovations[:, :, 0]
    for step in range(1, len(STEPS)):
        noise[:, :, step] = PERSISTENCE * noise[:, :, step - 1] + innovations[:, :, step]
    noise /= window_sd()
    arms = np.sqrt(rho) * noise[:1] + np.sqrt(1 - rho) * noise[1:]
    arms += 5 * (1 - np.exp(-STEPS / 8))
    arms[1] += shift
    arms[:, :, 0] = noise[0, :, 0]  # step one is shared: nothing treated has had an effect
    return arms[0], arms[1]


@functools.cache
def window_sd() -> float:
    """Sd of the mean of a window of the stationary noise."""
    size = WINDOW.stop - WINDOW.start
    lags = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return float(np.sqrt((PERSISTENCE**lags).mean()))


def verdicts(
    num_pairs: int, rho: float, shift: float, margin: float | str, *, num: int = EXPERIMENTS, **compare
) -> dict[str, float]:
    """The share of each verdict over simulated experiments."""
    rng = np.random.default_rng([num_pairs, round(10 * rho), round(10 * shift)])
    claim = Claim(metric="train/reward", margin=margin, climbs=False)
    counts: dict[str, int] = dict.fromkeys(("MATCH", "MISMATCH", "INCONCLUSIVE", "INVALID"), 0)
    for _ in range(num):
        baseline, treatment = curves(rng, num_pairs, rho, shift)
        experiment = experiment_of(
            runs_of("baseline", {"train/reward": baseline}),
            runs_of("treatment", {"train/reward": treatment}),
            claims=[claim],
            **compare,
        )
        counts[judge(experiment, experiment.compare.claims)[0].verdict] += 1
    return {verdict: count / num for verdict, count in counts.items()}


def at_most(rate: float, num: int = EXPERIMENTS) -> float:
    """A share that an event of this rate exceeds once in a thousand repetitions of the test."""
    return float(binom.ppf(0.999, num, rate)) / num


def near(rate: float, num: int = EXPERIMENTS) -> object:
    return pytest.approx(rate, abs=4 * np.sqrt(max(rate * (1 - rate), 1e-3) / num))


# The design's table: margin in sigmas, rho, and the power at 3, 5 and 10 pairs.
TABLE = [
    (1.0, 0.0, (0.05, 0.09, 0.35)),
    (1.0, 0.8, (0.37, 0.79, 1.0)),
    (1.5, 0.0, (0.15, 0.35, 0.85)),
    (1.5, 0.8, (0.71, 0.99, 1.0)),
    (2.0, 0.8, (0.91, 1.0, 1.0)),
]
CELLS = [
    pytest.param(pairs, margin, rho, cell, marks=pytest.mark.slow)
    for margin, rho, cells in TABLE
    for pairs, cell in zip((3, 5, 10), cells, strict=True)
]


@pytest.mark.parametrize(("num_pairs", "margin", "rho", "cell"), CELLS)
def test_equal_arms_match_as_often_as_the_table_says_and_are_no_mismatch(num_pairs, margin, rho, cell):
    rates = verdicts(num_pairs, rho, 0.0, margin)
    assert rates["MATCH"] == near(power_at(margin, sd_of_difference(1.0, rho), num_pairs))
    assert rates["MATCH"] == pytest.approx(cell, abs=0.05)
    assert rates["MISMATCH"] <= at_most(0.05)
    assert rates["INVALID"] == 0


SHIFTED = [
    pytest.param(pairs, rho, EXPERIMENTS, marks=pytest.mark.slow)
    for pairs, rho in itertools.product((3, 5, 10), (0.0, 0.8))
]


@pytest.mark.parametrize(("num_pairs", "rho", "num"), [(5, 0.0, 500), *SHIFTED])
def test_a_shift_of_the_margin_is_called_a_match_at_most_one_time_in_twenty(num_pairs, rho, num):
    assert verdicts(num_pairs, rho, 1.0, 1.0, num=num)["MATCH"] <= at_most(0.05, num)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_a_shift_of_twice_the_margin_is_no_match(num_pairs):
    rates = verdicts(num_pairs, 0.8, 3.0, 1.5)
    assert rates["MATCH"] <= at_most(0.002)
    if num_pairs == 10:
        assert rates["MISMATCH"] > 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_pairs", "rho"), list(itertools.product((3, 5, 10), (0.0, 0.8))))
def test_a_margin_in_sigmas_of_the_baseline_keeps_its_level(num_pairs, rho):
    shifted = verdicts(num_pairs, rho, 1.0, "1 sigma")
    assert shifted["MATCH"] <= at_most(0.05)
    equal = verdicts(num_pairs, rho, 0.0, "1 sigma")
    assert equal["MATCH"] == near(sigma_power(1.0, num_pairs, VarianceModel(correlation=rho)))
    assert equal["MISMATCH"] <= at_most(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_looks_together_err_no_more_often_than_one(rho):
    assert verdicts(10, rho, 1.0, 1.0, interim=[4, 7, 10])["MATCH"] <= at_most(0.05)
    assert verdicts(10, rho, 0.0, 1.0, interim=[4, 7, 10])["MISMATCH"] <= at_most(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("looks", STAGES)
@pytest.mark.parametrize(
    "name", ["normal, correlation .8", "heavy-tailed (t, 3)", "seeds of different speed"]
)
def test_a_launch_that_stops_at_the_first_deciding_look_keeps_its_level(name, looks):
    match, mismatch, in_sigmas, took = stopped(LAWS[name], looks)
    assert max(match, in_sigmas) <= at_most(0.05, 20_000) and mismatch <= at_most(0.04, 20_000)
    assert looks[0] < took < looks[-1]


@pytest.mark.slow
def test_looking_again_without_saying_so_would_err_more_often():
    """Why looks are declared: the same looks at full level."""
    called = 0
    for seed in range(EXPERIMENTS):
        arms = curves(np.random.default_rng(seed), 10, 0.0, 1.0)
        left, right = (arm[:, WINDOW].mean(axis=1) for arm in arms)
        called += any(equivalence_test(left[:n], right[:n], 1.0).equivalent for n in (3, 5, 7, 8, 9, 10))
    assert called / EXPERIMENTS > at_most(0.05)


# --- every kind of claim, on curves of every kind: the table of error-rates.md ---

HOLDING = [name for name in LAWS if name not in ("skewed (exponential)", "one seed in ten fails")]


@pytest.mark.parametrize("law", ["normal, treatment's sd 3 x", "heavy-tailed (t, 3)"])
def test_every_kind_of_claim_keeps_its_level(law):
    for kind, row in rates(LAWS[law], 4000).items():
        assert max(row) <= at_most(0.05, 4000), kind


def test_unpaired_claims_keep_their_level():
    for kind, row in unpaired_rates(WIDE["treatment's sd 3 x, margin 12 sd"], 4000).items():
        assert max(row) <= at_most(0.055, 4000), kind


@pytest.mark.slow
@pytest.mark.parametrize("law", [*HOLDING, *WIDE])
def test_unpaired_claims_err_no_more_often_than_the_page_says(law):
    for kind, row in unpaired_rates((LAWS | WIDE)[law]).items():
        assert max(row) <= 0.11, kind


@pytest.mark.slow
@pytest.mark.parametrize("law", HOLDING)
def test_bounded_and_uneven_curves_err_no_more_often_than_the_page_says(law):
    for kind, row in rates(LAWS[law]).items():
        allowed = 0.1 if kind == "limit called broken" else 0.08
        assert max(row) <= allowed, kind


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("law", ["normal, treatment's sd 3 x", "heavy-tailed (t, 3)"])
def test_one_sided_claims_keep_their_level(law, sign):
    for kind, row in bench_one_sided.rates(LAWS[law], 4000, sign).items():
        assert max(row) <= at_most(0.055, 4000), kind


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("law", HOLDING)
def test_one_sided_claims_err_no_more_often_than_the_page_says(law, sign):
    for kind, row in bench_one_sided.rates(LAWS[law], sign=sign).items():
        assert max(row) <= 0.08, kind


@pytest.mark.parametrize("kind", ["not_worse", "better"])
def test_a_treatment_that_fails_in_one_seed_of_ten_passes_as_often_as_the_page_says(kind):
    law = LAWS["one seed in ten fails"]
    fails, excels = (bench_one_sided.rates(law, 4000, sign)[f"{kind} passes"] for sign in (1, -1))
    assert fails == pytest.approx([0.561, 0.623, 0.580, 0.426, 0.347], abs=0.025)
    assert max(excels) <= at_most(0.007, 4000)


def test_a_shock_that_all_pairs_share_errs_more_often_with_more_pairs():
    for row in bench_one_sided.shared_shock_rates(4000).values():
        assert row[0] > 0.05 and row == sorted(row) and row[-1] == pytest.approx(0.17, abs=0.03)


@pytest.mark.slow
def test_what_is_vectorised_is_what_the_verdict_computes():
    check()


def test_vectorised_one_sided_claims_are_what_the_verdict_computes():
    bench_one_sided.check()


# --- edges of what the tests assume, before and after each rule: the second table of error-rates.md ---


@pytest.mark.parametrize(
    "name",
    ["8 prompts, 2 digits", "12 prompts, 3 digits", "8 prompts, 10 validations, the same answers"],
)
def test_few_prompts_are_no_false_match_however_they_are_logged(name):
    ((before, after),) = FEW_PROMPTS[name].rates(400, [3])["false match"]
    assert before > 0.05 and after <= at_most(0.002, 400)


def test_answers_of_their_own_keep_the_power_of_their_validations():
    ((before, after),) = FEW_PROMPTS["8 prompts, 10 validations, answers independent"].rates(200, [5])[
        "match of equal arms"
    ]
    assert after > before - 0.03 and after > 0.9


@pytest.mark.parametrize("sizes", [(2, 5), (2, 10), (2, 20), (3, 10)])
def test_two_runs_of_an_arm_show_no_mismatch_and_err_no_more_often_than_the_page_says(sizes):
    found = welch_rates(sizes, 1.0, 20_000)
    ((before, match),), ((_, mismatch),) = found["false match"], found["false mismatch"]
    assert before > 0.052 and match <= at_most(0.053, 20_000) and mismatch <= at_most(0.036, 20_000)


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_equal_arms_whose_runs_fail_at_random_are_rarely_a_mismatch(probability):
    for _, after in dying_rates(probability, 20_000)["false mismatch"]:
        assert after <= at_most(0.04, 20_000)


def test_a_margin_in_sigmas_of_a_skewed_baseline_is_warned_of():
    """The differences alone warned of 1 in 20 of these false matches."""
    found = sigma_rates(BASELINES["skewed (exponential)"], 2000, [8])
    ((before, after),) = found["warned matches"]
    assert before < 0.15 and after > 0.5
    ((_, normal),) = sigma_rates(BASELINES["normal"], 2000, [8])["warned matches"]
    assert normal < 0.25


@pytest.mark.parametrize("num_differing", [0, 3])
def test_metrics_that_a_description_says_to_differ_keep_their_false_discovery_rate(num_differing):
    for size, correlation, rates_of in ((3, 0.5, rates_over_pairs), (60, 0.5, rates_over_steps)):
        rate, power = rates_of(size, correlation, num_differing, 300)
        assert rate <= at_most(0.1, 300) and power > 0.95 * bool(num_differing) - 0.01
