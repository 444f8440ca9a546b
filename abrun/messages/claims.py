"""Sentences on the outcome of a claim.

They share these values. `over`: the sample (`pairs`, or the `runs` of both arms if they are not paired),
`steps`, `window`, whether there is a `recipe` and whether Welch's test was used. `detected`: a difference
whose interval excludes zero, or None. `power`: the power now, and the pairs needed. `arm`, `baseline_arm`:
the names of both arms.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.message import Message
from abrun.messages.numbers import (
    AT_OBSERVED,
    SCORES_TEXT,
    agreeing_seeds_text,
    arm_texts,
    bound_text,
    certified_text,
    confidence_text,
    difference_and_seeds_text,
    difference_unit,
    interval_level_text,
    interval_text,
    pairs_or_more_text,
    sample_unit,
    text_near_limit,
)
from abrun.reasons import Code

Detected = Mapping[str, Any] | None


# --- outcomes ---


def _not_tested(metric, window, problem, detected, arm, baseline_arm) -> str:
    """The claim could not be tested on these runs."""
    difference = ""
    if detected:
        change = _change(arm, baseline_arm, detected["direction"])
        difference = f"; yet {change}: {difference_and_seeds_text(detected, arm, baseline_arm)}"
    return f"{metric}: not tested over {window}: {problem}{difference}"


def _equivalent(
    metric,
    margin,
    margin_unit,
    transform,
    over,
    alpha,
    detected,
    certified_bound,
    certified_number,
    certified_jointly,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """The arms are equivalent within the margin."""
    unit = difference_unit(transform)
    bound = certified_text(certified_bound, certified_number, margin_unit)
    joint_bound = ""
    if certified_jointly is not None and certified_jointly != certified_bound:
        joint_bound = f"{bound_text(certified_jointly)} jointly with the other claims"
    equivalent = f"{metric}: equivalent within {_with_unit(margin, margin_unit, transform)}"
    sample = f"at {confidence_text(alpha)} confidence over {_setting(over)}"
    if detected is None:
        joint_bound = f", {joint_bound}" if joint_bound else ""
        return f"{equivalent} {sample} (certified bound {bound}{joint_bound}){_clauses(warnings)}"
    size = f"{abs(detected['difference']):.3g}{unit} {detected['direction']}"
    change = f"{_change(arm, baseline_arm, size)} {agreeing_seeds_text(detected, arm, baseline_arm)}"
    joint_bound = f" ({joint_bound})" if joint_bound else ""
    return (
        f"{equivalent} {sample}, yet {change} ({_interval(alpha, detected['interval'])}); any margin below "
        f"{bound}{joint_bound} would not have passed{_clauses(warnings)}"
    )


def _differs(
    metric,
    margin,
    margin_unit,
    transform,
    over,
    alpha,
    detected,
    difference,
    interval,
    p_beyond,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """The arms differ by more than the margin."""
    size = f"{abs(difference):.3g}{difference_unit(transform)} {'lower' if difference < 0 else 'higher'}"
    agreement = f", {agreeing_seeds_text(detected, arm, baseline_arm)}" if detected else ""
    return (
        f"{metric}: {_change(arm, baseline_arm, size)}, more than the margin "
        f"{_with_unit(margin, margin_unit, transform)}, over {_setting(over)}{agreement} "
        f"({_interval(alpha, interval)}; p = {p_beyond:.2g} if the margin held, Holm-corrected)"
        f"{_clauses(warnings)}"
    )


def _detected(
    metric,
    margin,
    margin_unit,
    transform,
    over,
    alpha,
    detected,
    difference,
    interval,
    certified_bound,
    certified_number,
    p_difference,
    significant,
    sd_difference,
    pair_correlation,
    absolute_margin,
    power,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """A difference was detected, and may lie within the margin."""
    bound = certified_text(certified_bound, certified_number, margin_unit)
    margin = _with_unit(margin, margin_unit, transform)
    estimate = _estimate(margin, transform, alpha, difference, interval, bound)
    needed = _needed_for_the_observed(over, power, margin_unit, abs(difference) >= absolute_margin)
    change = _change(arm, baseline_arm, detected["direction"])
    seeds = agreeing_seeds_text(detected, arm, baseline_arm)
    return (
        f"{metric}: a difference {'was detected' if significant else 'is likely'} over {_setting(over)} "
        f"(p = {p_difference:.2g}, Holm-corrected): {change} {seeds}; "
        f"undecided whether the difference stays within the margin: {estimate}; "
        f"{_spread(over, sd_difference, pair_correlation)}; {needed}{_clauses(warnings)}"
    )


def _undecided(
    metric,
    margin,
    margin_unit,
    transform,
    over,
    alpha,
    difference,
    interval,
    certified_bound,
    certified_number,
    sd_difference,
    pair_correlation,
    power,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """Neither equivalence nor a difference was shown."""
    bound = certified_text(certified_bound, certified_number, margin_unit)
    margin = _with_unit(margin, margin_unit, transform)
    estimate = _estimate(margin, transform, alpha, difference, interval, bound)
    power_now = "unknown" if power["power_now"] is None else f"{100 * power['power_now']:.0f} %"
    return (
        f"{metric}: undecided over {_setting(over)}: {estimate}; "
        f"{_spread(over, sd_difference, pair_correlation)}; power now {power_now}; {_needed(over, power)}"
        f"{_clauses(warnings)}"
    )


def _limit_holds(
    metric,
    margin,
    over,
    alpha,
    measure,
    limit,
    limited,
    interval,
    detected,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """The limit holds."""
    value = _quantity_and_interval(measure, limit, limited, alpha, interval, detected, arm, baseline_arm)
    return (
        f"{metric}: {_reached(over)}{margin} at {confidence_text(alpha)} confidence over {_setting(over)} "
        f"({value}){_clauses(warnings)}"
    )


def _limit_broken(
    metric,
    margin,
    over,
    alpha,
    measure,
    limit,
    limited,
    interval,
    detected,
    p_beyond,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """The limit is broken."""
    value = _quantity_and_interval(measure, limit, limited, alpha, interval, detected, arm, baseline_arm)
    p_value = f"p = {p_beyond:.2g} if the limit held, Holm-corrected"
    broken = margin.replace("level ", "level not ", 1) if margin.startswith("level ") else f"not {margin}"
    target = _reached(over, negation="not ")
    claim = f"{metric}: {target + margin if target else broken}"
    return f"{claim} over {_setting(over)} ({value}; {p_value}){_clauses(warnings)}"


def _limit_undecided(
    metric,
    margin,
    over,
    alpha,
    measure,
    limit,
    limited,
    interval,
    detected,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """It is not shown whether the limit holds; `interval` is None for one pair."""
    head = f"{metric}: {_reached(over)}{margin}: undecided over {_setting(over)}"
    if interval is None:
        needed = (
            f"two {_pair(over)}s are needed" if over["runs"] is None else "two runs of each arm are needed"
        )
        return f"{head}: {_quantity(measure, limit, limited, arm, baseline_arm)}; {needed}"
    value = _quantity_and_interval(measure, limit, limited, alpha, interval, detected, arm, baseline_arm)
    return f"{head}: {value}; more {over.get('unit', 'seed')}s narrow the interval{_clauses(warnings)}"


def _exact_holds(metric: str, over: Mapping[str, Any]) -> str:
    """The arms are bit-identical."""
    return f"{metric}: bit-identical over {_setting(over)}"


def _exact_broken(metric: str, over: Mapping[str, Any], where: str) -> str:
    """The arms are not bit-identical."""
    return f"{metric}: not bit-identical over {_setting(over)}: {where}"


# --- one-sided outcomes: `kind` is not_worse or better, `better` the direction of an improvement ---


def _passes(
    metric,
    kind,
    margin,
    better,
    transform,
    over,
    alpha,
    difference,
    interval,
    detected,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """The treatment is shown not to be worse, or to be better, by the margin."""
    value = _signed_difference(better, transform, alpha, difference, interval, detected, arm, baseline_arm)
    yet = "yet " * bool(detected and detected["direction"] != better)
    return (
        f"{metric}: {_change(arm, baseline_arm, margin)}, at {confidence_text(alpha)} confidence over "
        f"{_setting(over)}: {yet}{value}{_clauses(warnings)}"
    )


def _fails(
    metric,
    kind,
    margin,
    better,
    transform,
    over,
    alpha,
    difference,
    interval,
    detected,
    p_beyond,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """The treatment is shown to be worse by more than the margin, or not to be better by it."""
    value = _signed_difference(better, transform, alpha, difference, interval, detected, arm, baseline_arm)
    broken = margin.replace("at most", "more than", 1) if kind == "not_worse" else f"not {margin}"
    return (
        f"{metric}: {_change(arm, baseline_arm, broken)}, over {_setting(over)}: {value}; p = {p_beyond:.2g} "
        f"if the claim held, Holm-corrected{_clauses(warnings)}"
    )


def _open(
    metric,
    kind,
    margin,
    better,
    transform,
    over,
    alpha,
    difference,
    interval,
    detected,
    power,
    improvement,
    warnings,
    arm,
    baseline_arm,
) -> str:
    """Neither that the treatment keeps the margin nor that it breaks it is shown."""
    value = _signed_difference(better, transform, alpha, difference, interval, detected, arm, baseline_arm)
    truth = "the arms are truly equal" if kind == "not_worse" else f"the true gain is {improvement:.3g}"
    power_now = "unknown" if power["power_now"] is None else f"{100 * power['power_now']:.0f} %"
    needed = pairs_or_more_text(power["pairs_needed"])
    return (
        f"{metric}: undecided whether {_change(arm, baseline_arm, margin)}, over {_setting(over)}: {value}; "
        f"power now {power_now} if {truth}, {sample_unit(paired=over['runs'] is None)} needed for 80 %: "
        f"{needed}{_clauses(warnings)}"
    )


def _signed_difference(
    better: str,
    transform: str,
    alpha: float,
    difference: float,
    interval: Sequence[float],
    detected: Detected,
    arm: str,
    baseline_arm: str,
) -> str:
    """Return a difference, with direction, judgement and seeds if its interval excludes zero."""
    unit = difference_unit(transform)
    if detected is None:
        return f"no difference detected, {difference:+.3g}{unit} ({_interval(alpha, interval)})"
    judgement = "better" if detected["direction"] == better else "worse"
    size = f"{abs(difference):.3g}{unit} {detected['direction']} ({judgement})"
    return f"{size} {agreeing_seeds_text(detected, arm, baseline_arm)} ({_interval(alpha, interval)})"


# --- parts of outcomes ---


def _setting(over: Mapping[str, Any]) -> str:
    """Return the sample and the steps of an outcome: `5 pairs of this recipe, steps 33-40`."""
    steps = "-".join(map(str, over["steps"])) if over["steps"] else over["window"]
    window = SCORES_TEXT.get(over.get("axis", "")) or f"steps {steps}"
    sample = f"{_sample(over)}{' of this recipe' * over['recipe']}"
    return sample if _pair(over) == "prompt" else f"{sample}, {window}"


def _sample(over: Mapping[str, Any]) -> str:
    """Return the runs that a claim was tested on: `5 pairs`, or `5 and 4 unpaired runs (Welch)`."""
    if over["runs"] is None:
        return f"{over['pairs']} {_pair(over)}{'s' * (over['pairs'] != 1)}"
    return f"{over['runs'][0]} and {over['runs'][1]} unpaired runs{' (Welch)' * over['welch']}"


def _pair(over: Mapping[str, Any]) -> str:
    """Return what a claim was tested on: pairs of runs, or the prompts of two runs."""
    return "prompt" if over.get("unit") == "prompt" else "pair"


def _with_unit(margin: str, margin_unit: str, transform: str) -> str:
    """Return a margin with its scale; one in sigmas or percent names its unit itself."""
    return margin + difference_unit(transform) * (margin_unit == "")


def _clauses(warnings: Sequence[str]) -> str:
    return "".join(f"; {warning}" for warning in warnings)


def _change(arm: str, baseline_arm: str, change: str) -> str:
    """Return a difference of named arms: `fused is 0.03 lower than plain`."""
    treatment, baseline = arm_texts(arm, baseline_arm)
    return f"{treatment} is {change} than {baseline}"


def _interval(alpha: float, interval: Sequence[float]) -> str:
    return f"{interval_level_text(alpha)} CI {interval_text(interval)}"


def _estimate(
    margin: str, transform: str, alpha: float, difference: float, interval: Sequence[float], bound: str
) -> str:
    return (
        f"mean difference {difference:+.3g}{difference_unit(transform)} ({_interval(alpha, interval)}), "
        f"certified bound {bound} against {margin}"
    )


def _spread(over: Mapping[str, Any], sd: float, pair_correlation: float | None) -> str:
    if over["runs"] is not None:
        return f"sd of the runs of an arm {sd:.3g}"
    correlation = "undefined" if pair_correlation is None else f"{pair_correlation:.2f}"
    return f"sd of the paired differences {sd:.3g}, correlation within pairs {correlation}"


def _needed(over: Mapping[str, Any], power: Mapping[str, Any]) -> str:
    needed = "unknown"
    if power["pairs_needed_range"] is not None:
        low, high = map(pairs_or_more_text, power["pairs_needed_range"])
        point = pairs_or_more_text(power["pairs_needed"])
        needed = f"{point} {AT_OBSERVED} ({low} to {high} over its 90 % CI), if the arms are truly equal"
    if over["runs"] is None:
        return f"{_pair(over)}s needed for 80 % power: {needed}"
    paired = (
        f"pairing by seed would need about {pairs_or_more_text(power['pairs_if_shared'])} at a correlation "
        f"of {power['shared_correlation']}"
    )
    return f"runs of each arm needed for 80 % power: {needed}; {paired}"


def _needed_for_the_observed(
    over: Mapping[str, Any], power: Mapping[str, Any], margin_unit: str, exceeds_margin: bool
) -> str:
    """Return how many pairs would decide if the true difference is the observed one."""
    if margin_unit == "sigma":
        return _needed(over, power)
    pairs = f"{_pair(over)}s" if over["runs"] is None else sample_unit(paired=False)
    if exceeds_margin:
        return f"no number of {pairs} shows equivalence if the true difference is the observed one"
    needed = pairs_or_more_text(power["pairs_needed_observed"])
    return f"{pairs} needed for 80 % power: {needed}, if the true difference is the observed one"


def _reached(over: Mapping[str, Any], negation: str = "") -> str:
    """Return the target of a claim on the time to reach it: `0.6 is reached `."""
    target = over.get("target")
    return "" if target is None else f"{target:g} is {negation}reached "


def _quantity(measure: str, limit: float, limited: float | None, arm: str, baseline_arm: str) -> str:
    """Return the limited quantity with its value, such as `fused / plain is 0.94`."""
    treatment, baseline = arm_texts(arm, baseline_arm)
    quantity = {
        "ratio": f"{arm} / {baseline_arm}",
        "first": f"{arm} / {baseline_arm}",
        "excess": f"{arm} / {baseline_arm} of the excess over 1",
        "distance": f"the arms' distance, relative to how far {baseline} moved,",
    }.get(measure, f"the {measure} of {treatment}")
    if limited is None:
        return f"{quantity} is unknown"
    return f"{quantity} is {text_near_limit(limited, limit)}"


def _quantity_and_interval(
    measure: str,
    limit: float,
    limited: float,
    alpha: float,
    interval: Sequence[float],
    detected: Detected,
    arm: str,
    baseline_arm: str,
) -> str:
    low, high = (text_near_limit(end, limit) for end in interval)
    quantity = _quantity(measure, limit, limited, arm, baseline_arm)
    value = f"{quantity}, {interval_level_text(alpha)} CI [{low}, {high}]"
    if detected is None:
        return value
    if measure in ("ratio", "excess", "first"):
        return f"{value}, {detected['direction']} {agreeing_seeds_text(detected, arm, baseline_arm)}"
    baseline = arm_texts(arm, baseline_arm)[1]
    difference = difference_and_seeds_text(detected, arm, baseline_arm)
    return f"{value}; {detected['direction']} than {baseline}: {difference}"


MESSAGES: dict[Code, Message] = {
    Code.CLAIM_EQUIVALENT: _equivalent,
    Code.CLAIM_DIFFERS: _differs,
    Code.CLAIM_DETECTED: _detected,
    Code.CLAIM_UNDECIDED: _undecided,
    Code.CLAIM_NOT_TESTED: _not_tested,
    Code.CLAIM_TOO_FEW_PAIRS: "{metric}: not tested: {pairs:count usable pair}, but equivalence needs at "
    "least two to estimate the spread (only step one, the guards and the divergence were checked)",
    Code.CLAIM_TOO_FEW_RUNS: "{metric}: not tested: equivalence needs at least two runs of each arm",
    Code.CLAIM_PASSES: _passes,
    Code.CLAIM_FAILS: _fails,
    Code.CLAIM_OPEN: _open,
    Code.LIMIT_HOLDS: _limit_holds,
    Code.LIMIT_BROKEN: _limit_broken,
    Code.LIMIT_UNDECIDED: _limit_undecided,
    Code.EXACT_HOLDS: _exact_holds,
    Code.EXACT_BROKEN: _exact_broken,
}
