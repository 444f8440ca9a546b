"""Sentences of claims: what was shown of each.

They share their values. `over`: what was tested (`pairs`, `runs` of both arms where they are not paired,
`steps`, `window`, whether there is a `recipe`, whether by Welch's test). `detected`: the
difference whose interval excludes zero, or None. `power`: what more pairs would bring.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from abrun.messages.message import Message
from abrun.messages.numbers import (
    AT_OBSERVED,
    agreement_text,
    beside_limit,
    bound_text,
    certified_text,
    confidence_text,
    detected_text,
    difference_unit,
    interval_level_text,
    measured_text,
    pairs_or_more_text,
    units,
)
from abrun.reasons import Code

Detected = Mapping[str, Any] | None


# --- outcomes ---


def _not_tested(metric: str, window: str, problem: str, detected: Detected) -> str:
    """The claim could not be tested on these runs."""
    recorded = f"; recorded is a difference, {detected_text(detected)}" if detected else ""
    return f"{metric}: not tested over {window}: {problem}{recorded}"


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
) -> str:
    """The arms are equivalent within the margin."""
    unit = difference_unit(transform)
    within = margin + unit * (margin_unit == "")
    yet = f", and {detected_text(detected)}{unit};" if detected else ""
    bound = f"certified bound {certified_text(certified_bound, certified_number, margin_unit)}"
    jointly = ""
    if certified_jointly is not None and certified_jointly != certified_bound:
        jointly = f", {bound_text(certified_jointly)} jointly with the other claims'"
    return (
        f"{metric}: equivalent within {within}{yet} at {confidence_text(alpha)} "
        f"confidence over {_setting(over)} ({bound}{jointly}){_beside(warnings)}"
    )


def _differs(
    metric, margin, margin_unit, transform, over, alpha, detected, difference, interval, p_beyond, warnings
) -> str:
    """The arms differ by more than the margin."""
    unit = difference_unit(transform)
    return (
        f"{metric}: differs by {difference:+.3g}{unit}, beyond {margin}{unit * (margin_unit == '')}, over "
        f"{_setting(over)}{_agreement(detected)} ({_interval(alpha, interval)}; Holm-corrected "
        f"p = {p_beyond:.2g} of a true difference within the margin){_beside(warnings)}"
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
) -> str:
    """A difference was detected, and may lie within the margin."""
    bound = certified_text(certified_bound, certified_number, margin_unit)
    against = _against(margin, margin_unit, transform, alpha, difference, interval, bound)
    needed = _needed_for_the_observed(over, power, margin_unit, abs(difference) >= absolute_margin)
    return (
        f"{metric}: a difference {'was detected' if significant else 'is likely'} over {_setting(over)} "
        f"(Holm p = {p_difference:.2g}){_agreement(detected)}, and whether it stays within the margin is "
        f"open: {against}; {_spread(over, sd_difference, pair_correlation)}, {needed}{_beside(warnings)}"
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
) -> str:
    """Neither equivalence nor a difference was shown."""
    bound = certified_text(certified_bound, certified_number, margin_unit)
    against = _against(margin, margin_unit, transform, alpha, difference, interval, bound)
    now = "unknown" if power["power_now"] is None else f"{100 * power['power_now']:.0f} %"
    return (
        f"{metric}: not decided over {_setting(over)}: {against}; "
        f"{_spread(over, sd_difference, pair_correlation)}, power now {now}, {_needed(over, power)}"
        f"{_beside(warnings)}"
    )


def _limit_holds(metric, margin, over, alpha, measure, limit, limited, interval, detected, warnings) -> str:
    """The limit holds."""
    found = _limited(measure, limit, limited, alpha, interval, detected)
    return (
        f"{metric}: {margin} at {confidence_text(alpha)} confidence over {_setting(over)} "
        f"({found}){_beside(warnings)}"
    )


def _limit_broken(
    metric, margin, over, alpha, measure, limit, limited, interval, detected, p_beyond, warnings
) -> str:
    """The limit is broken."""
    found = _limited(measure, limit, limited, alpha, interval, detected)
    p_value = f"p = {p_beyond:.2g} if the limit were kept, Holm-corrected"
    return f"{metric}: not {margin} over {_setting(over)} ({found}, {p_value}){_beside(warnings)}"


def _limit_undecided(
    metric, margin, over, alpha, measure, limit, limited, interval, detected, warnings
) -> str:
    """It is not shown whether the limit holds; `interval` is None for one pair."""
    head = f"{metric}: {margin}: not decided over {_setting(over)}"
    if interval is None:
        needed = "two pairs are needed" if over["runs"] is None else "two runs of each arm are needed"
        return f"{head}: {_measured(measure, limit, limited)}; {needed}"
    found = _limited(measure, limit, limited, alpha, interval, detected)
    return f"{head}: {found}; more seeds narrow it{_beside(warnings)}"


def _exact_holds(metric: str, over: Mapping[str, Any]) -> str:
    """The arms are the same bit for bit."""
    return f"{metric}: the same bit for bit over {_setting(over)}"


def _exact_broken(metric: str, over: Mapping[str, Any], where: str) -> str:
    """The arms are not the same bit for bit."""
    return f"{metric}: not the same bit for bit over {_setting(over)}: {where}"


# --- parts of outcomes ---


def _setting(over: Mapping[str, Any]) -> str:
    """What an outcome is said of and no more: `5 pairs, this recipe, steps 33-40`."""
    steps = "-".join(map(str, over["steps"])) if over["steps"] else over["window"]
    return f"{_sample(over)}, {'this recipe, ' * over['recipe']}steps {steps}"


def _sample(over: Mapping[str, Any]) -> str:
    """What a claim was tested over: `5 pairs`, or `5 and 4 unpaired runs (Welch)`."""
    if over["runs"] is None:
        return f"{over['pairs']} pair{'s' * (over['pairs'] != 1)}"
    return f"{over['runs'][0]} and {over['runs'][1]} unpaired runs{' (Welch)' * over['welch']}"


def _beside(warnings: Sequence[str]) -> str:
    return "".join(f"; {warning}" for warning in warnings)


def _agreement(detected: Detected) -> str:
    return f", {agreement_text(detected)}" if detected else ""


def _interval(alpha: float, interval: Sequence[float]) -> str:
    return f"{interval_level_text(alpha)} interval [{interval[0]:.3g}, {interval[1]:.3g}]"


def _against(
    margin: str,
    margin_unit: str,
    transform: str,
    alpha: float,
    difference: float,
    interval: Sequence[float],
    bound: str,
) -> str:
    unit = difference_unit(transform)
    within = margin + unit * (margin_unit == "")
    return (
        f"mean difference {difference:+.3g}{unit}, {_interval(alpha, interval)}, certified bound {bound} "
        f"against {within}"
    )


def _spread(over: Mapping[str, Any], sd: float, pair_correlation: float | None) -> str:
    if over["runs"] is not None:
        return f"sd of a run of each arm {sd:.3g}"
    correlation = "undefined" if pair_correlation is None else f"{pair_correlation:.2f}"
    return f"s_d {sd:.3g}, pair correlation {correlation}"


def _needed(over: Mapping[str, Any], power: Mapping[str, Any]) -> str:
    needed = "unknown"
    if power["pairs_needed_range"] is not None:
        low, high = map(pairs_or_more_text, power["pairs_needed_range"])
        point = pairs_or_more_text(power["pairs_needed"])
        needed = f"{point} ({low} to {high}) {AT_OBSERVED}, if the arms are truly equal"
    if over["runs"] is None:
        return f"pairs needed for 80 % power {needed}"
    paired = (
        f"pairing by seed would need about {pairs_or_more_text(power['pairs_if_shared'])} at a correlation "
        f"of {power['shared_correlation']}"
    )
    return f"runs of each arm needed for 80 % power {needed}; {paired}"


def _needed_for_the_observed(
    over: Mapping[str, Any], power: Mapping[str, Any], margin_unit: str, beyond: bool
) -> str:
    """What more pairs would bring if the true difference is the observed one."""
    if margin_unit == "sigma":
        return _needed(over, power)
    pairs = units(paired=over["runs"] is None)
    if beyond:
        return f"no number of {pairs} shows equivalence if the true difference is the observed one"
    needed = pairs_or_more_text(power["pairs_needed_observed"])
    return f"{pairs} needed for 80 % power {needed}, if the true difference is the observed one"


def _measured(measure: str, limit: float, limited: float) -> str:
    """Name what a limit is on: a ratio, a ratio of excesses, a distance of weights, or a reduction."""
    what = {
        "ratio": "treatment / baseline",
        "excess": "treatment / baseline of the excess over 1",
        "distance": "the arms' distance, in units of how far the baseline moved,",
    }.get(measure, f"the treatment's {measure}")
    return f"{what} is {beside_limit(limited, limit)}"


def _limited(
    measure: str, limit: float, limited: float, alpha: float, interval: Sequence[float], detected: Detected
) -> str:
    low, high = (beside_limit(end, limit) for end in interval)
    found = f"{_measured(measure, limit, limited)}, {interval_level_text(alpha)} interval [{low}, {high}]"
    if detected is None:
        return found
    if measure in ("ratio", "excess"):
        return f"{found}{_agreement(detected)}"
    return f"{found}, and {detected['direction']} than the baseline: {measured_text(detected)}"


MESSAGES: dict[Code, Message] = {
    Code.CLAIM_EQUIVALENT: _equivalent,
    Code.CLAIM_DIFFERS: _differs,
    Code.CLAIM_DETECTED: _detected,
    Code.CLAIM_UNDECIDED: _undecided,
    Code.CLAIM_NOT_TESTED: _not_tested,
    Code.CLAIM_TOO_FEW_PAIRS: "{metric}: {pairs:count usable pair}; equivalence needs the spread over at "
    "least two: only step one, the guards and the divergence were looked at",
    Code.CLAIM_TOO_FEW_RUNS: "{metric}: not tested: equivalence needs two runs of each arm, or more",
    Code.LIMIT_HOLDS: _limit_holds,
    Code.LIMIT_BROKEN: _limit_broken,
    Code.LIMIT_UNDECIDED: _limit_undecided,
    Code.EXACT_HOLDS: _exact_holds,
    Code.EXACT_BROKEN: _exact_broken,
}
