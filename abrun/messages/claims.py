"""Sentences on the outcome of a claim. A record takes the values of a code; its text is the sentence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import (
    AT_OBSERVED,
    SCORES_TEXT,
    agreeing_seeds_text,
    arm_texts,
    bound_text,
    certified_text,
    confidence_text,
    count_text,
    counted,
    difference_and_seeds_text,
    difference_unit,
    interval_level_text,
    interval_text,
    pairs_or_more_text,
    sample_unit,
    text_near_limit,
)

MAX_MARGINS = 3  # named of those after looking
Detected = Mapping[str, Any] | None  # a difference whose interval excludes zero


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The outcome of a claim that was tested on a sample of two arms."""

    metric: str
    over: Mapping[str, Any]  # `pairs` (or the `runs` of both arms), `steps`, `window`, `recipe`, `welch`

    margin: str
    alpha: float
    warnings: Sequence[str]
    arm: str
    baseline_arm: str

    @property
    def sample(self) -> str:
        return _sample_text(self.over)

    @property
    def pair(self) -> str:
        """Unit on which the claim was tested: pairs of runs, or the prompts of two runs."""
        return "prompt" if self.over.get("unit") == "prompt" else "pair"

    @property
    def confidence(self) -> str:
        return confidence_text(self.alpha)

    @property
    def clauses(self) -> str:
        return "".join(f"; {warning}" for warning in self.warnings)

    def change(self, change: str) -> str:
        """Return a difference of named arms: `fused is 0.03 lower than plain`."""
        return _change(self.arm, self.baseline_arm, change)

    def agreeing_seeds(self, detected: Mapping[str, Any]) -> str:
        return agreeing_seeds_text(detected, self.arm, self.baseline_arm)

    def interval_text(self, interval: Sequence[float]) -> str:
        return f"{interval_level_text(self.alpha)} CI {interval_text(interval)}"


def _sample_text(over: Mapping[str, Any]) -> str:
    """Return the sample and the steps: `5 pairs of this recipe, steps 33-40`."""
    is_prompts = over.get("unit") == "prompt"
    steps = "-".join(map(str, over["steps"])) if over["steps"] else over["window"]
    window = SCORES_TEXT.get(over.get("axis", "")) or f"steps {steps}"
    if over["runs"] is None:
        runs = counted(over["pairs"], "prompt" if is_prompts else "pair")
    elif not over["runs"][0]:
        runs = count_text(over["runs"][1], "prompt" if is_prompts else "run")
    else:
        runs = f"{over['runs'][0]} and {over['runs'][1]} unpaired runs{' (Welch)' * over['welch']}"
    sample = f"{runs}{' of this recipe' * over['recipe']}"
    return sample if is_prompts else f"{sample}, {window}"


def _change(arm: str, baseline_arm: str, change: str) -> str:
    treatment, baseline = arm_texts(arm, baseline_arm)
    return f"{treatment} is {change} than {baseline}"


def _not_tested(metric, window, problem, detected, arm, baseline_arm) -> str:
    difference = ""
    if detected:
        change = _change(arm, baseline_arm, detected["direction"])
        difference = f"; yet {change}: {difference_and_seeds_text(detected, arm, baseline_arm)}"
    return f"{metric}: not tested over {window}: {problem}{difference}"


