"""Texts of numbers, lists and plurals, shared by sentences and tables: one function for each quantity."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

# `abrun power --from` plans with the upper bound of the sd instead, and so needs more pairs.
AT_OBSERVED = "at the observed sd"


def bound_text(bound: float) -> str:
    """Return an upper bound in three digits, rounded up: the bound 0.05004 does not pass a margin of 0.05."""
    return _rounded(bound, math.ceil) if bound > 0 else f"{bound:.3g}"


def _rounded(value: float, to_integer: Callable[[float], int]) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.3g}"
    unit = max(10.0 ** (math.floor(math.log10(abs(value))) - 2), math.ulp(0.0))
    return f"{to_integer(round(value / unit, 6)) * unit:.3g}"


def text_near_limit(value: float, limit: float) -> str:
    """Return a value in four digits, or in as many as show whether it is above or below the limit."""
    for digits in range(4, 10):
        if value == limit or f"{value:.{digits}g}" != f"{limit:.{digits}g}":
            return f"{value:.{digits}g}"
    return repr(value)


def ratio_text(ratio: float) -> str:
    """Return a ratio in three digits, or in as many as show two digits of its distance from 1."""
    digits = 3 if ratio == 1 else max(3, 2 - math.floor(math.log10(abs(ratio - 1))))
    return f"{ratio:.{digits}g}x"


def difference_text(difference: float, interval: Sequence[float]) -> str:
    """Return a difference and its interval as every table and sentence writes them."""
    return f"{difference:+.3g} {interval_text(interval)}"


def interval_text(interval: Sequence[float]) -> str:
    """Return an interval in three digits, rounded outward, so that it agrees with the certified bound."""
    return f"[{_rounded(interval[0], math.floor)}, {_rounded(interval[1], math.ceil)}]"


def difference_unit(transform: str) -> str:
    """Return the scale of a difference as a suffix, in parentheses; empty without a transform."""
    scale = difference_scale(transform)
    return f" ({scale})" if scale else ""


def difference_scale(transform: str) -> str:
    """Return the scale of a difference; empty if the values are not transformed."""
    return {"identity": "", "log": "log ratio", "log_excess": "log ratio of the excess over 1"}[transform]


def certified_text(certified_bound: float | None, certified_number: float | None, margin_unit: str) -> str:
    """Return the smallest margin that would have passed, in the margin's own unit."""
    number = certified_bound if certified_number is None else certified_number
    if number is None:
        return "-"
    if margin_unit in ("level", "climb") and certified_number is not None:
        return f"{bound_text(100 * number)} %{' of climb' * (margin_unit == 'climb')}"
    return f"{bound_text(number)}{' sigma' * (margin_unit == 'sigma')}"


SCORES_TEXT = {"final": "final scores", "prompts": "all prompts"}  # instead of the steps of a window


def arm_texts(arm: str, baseline_arm: str) -> tuple[str, str]:
    """Return the names of treatment and baseline as nouns; arms named after their roles get an article."""
    names = ((arm, "treatment"), (baseline_arm, "baseline"))
    treatment, baseline = (f"the {name}" if name == role else name for name, role in names)
    return treatment, baseline


def agreeing_seeds_text(detected: Mapping[str, Any], arm: str, baseline_arm: str) -> str:
    """Return how many seeds (unpaired: treated runs) agree with a difference's sign: `in 4 of 4 seeds`."""
    treatment, baseline = arm_texts(arm, baseline_arm)
    agreeing = f"in {detected['num_agreeing']} of {detected['num_compared']}"
    if detected.get("unit") == "prompt":  # most prompts may be alike
        opposite = "lower" if detected["direction"] == "higher" else "higher"
        counts = f"{detected['num_agreeing']} prompts {detected['direction']}"
        return f"in the mean ({counts}, {detected['num_opposing']} {opposite})"
    if detected["paired"]:
        return f"{agreeing} seeds"
    return f"{agreeing} runs of {treatment}, against the mean of {baseline}"


def direction_text(detected: Mapping[str, Any], arm: str, baseline_arm: str) -> str:
    """Return the direction of a difference and how many seeds agree: `lower in 4 of 4 seeds`."""
    return f"{detected['direction']} {agreeing_seeds_text(detected, arm, baseline_arm)}"


def difference_and_seeds_text(detected: Mapping[str, Any], arm: str, baseline_arm: str) -> str:
    """Return a difference, its interval and its seeds: `-0.0328 [-0.0349, -0.0307], in 4 of 4 seeds`."""
    difference = difference_text(detected["difference"], detected["interval"])
    return f"{difference}, {agreeing_seeds_text(detected, arm, baseline_arm)}"


def deviation_text(deviation: float, scale: float, scale_from: str) -> str:
    """Return a deviation with its scale, such as `0.047 relative to 2.47 (the largest advantage)`."""
    return f"{deviation:.2g} relative to {scale:.3g} ({scale_from})"


def margin_text(number: float, unit: str) -> str:
    """Return a margin: `±0.05`, `±5 % of the baseline's level` or `±1 sigma of the baseline`."""
    if unit == "":
        return f"±{number:g}"
    if unit == "sigma":
        return f"±{number:g} sigma of the baseline"
    return f"±{100 * number:g} % of the baseline's {unit}"


def margin_of_reference_text(margin: float, sigmas: float, reference: str) -> str:
    return f"±{margin:.3g} ({sigmas:g}x the lower bound of sigma of {reference})"


def interval_level_text(alpha: float) -> str:
    """Return the level of the interval that two one-sided tests at `alpha` give: `90 %`."""
    return f"{100 * (1 - 2 * alpha):.3g} %"


def percent_text(share: float) -> str:
    """Return a share in whole percent: `5 %`."""
    return f"{share:.0%}".replace("%", " %")


def confidence_text(alpha: float) -> str:
    return f"{100 * (1 - alpha):.3g} %"


def sample_unit(*, paired: bool) -> str:
    """Return the noun of a sample size: pairs, or runs of each arm."""
    return "pairs" if paired else "runs of each arm"


def more_text(number: int) -> str:
    """Return how many names a list leaves out, such as ` and 2 more`; nothing if none."""
    return f" and {number} more" if number > 0 else ""


def pairs_or_more_text(count: int | None) -> str:
    return "more than 1000" if count is None else str(count)


def count_text(number: int, noun: str) -> str:
    """Return a number and its noun: `no GPUs`, `1 GPU`, `2 GPUs`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


# --- lists and plurals ---


def listed(names: object) -> str:
    """Return names with commas between them; a text unchanged."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        return str(names)
    return ", ".join(map(str, names))


def counted(things: int | Sized, noun: str) -> str:
    """Return a number, or how many things there are, with its noun: `1 pair`, `2 pairs`."""
    number = things if isinstance(things, int) else len(things)
    return f"{number} {plural(number, noun)}"


def plural(things: int | Sized, noun: str) -> str:
    """Return the noun of so many things: `seed` or `seeds`."""
    number = things if isinstance(things, int) else len(things)
    return noun if number == 1 else f"{noun}s"
