"""How sentences and tables write a claim's numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

AT_OBSERVED = "at the observed sd"  # of numbers of pairs; `abrun plan --from` takes its upper bound


def bound_text(bound: float) -> str:
    """An upper bound in three digits, rounded up: 0.05004 is no 0.05, at which a claim would not pass."""
    if not 0 < bound < math.inf:
        return f"{bound:.3g}"
    unit = max(10.0 ** (math.floor(math.log10(bound)) - 2), math.ulp(0.0))
    return f"{math.ceil(round(bound / unit, 6)) * unit:.3g}"


def beside_limit(value: float, limit: float) -> str:
    """Four digits, or as many as show on which side of a limit it lies: 1.00005 is no 1."""
    for digits in range(4, 10):
        if value == limit or f"{value:.{digits}g}" != f"{limit:.{digits}g}":
            return f"{value:.{digits}g}"
    return repr(value)


def difference_text(difference: float, interval: Sequence[float]) -> str:
    """A difference and its interval, in the digits that every table and sentence gives them in."""
    return f"{difference:+.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"


def difference_unit(transform: str) -> str:
    """How a difference of transformed values is read."""
    scale = difference_scale(transform)
    return f" ({scale})" if scale else ""


def difference_scale(transform: str) -> str:
    """The scale of a difference of transformed values; empty for that of the values."""
    return {"identity": "", "log": "log ratio", "log_excess": "log ratio of the excess over 1"}[transform]


def certified_text(certified_bound: float | None, certified_number: float | None, margin_unit: str) -> str:
    """The smallest margin that would have passed, in the margin's own unit."""
    number = certified_bound if certified_number is None else certified_number
    if number is None:
        return "-"
    if margin_unit in ("level", "climb") and certified_number is not None:
        return f"{bound_text(100 * number)}%{' of climb' * (margin_unit == 'climb')}"
    return f"{bound_text(number)}{' sigma' * (margin_unit == 'sigma')}"


def agreeing_text(detected: Mapping[str, Any]) -> str:
    """In which seeds, or runs, the direction of a detected difference holds."""
    agreeing = f"in {detected['num_agreeing']} of {detected['num_compared']}"
    return (
        f"{agreeing} seeds" if detected["paired"] else f"{agreeing} treated runs, against the baseline's mean"
    )


def agreement_text(detected: Mapping[str, Any]) -> str:
    """`lower in 4 of 4 seeds`."""
    return f"{detected['direction']} {agreeing_text(detected)}"


def measured_text(detected: Mapping[str, Any]) -> str:
    """`-0.0328 [-0.0349, -0.0307], in 4 of 4 seeds`."""
    return f"{difference_text(detected['difference'], detected['interval'])}, {agreeing_text(detected)}"


def detected_text(detected: Mapping[str, Any]) -> str:
    """`lower: -0.0328 [-0.0349, -0.0307], in 4 of 4 seeds`."""
    return f"{detected['direction']}: {measured_text(detected)}"


def margin_text(number: float, unit: str) -> str:
    """`±0.05`, `±5 % of the baseline's level`, `±1 sigma of the baseline`."""
    if unit == "":
        return f"±{number:g}"
    return (
        f"±{number:g} sigma of the baseline"
        if unit == "sigma"
        else f"±{100 * number:g} % of the baseline's {unit}"
    )


def margin_of_reference_text(margin: float, sigmas: float, reference: str) -> str:
    return f"±{margin:.3g} ({sigmas:g} x the lower bound of sigma of {reference})"


def interval_level_text(alpha: float) -> str:
    """`90 %`, of the interval that two one-sided tests at `alpha` give."""
    return f"{100 * (1 - 2 * alpha):.3g} %"


def confidence_text(alpha: float) -> str:
    return f"{100 * (1 - alpha):.3g} %"


def units(*, paired: bool) -> str:
    """Return what is counted: a pair is a run of each arm."""
    return "pairs" if paired else "runs of each arm"


def pairs_or_more_text(count: int | None) -> str:
    return "more than 1000" if count is None else str(count)


def count_text(number: int, noun: str) -> str:
    """`no GPUs`, `1 GPU`, `2 GPUs`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
