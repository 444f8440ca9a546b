"""How high the arms stand, and how a claim's margin and its spreads compare with that: one line a claim."""

import math
from collections.abc import Mapping
from typing import Any

from abrun.metric_names import Transform


def levels(claim: Mapping[str, Any]) -> str | None:
    """Of an entry of verdict.json's primaries; None where it has no levels of both arms."""
    base, treatment, interval = claim["baseline_mean"], claim["treatment_mean"], claim["interval"]
    if base is None or treatment is None or interval is None:
        return None
    confidence = f"{100 * (1 - 2 * claim['alpha']):.3g} %"
    if claim["transform"] == "identity":
        reach = f"± {(interval[1] - interval[0]) / 2:.2g} ({confidence}, of the paired difference)"
        said = [f"baseline {base:.4g}, treatment {treatment:.4g} {reach}"]
    else:
        low, ratio, high = (math.exp(value) for value in (interval[0], treatment - base, interval[1]))
        both = f"baseline {_level(base, claim)}, treatment {_level(treatment, claim)}"
        of = " of the excess over 1" if claim["transform"] == "log_excess" else ""
        said = [f"{both}, geometric means; ratio{of} {ratio:.3g} [{low:.3g}, {high:.3g}] ({confidence})"]
    said += [text for text in (_margin(claim), _spread(claim)) if text]
    return "; ".join(said)


def _level(mean: float, claim: Mapping[str, Any]) -> str:
    transform: Transform = claim["transform"]
    return f"{math.exp(mean) + (transform == 'log_excess'):.4g}"


def _margin(claim: Mapping[str, Any]) -> str | None:
    """What the margin is a share of; on the scale of logarithms it is a factor by itself."""
    margin, base, climb = claim["margin"], claim["baseline_mean"], claim["climb"]
    if margin is None:
        return None
    if claim["transform"] != "identity":
        return f"margin ±{margin:.3g} is a factor of {math.exp(-margin):.3g} to {math.exp(margin):.3g}"
    shares = [
        f"{100 * margin / abs(of):.2g} % of the {name}" for name, of in (("level", base), ("climb", climb)) if of
    ]
    return f"margin ±{margin:.3g} is {' and '.join(shares)}" if shares else None


def _spread(claim: Mapping[str, Any]) -> str | None:
    seeds, paired = claim["baseline_sd"], claim["sd_difference"]
    if seeds is None or paired is None:
        return None
    unpaired = seeds * math.sqrt(2)
    saved = f" ({unpaired / paired:.2g}x narrower than unpaired)" if 0 < paired < unpaired else ""
    return f"sd over seeds {seeds:.2g}, of the paired differences {paired:.2g}{saved}"
