"""The outcome of a claim as a reason, which promises no more than was tested."""

from dataclasses import asdict
from typing import Any

from abrun.compare.judge.claims import SHARED, PrimaryResult
from abrun.metric_names import FINAL_WEIGHTS
from abrun.reasons import Code, Reason

_POWER = ("power_now", "pairs_needed", "pairs_needed_range", "pairs_needed_observed", "pairs_if_shared")


def outcome(result: PrimaryResult, *, has_recipe: bool = True) -> Reason:
    """Return what is shown of one claim; `has_recipe`: the arms were trained by one recipe."""
    detected = asdict(result.detected) if result.detected else None
    if result.problem and result.result != "different":
        return Code.CLAIM_NOT_TESTED(
            metric=result.metric, window=result.window, problem=result.problem, detected=detected
        )
    over = _tested_over(result, has_recipe=has_recipe)
    if result.test == "exact":
        return _exact_outcome(result, over)
    if result.test in ("limit", "ratio limit"):
        return _limit_outcome(result, over, detected)
    if result.mean_difference is None or result.interval is None or result.steps is None:
        if result.num_runs is not None:
            return Code.CLAIM_TOO_FEW_RUNS(metric=result.metric)
        return Code.CLAIM_TOO_FEW_PAIRS(metric=result.metric, pairs=result.num_pairs)
    shared = {
        "metric": result.metric,
        "margin": result.margin_text,
        "margin_unit": result.margin_unit,
        "transform": result.transform,
        "over": over,
        "alpha": result.alpha,
        "warnings": result.warnings,
    }
    bounds = {"certified_bound": result.certified_bound, "certified_number": result.certified_number}
    if result.result == "equivalent":
        return Code.CLAIM_EQUIVALENT(
            **shared, **bounds, certified_jointly=result.certified_jointly, detected=detected
        )
    shared |= {"difference": result.mean_difference, "interval": result.interval}
    if result.result == "different":
        return Code.CLAIM_DIFFERS(**shared, detected=detected, p_beyond=result.p_beyond_holm)
    shared |= {
        **bounds,
        "sd_difference": result.sd_difference,
        "pair_correlation": result.pair_correlation,
        "power": {**{name: getattr(result, name) for name in _POWER}, "shared_correlation": SHARED},
    }
    if not detected:
        return Code.CLAIM_UNDECIDED(**shared)
    p_difference = 1.0 if result.p_difference_holm is None else result.p_difference_holm
    return Code.CLAIM_DETECTED(
        **shared,
        detected=detected,
        p_difference=p_difference,
        significant=p_difference < result.alpha_difference,
        absolute_margin=result.margin,
    )


def _tested_over(result: PrimaryResult, *, has_recipe: bool) -> dict[str, Any]:
    """Return what an outcome is said of: runs, steps and recipe."""
    return {
        "pairs": result.num_pairs,
        "runs": result.num_runs,
        "unused_seeds": len(result.unused_seeds),
        "welch": result.num_runs is not None and result.test not in ("limit", "exact"),
        "steps": result.steps,
        "window": result.window,
        "recipe": has_recipe,
    }


def _exact_outcome(result: PrimaryResult, over: dict[str, Any]) -> Reason:
    if result.result == "holds":
        return Code.EXACT_HOLDS(metric=result.metric, over=over)
    return Code.EXACT_BROKEN(metric=result.metric, over=over, where=result.detail)


def _limit_outcome(result: PrimaryResult, over: dict[str, Any], detected: dict[str, Any] | None) -> Reason:
    measure: str = result.reduction
    if result.metric == FINAL_WEIGHTS:
        measure = "distance"
    elif result.test == "ratio limit":
        measure = "excess" if result.transform == "log_excess" else "ratio"
    shared = {
        "metric": result.metric,
        "margin": result.margin_text,
        "over": over,
        "alpha": result.alpha,
        "measure": measure,
        "limit": result.margin_number,
        "limited": result.limited,
        "interval": result.limited_interval,
        "detected": detected,
        "warnings": result.warnings,
    }
    if result.limited_interval is not None and result.result == "holds":
        return Code.LIMIT_HOLDS(**shared)
    if result.limited_interval is not None and result.result == "different":
        return Code.LIMIT_BROKEN(**shared, p_beyond=result.p_beyond_holm)
    return Code.LIMIT_UNDECIDED(**shared)
