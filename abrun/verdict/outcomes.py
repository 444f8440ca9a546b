"""The outcome of a claim as a reason, which promises no more than was tested."""

from dataclasses import asdict
from typing import Any

from abrun.metric_names import FINAL_WEIGHTS
from abrun.reasons import Code, Reason
from abrun.verdict.claims import SHARED
from abrun.verdict.results import ClaimResult, ClaimTerms


def outcome(result: ClaimResult, *, has_recipe: bool = True) -> Reason:
    """Return what is shown of one claim; `has_recipe`: the arms were trained by one recipe."""
    claim, estimate = result.claim, result.estimate
    detected = asdict(estimate.detected) if estimate.detected else None
    if result.problem and result.result != "different":
        return Code.CLAIM_NOT_TESTED(
            metric=claim.metric, window=claim.window, problem=result.problem, detected=detected
        )
    over = _tested_over(claim, has_recipe=has_recipe)
    if claim.test == "exact" and result.result == "holds":
        return Code.EXACT_HOLDS(metric=claim.metric, over=over)
    if claim.test == "exact":
        return Code.EXACT_BROKEN(metric=claim.metric, over=over, where=estimate.detail)
    if claim.test in ("limit", "ratio limit"):
        return _limit_outcome(result, over, detected)
    if estimate.mean_difference is None or estimate.interval is None or claim.steps is None:
        if not claim.paired:
            return Code.CLAIM_TOO_FEW_RUNS(metric=claim.metric)
        return Code.CLAIM_TOO_FEW_PAIRS(metric=claim.metric, pairs=claim.num_pairs)
    return _equivalence_outcome(result, over, detected)


def _equivalence_outcome(
    result: ClaimResult, over: dict[str, Any], detected: dict[str, Any] | None
) -> Reason:
    claim, estimate = result.claim, result.estimate
    shared = {
        "metric": claim.metric,
        "margin": claim.margin_text,
        "margin_unit": claim.margin_unit,
        "transform": claim.transform,
        "over": over,
        "alpha": claim.alpha,
        "warnings": result.warnings,
    }
    bounds = {"certified_bound": estimate.certified_bound, "certified_number": estimate.certified_number}
    if result.result == "equivalent":
        return Code.CLAIM_EQUIVALENT(
            **shared, **bounds, certified_jointly=estimate.certified_jointly, detected=detected
        )
    shared |= {"difference": estimate.mean_difference, "interval": estimate.interval}
    if result.result == "different":
        return Code.CLAIM_DIFFERS(**shared, detected=detected, p_beyond=estimate.p_beyond_holm)
    shared |= {
        **bounds,
        "sd_difference": estimate.sd_difference,
        "pair_correlation": estimate.pair_correlation,
        "power": {**asdict(result.power), "shared_correlation": SHARED},
    }
    if not detected:
        return Code.CLAIM_UNDECIDED(**shared)
    p_difference = 1.0 if estimate.p_difference_holm is None else estimate.p_difference_holm
    return Code.CLAIM_DETECTED(
        **shared,
        detected=detected,
        p_difference=p_difference,
        significant=p_difference < claim.alpha_difference,
        absolute_margin=claim.margin,
    )


def _tested_over(claim: ClaimTerms, *, has_recipe: bool) -> dict[str, Any]:
    """Return what an outcome is said of: runs, steps and recipe."""
    return {
        "pairs": claim.num_pairs,
        "runs": claim.num_runs,
        "welch": not claim.paired and claim.test not in ("limit", "exact"),
        "steps": claim.steps,
        "window": claim.window,
        "recipe": has_recipe,
    }


def _limit_outcome(result: ClaimResult, over: dict[str, Any], detected: dict[str, Any] | None) -> Reason:
    claim, estimate = result.claim, result.estimate
    measure: str = claim.reduction
    if claim.metric == FINAL_WEIGHTS:
        measure = "distance"
    elif claim.test == "ratio limit":
        measure = "excess" if claim.transform == "log_excess" else "ratio"
    shared = {
        "metric": claim.metric,
        "margin": claim.margin_text,
        "over": over,
        "alpha": claim.alpha,
        "measure": measure,
        "limit": claim.margin_number,
        "limited": estimate.limited,
        "interval": estimate.limited_interval,
        "detected": detected,
        "warnings": result.warnings,
    }
    if estimate.limited_interval is not None and result.result == "holds":
        return Code.LIMIT_HOLDS(**shared)
    if estimate.limited_interval is not None and result.result == "different":
        return Code.LIMIT_BROKEN(**shared, p_beyond=estimate.p_beyond_holm)
    return Code.LIMIT_UNDECIDED(**shared)
