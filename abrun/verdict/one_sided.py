"""Statistics of one-sided claims: the treatment is not worse than the baseline, or better, by a margin."""

import math
from dataclasses import replace

from abrun.messages.codes import Code
from abrun.stats.equivalence import MIN_FOR_MISMATCH, mean_and_sd
from abrun.stats.one_sided import improvement_test, one_sided_pairs_needed, one_sided_power, planned_excess
from abrun.stats.power import sd_interval, welch_dof_per_run
from abrun.stats.series import Array
from abrun.stats.sigma_margin import sigma_improvement_test
from abrun.verdict.results import ClaimResult, ClaimTerms, Power


def add_one_sided_statistics(
    result: ClaimResult,
    baseline: Array,  # [M] one summary per run
    treatment: Array,  # [N]
    margin: float,  # in units of the metric
    yardstick: Array | None,  # [M] the number of which a relative margin is a share
    resolution: float,
) -> ClaimResult:
    """Add test, bound and power to a result that has its estimate. Two pairs cannot show superiority.

    Like a mismatch, superiority is a difference that is shown; if half of all runs fail, two pairs of equal
    arms show one in one experiment of eight.
    """
    terms, estimate = result.claim, result.estimate
    sign = -1 if terms.better == "lower" else 1
    threshold = terms.margin_number * (-1 if terms.kind == "not_worse" else 1)
    arms, paired = (baseline, treatment), terms.paired
    if terms.margin_unit == "sigma":
        test = sigma_improvement_test(*arms, threshold, terms.alpha, resolution, sign=sign, paired=paired)
        unit = mean_and_sd(baseline)[1]
    else:
        test = improvement_test(
            *arms, threshold, terms.alpha, yardstick, resolution, sign=sign, paired=paired
        )
        unit = 1.0 if yardstick is None else float(yardstick.mean())
    certified = -test.bound if terms.kind == "not_worse" else test.bound
    too_few = min(len(baseline), len(treatment)) < MIN_FOR_MISMATCH and terms.kind == "better"
    holds = test.p_above < terms.alpha
    warnings = result.warnings
    if holds and too_few:
        warnings += (Code.TOO_FEW_FOR_BETTER(paired=paired, needed=MIN_FOR_MISMATCH),)
    return replace(
        result,
        claim=replace(terms, margin=margin),
        estimate=replace(
            estimate,
            certified_bound=certified * unit,
            certified_number=certified,
            p_equivalence=test.p_above,
            p_beyond=test.p_below,
        ),
        power=_estimate_power(terms, margin, baseline, treatment, estimate.standard_error or 0.0, sign),
        warnings=warnings,
        result="holds" if holds and not too_few else "undecided",
    )


def assumed_improvement(terms: ClaimTerms, margin: float, observed: float) -> float:
    """Return the true improvement for the power of superiority: declared, twice the margin, or observed."""
    return terms.improvement or 2 * margin or max(observed, 0.0)


def _estimate_power(
    terms: ClaimTerms, margin: float, baseline: Array, treatment: Array, standard_error: float, sign: int
) -> Power:
    """Return power and sample size with the observed spread; a margin in sigmas counts as a number."""
    num_runs = min(len(baseline), len(treatment))
    dof_per_pair, dof = 1.0, len(baseline) - 1.0
    if not terms.paired:
        dof_per_pair = welch_dof_per_run([mean_and_sd(summaries)[1] for summaries in (baseline, treatment)])
        dof = dof_per_pair * (num_runs - 1)
    sd = standard_error * math.sqrt(num_runs)
    improvement = sign * (mean_and_sd(treatment)[0] - mean_and_sd(baseline)[0])
    excess = planned_excess(terms.kind, margin, assumed_improvement(terms, margin, improvement))
    threshold = -margin if terms.kind == "not_worse" else margin
    min_runs = MIN_FOR_MISMATCH if terms.kind == "better" else 2

    def needed(excess: float, sd: float) -> int | None:
        count = one_sided_pairs_needed(excess, sd, alpha=terms.alpha, dof_per_pair=dof_per_pair)
        return None if count is None else max(count, min_runs)

    low, high = sd_interval(sd, dof + 1) if sd else (0.0, 0.0)
    return Power(
        power_now=one_sided_power(excess, standard_error, dof, terms.alpha) if num_runs >= min_runs else 0.0,
        pairs_needed=needed(excess, sd),
        pairs_needed_range=(needed(excess, low), needed(excess, high)),
        pairs_needed_observed=needed(improvement - threshold, sd),
    )
