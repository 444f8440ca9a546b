"""Claims on the rate of divergence: the share of an arm's runs that failed or ended with NaN."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from abrun.logs.recorded.experiment import RecordedRun, Sides
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, Guards
from abrun.runs.metric_names import DIVERGENCE_RATE
from abrun.stats.rates import Outcomes, fisher_p, rate_interval, rate_p, runs_to_show_rate
from abrun.verdict.results import ClaimEstimate, ClaimResult, Power

WATCHED = Guards().finite


def counts_failures(claims: Sequence[Claim]) -> bool:
    """Return whether a claim counts failed runs, so that one alone is neither invalid nor a mismatch."""
    return any(claim.metric == DIVERGENCE_RATE for claim in claims)


def has_diverged(run: RecordedRun) -> bool:
    """Return whether a run failed, or loss, gradient norm or reward is not finite at its last two steps."""
    ends = [run.series(metric).values[-2:] for metric in WATCHED]
    return run.status == "failed" or any(len(end) and not np.isfinite(end).any() for end in ends)


def judge_divergence_rate(result: ClaimResult, sides: Sides, claim: Claim) -> ClaimResult:
    """Add the exact test of a rate below a limit, or of its difference from the baseline's.

    One arm: the binomial test. Two arms: the unconditional test of `abrun.stats.rates`, paired by seed unless
    the arms are independent; of equal rates of independent arms Fisher's. Every run must have ended.
    """
    num_ended = sum(run.finished or run.status == "failed" for run in sides.runs)
    if not sides.treatments:
        return replace(result, problem=Code.NONE_FINISHED(paired=sides.paired))
    if num_ended < len(sides.runs):
        planned = {"usable": num_ended, "planned": len(sides.runs), "paired": False}
        return replace(result, problem=Code.PAIRS_LACKING(**planned, equivalence=False))
    if claim.limit is None and not sides.baselines:
        return replace(result, problem=Code.SECOND_ARM_NEEDED())
    baseline, treatment = (np.array([has_diverged(run) for run in runs], float) for runs in sides.arms)
    counts = (int(baseline.sum()), len(baseline)), (int(treatment.sum()), len(treatment))
    estimate, power, alpha = ClaimEstimate(diverged=counts), Power(), result.claim.alpha
    if claim.limit:
        limit, (num_diverged, num_runs) = claim.limit[0], counts[1]
        p_holds, p_broken = rate_p(num_diverged, num_runs, limit)
        interval = rate_interval(num_diverged, num_runs, alpha)
        estimate = replace(estimate, limited=num_diverged / num_runs, limited_interval=interval)
        power = Power(pairs_needed=runs_to_show_rate(num_diverged, limit, alpha))
    else:
        threshold = claim.declared_margin_in[0] * (1 if claim.kind == "not_worse" else -1)
        outcomes = Outcomes.count(baseline, treatment, paired=sides.paired)
        p_holds, p_broken = outcomes.p_below(threshold), outcomes.reversed.p_below(-threshold)
        if threshold == 0 and not sides.paired:
            p_holds, p_broken = fisher_p(*counts), fisher_p(*counts[::-1])
        interval = outcomes.interval(alpha)
        estimate = replace(estimate, mean_difference=outcomes.difference, interval=interval)
    estimate = replace(estimate, p_equivalence=p_holds, p_beyond=p_broken)
    return replace(result, estimate=estimate, power=power, result="holds" if p_holds < alpha else "undecided")
