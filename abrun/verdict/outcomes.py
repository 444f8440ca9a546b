"""The outcome of a claim as a reason that promises no more than was tested."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from abrun.messages.codes import Code, Reason
from abrun.runs.metric_names import FINAL_WEIGHTS
from abrun.stats.anytime import MIN_PAIRS
from abrun.stats.equivalence import ASSUMED_PAIR_CORRELATION
from abrun.stats.rates import fisher_p
from abrun.verdict.claims import assumed_improvement
from abrun.verdict.results import ClaimResult, ClaimTerms


def outcome_reason(result: ClaimResult, *, has_recipe: bool = True, baseline_arm: str = "baseline") -> Reason:
    """Return the outcome of one claim; `has_recipe` says that one recipe trained the arms."""
    arms = {"arm": result.arm, "baseline_arm": baseline_arm}
    terms, estimate = result.claim, result.estimate
    detected = asdict(estimate.detected) if estimate.detected else None
    if result.problem and result.result != "different":
        return Code.CLAIM_NOT_TESTED(
            metric=terms.metric, window=terms.window, problem=result.problem, detected=detected, **arms
        )
    sample = _describe_sample(terms, has_recipe=has_recipe)
    if terms.test == "exact" and result.result == "holds":
        return Code.EXACT_HOLDS(metric=terms.metric, over=sample)
    if terms.test == "exact":
        return Code.EXACT_BROKEN(metric=terms.metric, over=sample, where=estimate.detail)
    if estimate.diverged:
        return _rate_reason(result, arms)
    if terms.test in ("limit", "ratio limit", "spread"):
        return _limit_reason(result, sample, detected, arms)
    if estimate.mean_difference is None or estimate.interval is None:
        if not terms.paired:
            return Code.CLAIM_TOO_FEW_RUNS(metric=terms.metric)
        return Code.CLAIM_TOO_FEW_PAIRS(metric=terms.metric, pairs=terms.num_pairs)
    if terms.kind != "within":
        return _one_sided_reason(result, sample, detected, arms)
    return _equivalence_reason(result, sample, detected, arms)


def _rate_reason(result: ClaimResult, arms: dict[str, str]) -> Reason:
    terms, estimate, counts = result.claim, result.estimate, result.estimate.diverged or ()
    return Code.DIVERGENCE_RATE(
        result=result.result,
        margin=terms.margin_text,
        alpha=terms.alpha,
        diverged=counts,
        interval=estimate.limited_interval or estimate.interval,
        p_equal=min(map(fisher_p, counts, counts[::-1])) if estimate.limited is None else None,
        p_beyond=estimate.p_beyond_holm,
        needed=result.power.pairs_needed,
        **arms,
    )


def after_looking_reason(results: Sequence[ClaimResult]) -> Reason | None:
    """Return the smallest margins that may be claimed after the data were seen; None if none is known."""
    margins = []
    for result in results:
        terms, estimate = result.claim, result.estimate
        ends = estimate.ci90, estimate.anytime_interval
        if result.result == "not tested" or terms.kind not in ("within", "not_worse") or None in ends:
            continue
        signs = (-1, 1) if terms.kind == "within" else (-1 if terms.better == "higher" else 1,)
        once, anytime = (max(0.0, *(sign * end[sign > 0] for sign in signs)) for end in ends if end)
        values = {name: getattr(terms, name) for name in ("metric", "kind", "transform")}
        margins.append({**values, "arm": result.arm, "once": once, "anytime": anytime})
    return Code.MARGINS_AFTER_LOOKING(margins=margins, min_pairs=MIN_PAIRS) if margins else None


def _one_sided_reason(
    result: ClaimResult, sample: dict[str, Any], detected: dict[str, Any] | None, arms: dict[str, str]
) -> Reason:
    terms, estimate = result.claim, result.estimate
    values = {
        "metric": terms.metric,
        "kind": terms.kind,
        "margin": terms.margin_text,
        "better": terms.better,
        "transform": terms.transform,
        "over": sample,
        "alpha": terms.alpha,
        "difference": estimate.mean_difference,
        "interval": estimate.interval,
        "detected": detected,
        "warnings": result.warnings,
        **arms,
    }
    if result.result == "holds":
        return Code.CLAIM_PASSES(**values)
    if result.result == "different":
        return Code.CLAIM_FAILS(**values, p_beyond=estimate.p_beyond_holm)
    return Code.CLAIM_OPEN(**values, power=asdict(result.power), improvement=planned_improvement(result))


def planned_improvement(result: ClaimResult) -> float:
    """Return the true improvement that the power of a one-sided claim is stated for."""
    terms, observed = result.claim, result.estimate.mean_difference or 0.0
    sign = -1 if terms.better == "lower" else 1
    return assumed_improvement(terms, terms.margin or 0.0, sign * observed)


def _equivalence_reason(
    result: ClaimResult, sample: dict[str, Any], detected: dict[str, Any] | None, arms: dict[str, str]
) -> Reason:
    terms, estimate = result.claim, result.estimate
    values = {
        "metric": terms.metric,
        "margin": terms.margin_text,
        "margin_unit": terms.margin_unit,
        "transform": terms.transform,
        "over": sample,
        "alpha": terms.alpha,
        "warnings": result.warnings,
        **arms,
    }
    bounds = {"certified_bound": estimate.certified_bound, "certified_number": estimate.certified_number}
    if result.result == "equivalent":
        return Code.CLAIM_EQUIVALENT(
            **values, **bounds, certified_jointly=estimate.certified_jointly, detected=detected
        )
    values |= {"difference": estimate.mean_difference, "interval": estimate.interval}
    if result.result == "different":
        return Code.CLAIM_DIFFERS(**values, detected=detected, p_beyond=estimate.p_beyond_holm)
    values |= {
        **bounds,
        "sd_difference": estimate.sd_difference,
        "pair_correlation": estimate.pair_correlation,
        "power": {**asdict(result.power), "shared_correlation": ASSUMED_PAIR_CORRELATION},
    }
    if not detected:
        return Code.CLAIM_UNDECIDED(**values)
    p_difference = 1.0 if estimate.p_difference_holm is None else estimate.p_difference_holm
    return Code.CLAIM_DETECTED(
        **values,
        detected=detected,
        p_difference=p_difference,
        significant=p_difference < terms.alpha_difference,
        absolute_margin=terms.margin,
    )


def _describe_sample(terms: ClaimTerms, *, has_recipe: bool) -> dict[str, Any]:
    """Return the runs, steps and recipe that an outcome applies to."""
    return {
        "pairs": terms.num_pairs,
        "runs": terms.num_runs,
        "welch": not terms.paired and terms.test not in ("limit", "exact", "spread"),
        "steps": terms.steps,
        "window": terms.window,
        "axis": terms.axis,
        "unit": terms.unit,
        "recipe": has_recipe,
    }


def _limit_reason(
    result: ClaimResult, sample: dict[str, Any], detected: dict[str, Any] | None, arms: dict[str, str]
) -> Reason:
    terms, estimate = result.claim, result.estimate
    measure: str = terms.reduction
    if terms.metric == FINAL_WEIGHTS:
        measure = "distance"
    elif terms.test == "ratio limit":
        measure = "excess" if terms.transform == "log_excess" else "ratio"
    elif terms.test == "spread":
        measure = "spread"
    values = {
        "metric": terms.metric,
        "margin": terms.margin_text,
        "over": sample,
        "alpha": terms.alpha,
        "measure": measure,
        "limit": terms.margin_number,
        "limited": estimate.limited,
        "interval": estimate.limited_interval,
        "detected": detected,
        "warnings": result.warnings,
        **arms,
    }
    if estimate.limited_interval is not None and result.result == "holds":
        return Code.LIMIT_HOLDS(**values, p=estimate.p_equivalence)
    if estimate.limited_interval is not None and result.result == "different":
        return Code.LIMIT_BROKEN(**values, p_beyond=estimate.p_beyond_holm)
    return Code.LIMIT_UNDECIDED(**values, needed=result.power.pairs_needed_observed)