# --- equivalence ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Within(_Outcome):
    """The outcome of a claim that the arms differ by less than a margin."""

    margin_unit: str
    transform: str

    @property
    def margin_with_unit(self) -> str:
        """The margin with its scale; one in sigmas or percent names its unit itself."""
        return self.margin + difference_unit(self.transform) * (self.margin_unit == "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Equivalent(_Within):
    """The arms are equivalent within the margin."""

    detected: Detected
    certified_bound: float | None
    certified_number: float | None
    certified_jointly: float | None

    def __str__(self) -> str:
        bound = certified_text(self.certified_bound, self.certified_number, self.margin_unit)
        joint_bound = ""
        if self.certified_jointly is not None and self.certified_jointly != self.certified_bound:
            joint_bound = f"{bound_text(self.certified_jointly)} jointly with the other claims"
        equivalent = f"{self.metric}: equivalent within {self.margin_with_unit}"
        sample = f"at {self.confidence} confidence over {self.sample}"
        detected = self.detected
        if detected is None:
            joint_bound = f", {joint_bound}" if joint_bound else ""
            return f"{equivalent} {sample} (certified bound {bound}{joint_bound}){self.clauses}"
        unit = difference_unit(self.transform)
        change = self.change(f"{abs(detected['difference']):.3g}{unit} {detected['direction']}")
        joint_bound = f" ({joint_bound})" if joint_bound else ""
        return (
            f"{equivalent} {sample}, yet {change} {self.agreeing_seeds(detected)} "
            f"({self.interval_text(detected['interval'])}); any margin below {bound}{joint_bound} would not "
            f"have passed{self.clauses}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differs(_Within):
    """The arms differ by more than the margin."""

    detected: Detected
    difference: float
    interval: Sequence[float]
    p_beyond: float

    def __str__(self) -> str:
        direction = "lower" if self.difference < 0 else "higher"
        size = f"{abs(self.difference):.3g}{difference_unit(self.transform)} {direction}"
        agreement = f", {self.agreeing_seeds(self.detected)}" if self.detected else ""
        return (
            f"{self.metric}: {self.change(size)}, more than the margin {self.margin_with_unit}, over "
            f"{self.sample}{agreement} ({self.interval_text(self.interval)}; p = {self.p_beyond:.2g} if the "
            f"margin held, Holm-corrected){self.clauses}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undecided(_Within):
    """Neither equivalence nor a difference was shown."""

    difference: float
    interval: Sequence[float]
    certified_bound: float | None
    certified_number: float | None
    sd_difference: float
    pair_correlation: float | None
    power: Mapping[str, Any]  # the power now, and the pairs needed

    def __str__(self) -> str:
        return (
            f"{self.metric}: undecided over {self.sample}: {self.estimate}; {self.spread}; power now "
            f"{_power_now(self.power)}; {self.needed}{self.clauses}"
        )

    @property
    def estimate(self) -> str:
        bound = certified_text(self.certified_bound, self.certified_number, self.margin_unit)
        return (
            f"mean difference {self.difference:+.3g}{difference_unit(self.transform)} "
            f"({self.interval_text(self.interval)}), certified bound {bound} against {self.margin_with_unit}"
        )

    @property
    def spread(self) -> str:
        if self.over["runs"] is not None:
            return f"sd of the runs of an arm {self.sd_difference:.3g}"
        correlation = "undefined" if self.pair_correlation is None else f"{self.pair_correlation:.2f}"
        return (
            f"sd of the paired differences {self.sd_difference:.3g}, correlation within pairs {correlation}"
        )

    @property
    def needed(self) -> str:
        """The number of pairs that would decide if the arms are truly equal."""
        power, needed = self.power, "unknown"
        if power["pairs_needed_range"] is not None:
            low, high = map(pairs_or_more_text, power["pairs_needed_range"])
            point = pairs_or_more_text(power["pairs_needed"])
            needed = f"{point} {AT_OBSERVED} ({low} to {high} over its 90 % CI), if the arms are truly equal"
        if self.over["runs"] is None:
            return f"{self.pair}s needed for 80 % power: {needed}"
        paired = (
            f"pairing by seed would need about {pairs_or_more_text(power['pairs_if_shared'])} at a "
            f"correlation of {power['shared_correlation']}"
        )
        return f"runs of each arm needed for 80 % power: {needed}; {paired}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Detected(_Undecided):
    """A difference was detected, and may lie within the margin."""

    detected: Mapping[str, Any]
    p_difference: float
    significant: bool
    absolute_margin: float

    def __str__(self) -> str:
        return (
            f"{self.metric}: a difference {'was detected' if self.significant else 'is likely'} over "
            f"{self.sample} (p = {self.p_difference:.2g}, Holm-corrected): "
            f"{self.change(self.detected['direction'])} {self.agreeing_seeds(self.detected)}; undecided "
            f"whether the difference stays within the margin: {self.estimate}; {self.spread}; "
            f"{self.needed_for_the_observed}{self.clauses}"
        )

    @property
    def needed_for_the_observed(self) -> str:
        """The number of pairs that would decide if the true difference is the observed one."""
        if self.margin_unit == "sigma":
            return self.needed
        pairs = f"{self.pair}s" if self.over["runs"] is None else sample_unit(paired=False)
        if abs(self.difference) >= self.absolute_margin:
            return f"no number of {pairs} shows equivalence if the true difference is the observed one"
        needed = pairs_or_more_text(self.power["pairs_needed_observed"])
        return f"{pairs} needed for 80 % power: {needed}, if the true difference is the observed one"


def _power_now(power: Mapping[str, Any]) -> str:
    return "unknown" if power["power_now"] is None else f"{100 * power['power_now']:.0f} %"


def _margins_after_looking(margins: Sequence[Mapping[str, Any]], min_pairs: int) -> str:
    """Name the margins that bound the true difference although they are chosen after the data."""
    texts, has_several_arms = [], len({margin["arm"] for margin in margins}) > 1
    for margin in margins[:MAX_MARGINS]:
        sign, worse = ("±", "") if margin["kind"] == "within" else ("at most ", " worse")
        unit = difference_unit(margin["transform"]) + worse
        once, anytime = (f"{sign}{bound_text(margin[name])}{unit}" for name in ("once", "anytime"))
        repeated = f"{anytime} read at any number of pairs"
        if math.isinf(margin["anytime"]):
            repeated = f"none if read again (that needs {min_pairs} pairs that vary)"
        arm = f"{margin['arm']}: " * has_several_arms
        texts.append(f"{arm}{margin['metric']} {once} read once, {repeated}")
    if len(margins) > MAX_MARGINS:
        texts.append(f"and {len(margins) - MAX_MARGINS} more")
    return f"valid at 95 % though chosen now: {'; '.join(texts)}"


# --- limits ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limited(_Outcome):
    """The outcome of a claim that a quantity keeps a limit; `interval` is None for one pair."""

    measure: str
    limit: float
    limited: float | None
    interval: Sequence[float] | None
    detected: Detected

    @property
    def quantity(self) -> str:
        """The limited quantity with its value, such as `fused / plain is 0.94`."""
        treatment, baseline = arm_texts(self.arm, self.baseline_arm)
        ratio = f"{self.arm} / {self.baseline_arm}"
        quantity = {
            "ratio": ratio,
            "excess": f"{ratio} of the excess over 1",
            "spread": f"sd of {ratio}",
            "distance": f"the arms' distance, relative to how far {baseline} moved,",
        }.get(self.measure, f"the {self.measure} of {treatment}")
        value = "unknown" if self.limited is None else text_near_limit(self.limited, self.limit)
        return f"{quantity} is {value}"

    @property
    def value(self) -> str:
        """The quantity with its interval, and the difference of the arms if one was detected."""
        low, high = (text_near_limit(end, self.limit) for end in self.interval or ())
        value = f"{self.quantity}, {interval_level_text(self.alpha)} CI [{low}, {high}]"
        detected = self.detected
        if detected is None:
            return value
        if self.measure in ("ratio", "excess", "spread"):
            return f"{value}, {detected['direction']} {self.agreeing_seeds(detected)}"
        baseline = arm_texts(self.arm, self.baseline_arm)[1]
        difference = difference_and_seeds_text(detected, self.arm, self.baseline_arm)
        return f"{value}; {detected['direction']} than {baseline}: {difference}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitHolds(_Limited):
    p: float | None = None

    def __str__(self) -> str:
        p_value = "" if self.p is None else f"; p = {self.p:.2g} if the limit were not kept"
        return (
            f"{self.metric}: {self.margin} at {self.confidence} confidence over {self.sample} "
            f"({self.value}{p_value}){self.clauses}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitBroken(_Limited):
    p_beyond: float

    def __str__(self) -> str:
        margin = self.margin
        subject, _, rest = margin.partition(" ")
        broken = f"{subject} not {rest}" if subject in ("level", "sd") else f"not {margin}"
        p_value = f"p = {self.p_beyond:.2g} if the limit held, Holm-corrected"
        return f"{self.metric}: {broken} over {self.sample} ({self.value}; {p_value}){self.clauses}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitUndecided(_Limited):
    needed: int | None = None  # sample size for 80 % power if the true value is the observed one

    def __str__(self) -> str:
        head = f"{self.metric}: {self.margin}: undecided over {self.sample}"
        runs = self.over["runs"]
        unit = f"{self.pair}s" if runs is None else "runs of each arm" if runs[0] else "runs"
        if self.interval is None:
            return f"{head}: {self.quantity}; two {unit} are needed"
        if self.needed is None:
            needed = f"more {self.over.get('unit', 'seed')}s narrow the interval"
        else:
            needed = f"{unit} needed for 80 % power: {self.needed}, if the true value is the observed one"
        return f"{head}: {self.value}; {needed}{self.clauses}"


# --- one-sided outcomes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneSided(_Outcome):
    """The outcome of a claim that the treatment is better, or not worse, by a margin."""

    kind: str  # not_worse or better
    better: str  # the direction of an improvement
    transform: str
    difference: float
    interval: Sequence[float]
    detected: Detected

    @property
    def value(self) -> str:
        """The difference, with direction, judgement and seeds if its interval excludes zero."""
        unit, interval = difference_unit(self.transform), self.interval_text(self.interval)
        detected = self.detected
        if detected is None:
            return f"no difference detected, {self.difference:+.3g}{unit} ({interval})"
        judgement = "better" if detected["direction"] == self.better else "worse"
        size = f"{abs(self.difference):.3g}{unit} {detected['direction']} ({judgement})"
        return f"{size} {self.agreeing_seeds(detected)} ({interval})"


class _Passes(_OneSided):
    """The treatment is shown not to be worse, or to be better, by the margin."""

    def __str__(self) -> str:
        yet = "yet " * bool(self.detected and self.detected["direction"] != self.better)
        return (
            f"{self.metric}: {self.change(self.margin)}, at {self.confidence} confidence over {self.sample}: "
            f"{yet}{self.value}{self.clauses}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fails(_OneSided):
    """The treatment is shown to be worse by more than the margin, or not to be better by it."""

    p_beyond: float

    def __str__(self) -> str:
        margin = self.margin
        broken = margin.replace("at most", "more than", 1) if self.kind == "not_worse" else f"not {margin}"
        return (
            f"{self.metric}: {self.change(broken)}, over {self.sample}: {self.value}; "
            f"p = {self.p_beyond:.2g} if the claim held, Holm-corrected{self.clauses}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open(_OneSided):
    """Neither that the treatment keeps the margin nor that it breaks it is shown."""

    power: Mapping[str, Any]
    improvement: float

    def __str__(self) -> str:
        is_equal = self.kind == "not_worse"
        truth = "the arms are truly equal" if is_equal else f"the true gain is {self.improvement:.3g}"
        needed = pairs_or_more_text(self.power["pairs_needed"])
        return (
            f"{self.metric}: undecided whether {self.change(self.margin)}, over {self.sample}: {self.value}; "
            f"power now {_power_now(self.power)} if {truth}, "
            f"{sample_unit(paired=self.over['runs'] is None)} needed for 80 %: {needed}{self.clauses}"
        )


MESSAGES: dict[Code, Message] = {
    Code.CLAIM_EQUIVALENT: _Equivalent,
    Code.CLAIM_DIFFERS: _Differs,
    Code.CLAIM_DETECTED: _Detected,
    Code.CLAIM_UNDECIDED: _Undecided,
    Code.CLAIM_NOT_TESTED: _not_tested,
    Code.CLAIM_TOO_FEW_PAIRS: "{metric}: not tested: {pairs:count usable pair}, but equivalence needs at "
    "least two to estimate the spread (only step one, the guards and the divergence were checked)",
    Code.CLAIM_TOO_FEW_RUNS: "{metric}: not tested: equivalence needs at least two runs of each arm",
    Code.MARGINS_AFTER_LOOKING: _margins_after_looking,
    Code.CLAIM_PASSES: _Passes,
    Code.CLAIM_FAILS: _Fails,
    Code.CLAIM_OPEN: _Open,
    Code.LIMIT_HOLDS: _LimitHolds,
    Code.LIMIT_BROKEN: _LimitBroken,
    Code.LIMIT_UNDECIDED: _LimitUndecided,
    Code.EXACT_HOLDS: lambda metric, over: f"{metric}: bit-identical over {_sample_text(over)}",
    Code.EXACT_BROKEN: lambda metric, over, where: (
        f"{metric}: not bit-identical over {_sample_text(over)}: {where}"
    ),
}
