"""Two-way tables of differences: known numbers, and how often their intervals hold."""

import numpy as np
import pytest

from abrun.stats.variance_components import crossed
from tests.bench.bench_validation import (
    EXPERIMENTS,
    NUM_PROMPTS,
    TABLES,
    binary_table,
    by_covariate,
    by_unit,
    coverage,
    normal_table,
)

ERROR = 4 * np.sqrt(0.05 * 0.95 / EXPERIMENTS)


def test_a_table_worked_by_hand():
    """Means 2 and 4 of the seeds; 1.5, 3 and 4.5 of the prompts; residuals of 0.5 or none."""
    found = crossed([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert found and (found.num_pairs, found.num_prompts, found.mean) == (2, 3, 3.0)
    assert found.sd_pairs == pytest.approx(np.sqrt(2))
    assert found.rest_variance == pytest.approx(0.5)  # 4 residuals of 0.5 squared, over 2 degrees of freedom
    assert found.seed_variance == pytest.approx((6 - 0.5) / 3)
    assert found.prompt_variance == pytest.approx((4.5 - 0.5) / 2)
    assert found.noise_share == pytest.approx(0.5 / 6)
    assert found.sd_with(1) == pytest.approx(found.sd_pairs)
    assert found.sd_with(1e12) == pytest.approx(np.sqrt(found.seed_variance))


@pytest.mark.parametrize(
    "table", [[[1.0, 2.0]], [[1.0], [2.0]], [[1.0, 2.0], [2.0, 1.0]], [[np.nan, 1], [1, 2]]]
)
def test_what_has_no_parts(table):
    assert crossed(table) is None


def test_the_parts_are_unbiased():
    tables = normal_table(0.5, 0.7, 1.0, 4, 2000)
    found = [crossed(table) for table in tables]
    means = np.mean(
        [(one.seed_variance, one.prompt_variance, one.rest_variance) for one in found if one], axis=0
    )
    assert means == pytest.approx([0.25, 0.49, 1.0], rel=0.06)


def test_twice_the_prompts_narrow_as_predicted():
    spread = 0.125  # as much as 64 prompts make
    few, many = (
        np.random.default_rng(m).standard_normal((4000, 6, m)) for m in (NUM_PROMPTS, 2 * NUM_PROMPTS)
    )
    seeds = spread * np.random.default_rng(3).standard_normal((4000, 6, 1))
    predicted = [found.sd_with(2) ** 2 for table in few[:500] + seeds[:500] if (found := crossed(table))]
    assert np.mean(predicted) == pytest.approx(np.mean((many + seeds).mean(2).var(1, ddof=1)), rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "prompts"), [(0.0, 0.5), (0.125, 0.0), (0.125, 0.5), (0.25, 0.5)])
@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_the_intervals_hold_in_nine_of_ten(seeds, prompts, num_pairs):
    of_share, of_both, of_seeds = coverage(seeds, prompts, num_pairs)
    assert of_share > 0.87 and of_both > 0.865
    if prompts and num_pairs == 10:
        assert of_seeds < 0.85  # an interval over seeds speaks of these prompts, not of any


def test_seeds_are_the_unit_and_prompts_are_not():
    """Why no prompt enters a verdict: at the margin a test over seeds errs in 5 %, the others do not."""
    rates = by_unit(binary_table(5, 0.5)[:EXPERIMENTS])
    assert rates["seeds"] == pytest.approx(0.05, abs=ERROR)
    assert min(rates["prompts"], rates["answers"]) > 0.15 and rates["pooled if F > .05"] > 0.07


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("num_pairs", [3, 4, 5, 8, 10])
def test_a_test_over_seeds_keeps_its_level_whatever_the_prompts_add(name, num_pairs):
    assert by_unit(TABLES[name](num_pairs))["seeds"] <= 0.05 + ERROR


@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_a_covariate_costs_a_degree_of_freedom_or_the_level(num_pairs):
    cuped, least_squares, without, with_it = by_covariate(num_pairs, 0.0)
    assert cuped > 0.06 and least_squares == pytest.approx(0.05, abs=ERROR) and with_it < without
