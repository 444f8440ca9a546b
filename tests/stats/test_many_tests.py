"""Many tests at once: the false discovery rate, and variances that small samples share."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special, stats
from statsmodels.stats.multitest import multipletests

from abrun.stats.equivalence import equivalence_test
from abrun.stats.many_tests import (
    VariancePrior,
    benjamini_hochberg,
    fit_prior,
    p_of_failures,
    predict_variance,
)
from abrun.stats.one_sided import improvement_test

MARGIN = 3.0  # of the usual sd of a pair


@pytest.mark.parametrize("size", [1, 2, 7, 150])
def test_adjusted_p_values_are_those_of_statsmodels(size: int) -> None:
    rng = np.random.default_rng(size)
    p_values = np.concatenate([rng.random(size) ** 4, [0.0, 1.0, 0.01, 0.01]])
    assert benjamini_hochberg(p_values) == pytest.approx(multipletests(p_values, method="fdr_bh")[1])
    assert benjamini_hochberg([]) == []


def test_failures_are_binomial() -> None:
    for num_failed in range(6):
        expected = stats.binom.sf(num_failed - 1, 5, 0.03)
        assert p_of_failures(num_failed, 5, 0.03) == pytest.approx(expected)


def test_the_prior_of_the_variances_is_recovered() -> None:
    rng = np.random.default_rng(0)
    variances = 2.0 * 3.0 / rng.chisquare(3, 4000) * rng.chisquare(2, 4000) / 2
    prior = fit_prior(variances.tolist(), [2.0] * 4000)
    assert prior is not None
    assert (prior.variance, prior.dof) == pytest.approx((2.0, 3.0), rel=0.1)
    assert prior.moderate(8.0, 2.0) == (pytest.approx((3 * 2 + 2 * 8) / 5, rel=0.1), prior.dof + 2)
    assert fit_prior([1.0] * 9 + [0.0, np.inf], [2.0] * 11) is None


def test_few_samples_predict_the_next_variance_with_their_own_error() -> None:
    alone = predict_variance([3.0], [2.0])
    assert alone is not None and 1 < alone.dof < 2  # one sample of two degrees of freedom counts as less
    many = predict_variance([3.0] * 1000, [2.0] * 1000)
    assert many is not None and many.dof == 4.0
    assert predict_variance([], []) is predict_variance([0.0, np.nan, np.inf], [2.0] * 3) is None


def test_a_prior_moderates_alike_samples_only() -> None:
    prior = VariancePrior(1.0, 4.0)
    noisier = stats.f.ppf(0.95, 2, 4)
    samples = np.array([1.0, noisier * 0.99, noisier * 1.01, 1e-6, 0.0])
    variances, dofs = prior.moderate_alike(samples, 2.0)
    assert dofs.tolist() == [6, 6, 2, 2, 2]
    assert variances.tolist() == pytest.approx([1.0, (4 + 2 * noisier * 0.99) / 6, noisier * 1.01, 1e-6, 0.0])

    # The tests of a claim: Smyth's moderated t, by hand
    differences, prior = np.array([0.1, 0.3, 0.8]), VariancePrior(0.04, 3.0)
    error = np.sqrt((3 * 0.04 + 2 * differences.var(ddof=1)) / 5 / 3)
    test = equivalence_test(np.zeros(3), differences, 1.0, prior=prior)
    assert (test.standard_error, test.dof) == pytest.approx((error, 5.0))
    assert test.interval == pytest.approx(stats.t.interval(0.9, 5, differences.mean(), error))
    assert test.p_tost == pytest.approx(stats.t.sf((1.0 - differences.mean()) / error, 5))
    better = improvement_test(np.zeros(3), differences, 0.0, sign=1, prior=prior)
    assert better.p_above == pytest.approx(stats.t.sf(differences.mean() / error, 5))
    relative = equivalence_test(np.full(3, 9.0), 9 + differences, 0.1, yardstick=np.full(3, 9.0), prior=prior)
    assert relative.dof == 2  # a margin that is estimated has another variance


def p_beyond(means: NDArray, errors: NDArray, dof: NDArray | float) -> NDArray:
    """The level at which each recipe alone would be a mismatch by its claims."""
    tails = [special.stdtr(dof, (end - np.abs(means)) / errors) for end in (MARGIN, -MARGIN)]
    return np.minimum(1.0, (tails[0] + tails[1]) / 0.64)


def simulate(num_fleets: int, num_recipes: int, num_pairs: int, spread: float, *, has_noisy: bool):
    """Return false discovery rate and power of tests alone, and of tests with the shared variance.

    An eighth of the recipes moved by twice the margin more, another eighth is just at its margin.
    """
    rng = np.random.default_rng([num_recipes, num_pairs])
    results: list[list[tuple[float, float]]] = [[], []]
    num_moved = num_recipes // 8
    for _ in range(num_fleets):
        sds = np.exp(spread * rng.standard_normal(num_recipes))
        sds[rng.random(num_recipes) < 0.1 * has_noisy] *= 5
        shifts = np.zeros(num_recipes)
        shifts[:num_moved], shifts[num_moved : 2 * num_moved] = 3 * MARGIN, MARGIN
        pairs = shifts[:, None] + sds[:, None] * rng.standard_normal((num_recipes, num_pairs))
        variances, dof = pairs.var(axis=1, ddof=1), num_pairs - 1.0
        prior = fit_prior(variances.tolist(), [dof] * num_recipes)
        assert prior is not None
        shared = (prior.dof * prior.variance + dof * variances) / (prior.dof + dof)
        for result, variance, total in zip(results, (variances, shared), (dof, dof + prior.dof), strict=True):
            p_values = p_beyond(pairs.mean(axis=1), np.sqrt(variance / num_pairs), total)
            is_red = np.array(benjamini_hochberg(p_values)) <= 0.05
            result.append((is_red[num_moved:].sum() / max(1, is_red.sum()), is_red[:num_moved].mean()))
    return np.mean(results, axis=1)


def test_three_pairs_are_enough_if_recipes_share_their_noise() -> None:
    alone, shared = simulate(20, 150, 3, 0.3, has_noisy=False)
    assert shared[1] > 0.9 > 0.3 > alone[1] and shared[0] < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("num_recipes", [16, 150])
@pytest.mark.parametrize(
    ("num_pairs", "spread", "has_noisy"), [(3, 0.0, False), (3, 0.5, False), (3, 0.3, True), (5, 0.3, True)]
)
def test_the_shared_variance_keeps_the_false_discovery_rate(
    num_recipes, num_pairs, spread, has_noisy
) -> None:
    alone, shared = simulate(1000, num_recipes, num_pairs, spread, has_noisy=has_noisy)
    assert shared[0] <= 0.05 and shared[1] >= max(0.85, alone[1] - 0.01)
