"""One-sided tests of the treatment's improvement over the baseline: non-inferiority and superiority.

Non-inferiority is shown if the lower 1 - alpha bound of the improvement is above minus the margin,
superiority by at least the margin if it is above the margin (CONSORT extension for non-inferiority: Piaggio
et al. 2012, doi:10.1001/jama.2012.87802; Wellek, Testing Statistical Hypotheses of Equivalence and
Noninferiority, 2010). The bound is Student's t of the paired differences, or Welch's: one half of the
interval of the two one-sided tests (Schuirmann 1987). Margins in sigmas are in `abrun.stats.sigma_margin`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from abrun.stats.equivalence import (
    ALPHA,
    check_samples,
    estimate_difference,
    find_largest_share,
    find_outcomes,
    p_above,
)
from abrun.stats.many_tests import VariancePrior
from abrun.stats.power import NUM_EXPERIMENTS, Array, Decisions, decide_at, find_min_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class OneSidedResult:
    """Result of testing whether the mean improvement is above a threshold, a number or a share of one."""

    p_above: float  # small if the improvement is above the threshold
    p_below: float  # small if it is below
    bound: float  # largest threshold that would have passed, in the threshold's unit; -inf if none would


def improvement_test(
    baseline: ArrayLike,  # [M] one summary per run
    treatment: ArrayLike,  # [N] if paired, the same seeds in the same order
    threshold: float,
    alpha: float = ALPHA,
    yardstick: ArrayLike | None = None,  # [M] for the baseline's runs
    resolution: float = 0.0,
    *,
    sign: int,
    paired: bool = True,
    prior: VariancePrior | None = None,
    further: ArrayLike | None = None,  # [U] baselines without a partner
) -> OneSidedResult:
    """Test whether mean(sign * (treatment - baseline)) is above threshold, or threshold * mean(yardstick).

    `sign` is 1 if higher is better, else -1. A negative threshold is the margin of a non-inferiority. With a
    yardstick, improvement minus threshold is tested run by run, so that the estimated margin is accounted
    for (Sasabuchi 1988). `resolution`, `prior` and `further` are those of `equivalence_test`. Raises
    ValueError for fewer than two pairs or runs, and for non-finite values.
    """
    baseline_values, treatment_values = check_samples(baseline, treatment, 1.0, paired=paired)
    if outcomes := find_outcomes(baseline_values, treatment_values, yardstick, paired=paired):
        gain = outcomes if sign > 0 else outcomes.reversed
        return OneSidedResult(
            p_above=gain.reversed.p_below(-threshold),
            p_below=gain.p_below(threshold),
            bound=-gain.reversed.upper_bound(alpha),
        )
    if yardstick is None:
        mean, error, dof = estimate_difference(
            sign * baseline_values,
            sign * treatment_values,
            resolution,
            paired=paired,
            prior=prior,
            further=None if further is None else sign * np.asarray(further, float),
        )
        return OneSidedResult(
            p_above=p_above(mean, error, dof, threshold),
            p_below=p_above(-mean, error, dof, -threshold),
            bound=mean - float(special.stdtrit(dof, 1 - alpha)) * error,
        )
    unit = np.asarray(yardstick, float)

    def excess(share: float) -> tuple[float, float, float]:
        """Return the mean improvement minus `share` yardsticks, its standard error and degrees of freedom."""
        samples = sign * baseline_values + share * unit, sign * treatment_values
        return estimate_difference(*samples, resolution, paired=paired)

    mean, error, dof = excess(threshold)
    bound = find_largest_share(lambda share: p_above(*excess(share)) < alpha)
    return OneSidedResult(p_above=p_above(mean, error, dof), p_below=p_above(-mean, error, dof), bound=bound)


def planned_excess(kind: str, margin: float, improvement: float | None) -> float:
    """Return by how much the improvement that is planned for exceeds the threshold of a one-sided claim.

    Non-inferiority (`not_worse`) is planned for equal arms, superiority (`better`) for the declared
    improvement, or twice its margin.
    """
    if kind == "not_worse":
        return margin
    return (2 * margin if improvement is None else improvement) - margin


def one_sided_power(excess: float, standard_error: float, dof: float, alpha: float = ALPHA) -> float:
    """Return P(the test passes) if the true improvement exceeds the threshold by `excess`.

    Exact for normal differences: the t statistic is noncentral (Owen 1965); approximate for Welch.
    """
    if standard_error == 0:
        return float(excess > 0)
    critical = float(special.stdtrit(dof, 1 - alpha))
    noncentrality = min(excess / standard_error, 1e3)  # scipy loses digits beyond; the power is 1 long before
    power = 1 - float(special.nctdtr(dof, noncentrality, critical))
    return float(np.clip(power if math.isfinite(power) else noncentrality > critical, 0.0, 1.0))


def one_sided_pairs_needed(
    excess: float,
    sd_difference: float,
    alpha: float = ALPHA,
    dof_per_pair: float = 1.0,
    prior_dof: float = 0.0,
) -> int | None:
    """Return the smallest number of pairs, or of runs of each arm, with 80 % power; see `find_min_pairs`.

    Returns None if the true improvement does not exceed the threshold.
    """
    if excess <= 0:
        return None
    return find_min_pairs(
        lambda pairs: one_sided_power(
            excess, sd_difference / math.sqrt(pairs), prior_dof + dof_per_pair * (pairs - 1), alpha
        )
    )


def simulate_one_sided_decisions(
    excess: float,
    sd_difference: float,
    counts: Sequence[int],
    levels: Sequence[float],
    broken_levels: Sequence[float],
    *,
    stream: int = 0,
) -> Decisions:
    """Return what the paired test decides if the improvement is `excess` above the threshold.

    See `abrun.stats.power.simulate_tost_decisions`.
    """
    rng = np.random.default_rng([0, stream])
    draws = excess + sd_difference * rng.standard_normal((NUM_EXPERIMENTS, counts[-1]))

    def is_above(mean: Array, error: Array, count: int, alpha: float) -> Array:
        return mean > float(special.stdtrit(count - 1, 1 - alpha)) * error

    return decide_at(
        draws, counts, levels, broken_levels, is_above, lambda mean, *test: is_above(-mean, *test)
    )
