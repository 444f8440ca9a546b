"""How high the arms stand, and how a claim's margin and its spreads compare with that: one line a claim."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from abrun.messages.numbers import difference_text
from abrun.metric_names import Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Levels of both arms in the window of a claim."""

    claim: int  # its place among verdict.json's primaries
    arm: str
    where: str  # metric and steps
    means: str  # of both arms, with the reach of the interval
    beside: str  # the margin as a share of them, and the spreads; may be empty

    @property
    def text(self) -> str:
        return f"{self.where}: {self.means}{'; ' if self.beside else ''}{self.beside}"


def levels(content: Mapping[str, Any]) -> list[Levels]:
    """Of verdict.json's claims that have levels of both arms, in their order."""
    baseline = content["baseline"]
    found = []
    for index, claim in enumerate(content["primaries"]):
        means = _means(claim, baseline)
        if means:
            steps = f", steps {claim['steps'][0]}-{claim['steps'][1]}" if claim["steps"] else ""
            noise = step_noise_text(claim.get("step_noise"))
            beside = "; ".join(filter(None, (_margin(claim), _spread(claim), *noise)))
            where = f"{claim['metric']}{steps}"
            found.append(Levels(claim=index, arm=claim["arm"], where=where, means=means, beside=beside))
    return found


def _means(claim: Mapping[str, Any], baseline: str) -> str | None:
    base, treatment, interval = claim["baseline_mean"], claim["treatment_mean"], claim["interval"]
    if base is None or treatment is None or interval is None:
        return None
    difference = claim["mean_difference"] if claim.get("unused_seeds") else treatment - base
    confidence = f"{100 * (1 - 2 * claim['alpha']):.3g} %"
    if claim["transform"] == "identity":
        of = "difference" if claim["num_runs"] else "paired difference"
        if claim.get("unused_seeds"):
            of = f"paired difference {treatment - base:+.3g}, with the reference's other seeds"
        apart = f"{difference_text(difference, interval)} ({confidence} interval{_wider(claim)})"
        return f"{baseline} {base:.4g}, {claim['arm']} {treatment:.4g}; {of} {apart}"
    with np.errstate(over="ignore"):
        low, ratio, high = np.exp([interval[0], difference, interval[1]])
    both = f"{baseline} {_level(base, claim)}, {claim['arm']} {_level(treatment, claim)}"
    of = " of the excess over 1" if claim["transform"] == "log_excess" else ""
    return f"{both} (geometric means), ratio{of} {ratio:.3g} [{low:.3g}, {high:.3g}] ({confidence} interval)"


def _wider(claim: Mapping[str, Any]) -> str:
    """Say where the steps in which a metric moves make an interval wider than its differences do."""
    error, sds, sizes = claim["standard_error"], [claim["sd_difference"]], [claim["num_pairs"]]
    if claim["num_runs"]:
        sds, sizes = [claim["baseline_sd"], claim.get("treatment_sd")], claim["num_runs"]
    if error is None or None in sds or claim.get("unused_seeds"):
        return ""
    of_spread = math.hypot(*(sd / math.sqrt(size) for sd, size in zip(sds, sizes, strict=True)))
    is_wider = error > (1 + 1e-9) * of_spread
    return ", which allows for the steps in which the metric moves" if is_wider else ""


def _level(mean: float, claim: Mapping[str, Any]) -> str:
    transform: Transform = claim["transform"]
    with np.errstate(over="ignore"):
        return f"{np.exp(mean) + (transform == 'log_excess'):.4g}"


def _margin(claim: Mapping[str, Any]) -> str | None:
    """What the margin is a share of; on the scale of logarithms it is a factor by itself."""
    margin, base, climb = claim["margin"], claim["baseline_mean"], claim["climb"]
    if margin is None:
        return None
    if claim["transform"] != "identity":
        with np.errstate(over="ignore"):
            low, high = np.exp([-margin, margin])
        return f"margin ±{margin:.3g} is a factor of {low:.3g} to {high:.3g}"
    shares = [
        f"{_percent(margin / abs(of))} of the {name}"
        for name, of in (("level", base), ("climb", climb))
        if of
    ]
    return f"margin ±{margin:.3g} is {' and '.join(shares)}" if shares else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"


def step_noise_text(noise: Mapping[str, Any] | None) -> Iterator[str]:
    """Say what share of the variance over pairs is step-to-step noise, and what more steps would be worth."""
    if noise is None:
        return
    low, high = noise["interval"]
    worth, fewest, most = noise["worth_pairs"]
    yield (
        f"{noise['share']:.0%} [{low:.0%}, {high:.0%}] of the variance of paired differences is noise from "
        f"step to step: a window or a batch twice as large would be worth {worth:.1f} more pairs "
        f"[{fewest:.1f}, {most:.1f}]"
    )


def _spread(claim: Mapping[str, Any]) -> str | None:
    seeds, paired, of_treatment = claim["baseline_sd"], claim["sd_difference"], claim.get("treatment_sd")
    if seeds is None or paired is None:
        return None
    if claim["num_runs"]:
        return f"sd over the baseline's runs {seeds:.2g}, unpaired"
    unpaired = 0.0 if of_treatment is None else math.hypot(seeds, of_treatment)  # None: of an older record
    rounding = 1e-6 * unpaired  # of which no such factor says anything
    saved = f" ({unpaired / paired:.2g}x narrower than unpaired)" if rounding < paired < unpaired else ""
    return f"sd over seeds {seeds:.2g}, of the paired differences {paired:.2g}{saved}"
