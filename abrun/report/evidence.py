"""Facts beside a verdict's claims, in one place for the terminal, markdown, the page and plans."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abrun.messages import sentence, sentences
from abrun.messages.numbers import difference_text, interval_level_text
from abrun.recorded.reference import REFERENCE_ARM as REFERENCE
from abrun.redaction import in_yaml
from abrun.report.injected import caught_sentence
from abrun.verdict.claims import ClaimResult
from abrun.verdict.decide import ArmSection
from abrun.verdict.description import Description
from abrun.verdict.divergence import Divergence, UlpGrowth
from abrun.verdict.final_weights import FinalWeights
from abrun.verdict.guards import Guard, Saving
from abrun.verdict.step_one import StepOne, share_of_scale
from abrun.verdict.validity import Coverage
from abrun.verdict.verdict_file import VerdictFile, of_arm

MOST_LEVELS = 2  # of an arm's claims; the page has all


def evidence(content: VerdictFile) -> Iterator[tuple[str, str]]:
    """The evidence beside the claims, a line each and arm."""
    for arm, section in content.arms.items():
        mark = f"{arm}, " if len(content.arms) > 1 else ""
        if mark:
            yield arm, section.verdict
        alone = of_arm(content, arm)
        yield from ((f"{mark}levels", one.text) for one in levels(alone)[:MOST_LEVELS])
        if section.treatment_diff:
            yield f"{mark}treatment", _differences(section.treatment_diff)
        shared = _shared_steps(content, section.coverage)
        if section.num_runs:
            both = f"{section.num_runs[0]} of {content.baseline} and {section.num_runs[1]} of {arm}"
            yield f"{mark}runs", f"{both}, unpaired; {shared}"
        else:
            yield f"{mark}pairs", f"{_pairs(section)}; {shared}"
            yield f"{mark}step one", _step_one(alone.step_one)
        if section.num_metrics and content.post_hoc:
            yield f"{mark}metrics", _metrics(alone.descriptions, section.num_metrics)
        yield f"{mark}guards", _guards(alone.guards)
        if not section.num_runs:
            yield f"{mark}divergence", _divergence(alone.divergence)
        yield from ((f"{mark}final weights", _final_weights(one)) for one in alone.final_weights)
        savings = "; ".join(_saving(one) for one in alone.savings if "," not in one.quantity)
        if savings:
            yield f"{arm} / {content.baseline}", savings
        taken = [analysis for analysis in section.interim_analyses if analysis.verdict]
        if section.interim_analyses:
            taken_text = (
                ", ".join(f"{analysis.num_pairs} pairs: {analysis.verdict}" for analysis in taken)
                or "none yet"
            )
            planned = ", ".join(str(analysis.num_pairs) for analysis in section.interim_analyses)
            yield f"{mark}interim analyses", f"declared at {planned} pairs; taken: {taken_text}"
    if content.sensitivity:
        yield "sensitivity", caught_sentence(content.sensitivity, paired=content.paired)
    if content.not_tested:
        yield "not tested", "; ".join(sentences(content.not_tested))
    for guess in content.guessed:
        yield "guessed", sentence(guess)
    if content.notes:
        more = f"; and {len(content.notes) - 3} more" if len(content.notes) > 3 else ""
        yield "notes", "; ".join(sentences(content.notes[:3])) + more


def _shared_steps(content: VerdictFile, coverage: Coverage) -> str:
    shared, everything = coverage.shared_steps, coverage.all_steps
    is_thinned = content.reference and content.baseline == REFERENCE and shared < everything
    why = " (a reference keeps every step of its claims' windows, and fewer outside)"
    return f"{shared} of {everything} steps shared{why * bool(is_thinned)}"


def _pairs(section: ArmSection) -> str:
    """Return how many pairs the verdict is over: with interim analyses, those of the last one taken."""
    if section.interim_analyses:
        return f"{section.num_pairs} compared, of {section.num_planned_pairs} planned"
    return f"{section.num_pairs} of {section.num_planned_pairs} finished"


def _metrics(described: Sequence[Description], counts: Sequence[int]) -> str:
    shown = [one.metric for one in described]
    more = counts[0] - len(shown)
    named = f": {', '.join(shown)}" + (f" and {more} more" if more > 0 else "")
    return f"{counts[0]} of {counts[1]} recorded in every run{named}"


def changes(treatment_diff: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return what a treatment changes, a clause for each key."""
    return [f"{key}: {in_yaml(old)} -> {in_yaml(new)}" for key, (old, new) in treatment_diff.items()]


def _differences(treatment_diff: Mapping[str, Sequence[Any]]) -> str:
    shown = changes(treatment_diff)
    return "; ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _step_one(checks: Sequence[StepOne]) -> str:
    if not checks:
        return "not read"
    failed = [one.metric for one in checks if one.result == "fail"]
    unsure = [one.metric for one in checks if one.result == "open"]
    untested = [one for one in checks if one.result == "not tested"]
    tested = [one for one in checks if one.result != "not tested"]
    state = (
        f"fails for {', '.join(failed)}"
        if failed
        else f"open for {', '.join(unsure)}"
        if unsure
        else f"{len(tested)} metric{'s' * (len(tested) > 1)} agree{'s' * (len(tested) == 1)}"
    )
    said = []
    if tested and not any(one.deviation for one in tested):
        said.append(f"{state} exactly")
    elif tested:
        said.append(f"{state}; {'of these ' * bool(untested)}the arms differ most in {_furthest(tested)}")
    if untested:
        more = f", and {len(untested) - 1} more" * (len(untested) > 1)
        said.append(f"not tested: {_furthest(untested)}{more}")
    return "; ".join(said)


def _furthest(checks: Sequence[StepOne]) -> str:
    """The metric closest to its tolerance, or furthest beyond it: it speaks for the rest."""
    one = max(checks, key=lambda one: one.deviation / one.tolerance)
    share = share_of_scale(one.deviation, one.scale, one.scale_from)
    return f"{one.metric}: by {share}, where {one.tolerance:.2g} is allowed ({one.tolerance_from})"


def _guards(guards: Sequence[Guard]) -> str:
    broken = [
        f"{one.guard}: {one.result}" for one in guards if one.result in ("fail", "baseline too", "open")
    ]
    passed = [
        f"{one.guard} (at its limit)" if one.limit and one.value == one.limit > 0 else one.guard
        for one in guards
        if one.result == "pass"
    ]
    return "; ".join([*broken, f"pass: {', '.join(passed)}"] if passed else broken)


def _divergence(divergences: Sequence[Divergence]) -> str:
    if not divergences:
        return "no finished pair"
    first = divergences[0]
    repeating = [one for one in divergences if one.noise_floor == "zero"]
    measured = [one for one in divergences[:3] if one.noise_floor == "measured"]
    said = [*map(_against_noise, measured), *([_repeats(repeating)] if repeating else [])]
    said = said or ["noise floor unknown (no A/A reruns)"]
    if first.ulp:
        said.append(f"{first.metric}: {_against_ulp(first.ulp)}")
    if first.share_of_seed_spread is not None:
        share = f"{first.share_of_seed_spread:.2g} of its spread over seeds"
        said.append(f"mean |difference| of {first.metric} {share}")
    return "; ".join(said)


def _against_ulp(grown: UlpGrowth) -> str:
    if grown.ratio is None:
        return "against what one ULP grows into: no ratio, as one of them is 0"
    interval = f" [{grown.ci95[0]:.2g}, {grown.ci95[1]:.2g}]" if grown.ci95 else ""
    return f"{grown.ratio:.2g}x{interval} what one ULP grows into"


def _repeats(divergences: Sequence[Divergence]) -> str:
    """Said once of all metrics of which reruns of the baseline are no distance away."""
    steps = [one.first_step_apart for one in divergences if one.first_step_apart is not None]
    treatment = "so does the treatment"
    if steps:
        first = min(steps)
        earliest = [one.metric for one in divergences if one.first_step_apart == first]
        more = f" and {len(earliest) - 1} more" if len(earliest) > 1 else ""
        treatment = f"the arms differ from step {first} on" + f" ({earliest[0]}{more})" * (
            len(divergences) > 1
        )
    of = f" in {len(divergences)} metrics" if len(divergences) > 1 else f" in {divergences[0].metric}"
    return f"reruns of the baseline repeat it bit for bit{of}; {treatment}"


def _against_noise(one: Divergence) -> str:
    return f"{one.metric}: {one.ratio:.2g}x the A/A noise floor"


def _final_weights(one: FinalWeights) -> str:
    equal = f"equal bit for bit in {one.num_equal} of {one.num_pairs} pairs"
    if one.num_equal == one.num_pairs or one.seed is None:
        return equal
    floor = one.aa_relative_difference
    against = "" if floor is None else f"; A/A: {floor:.2g}"
    grown = one.ulp_relative_difference
    against += "" if grown is None else f"; what one ULP grows into: {grown:.2g}"
    return (
        f"{equal}; distance {one.relative_difference:.2g} of the baseline's norm (seed {one.seed}"
        f"{against}); estimated from a sketch, within 8 %"
    )


def _saving(one: Saving) -> str:
    ci95 = one.ci95
    interval = f" [95 %: {ci95[0]:.3g}, {ci95[1]:.3g}]" if ci95 else ""
    return f"{one.quantity} {one.ratio:.3g}{interval}"


# --- levels of the arms in the windows of claims ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Levels of both arms in the window of a claim."""

    claim: int  # its place among verdict.json's claims
    arm: str
    where: str  # metric and steps
    means: str  # of both arms, with the reach of the interval
    beside: str  # the margin as a share of them, and the spreads; may be empty

    @property
    def text(self) -> str:
        return f"{self.where}: {self.means}{'; ' if self.beside else ''}{self.beside}"


def levels(content: VerdictFile) -> list[Levels]:
    """Of verdict.json's claims that have levels of both arms, in their order."""
    baseline = content.baseline
    found = []
    for index, claim in enumerate(content.claims):
        means = _means(claim, baseline)
        if means:
            steps = f", steps {claim.claim.steps[0]}-{claim.claim.steps[1]}" if claim.claim.steps else ""
            beside = "; ".join(filter(None, (_margin(claim), _spread(claim))))
            where = f"{claim.claim.metric}{steps}"
            found.append(Levels(claim=index, arm=claim.arm, where=where, means=means, beside=beside))
    return found


def _means(claim: ClaimResult, baseline: str) -> str | None:
    base, treatment, interval = (
        claim.estimate.baseline_mean,
        claim.estimate.treatment_mean,
        claim.estimate.interval,
    )
    if base is None or treatment is None or interval is None:
        return None
    difference = treatment - base
    confidence = interval_level_text(claim.claim.alpha)
    if claim.claim.transform == "identity":
        of = "difference" if claim.claim.num_runs else "paired difference"
        apart = f"{difference_text(difference, interval)} ({confidence} interval{_wider(claim)})"
        return f"{baseline} {base:.4g}, {claim.arm} {treatment:.4g}; {of} {apart}"
    with np.errstate(over="ignore"):
        low, ratio, high = np.exp([interval[0], difference, interval[1]])
    both = f"{baseline} {_level(base, claim)}, {claim.arm} {_level(treatment, claim)}"
    of = " of the excess over 1" if claim.claim.transform == "log_excess" else ""
    return f"{both} (geometric means), ratio{of} {ratio:.3g} [{low:.3g}, {high:.3g}] ({confidence} interval)"


def _wider(claim: ClaimResult) -> str:
    """Say where the steps in which a metric moves make an interval wider than its differences do."""
    error, sds, sizes = claim.estimate.standard_error, [claim.estimate.sd_difference], [claim.claim.num_pairs]
    if claim.claim.num_runs:
        sds, sizes = [claim.estimate.baseline_sd, claim.estimate.treatment_sd], claim.claim.num_runs
    known = [sd for sd in sds if sd is not None]
    if error is None or len(known) < len(sds):
        return ""
    of_spread = math.hypot(*(sd / math.sqrt(size) for sd, size in zip(known, sizes, strict=True)))
    is_wider = error > (1 + 1e-9) * of_spread
    return ", which allows for the steps in which the metric moves" if is_wider else ""


def _level(mean: float, claim: ClaimResult) -> str:
    with np.errstate(over="ignore"):
        return f"{np.exp(mean) + (claim.claim.transform == 'log_excess'):.4g}"


def _margin(claim: ClaimResult) -> str | None:
    """What the margin is a share of; on the scale of logarithms it is a factor by itself."""
    margin, base, climb = claim.claim.margin, claim.estimate.baseline_mean, claim.estimate.climb
    if margin is None:
        return None
    if claim.claim.transform != "identity":
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


def _spread(claim: ClaimResult) -> str | None:
    seeds, paired, of_treatment = (
        claim.estimate.baseline_sd,
        claim.estimate.sd_difference,
        claim.estimate.treatment_sd,
    )
    if seeds is None or paired is None:
        return None
    if claim.claim.num_runs:
        return f"sd over the baseline's runs {seeds:.2g}, unpaired"
    unpaired = 0.0 if of_treatment is None else math.hypot(seeds, of_treatment)  # None: of an older record
    rounding = 1e-6 * unpaired  # of which no such factor says anything
    saved = f" ({unpaired / paired:.2g}x narrower than unpaired)" if rounding < paired < unpaired else ""
    return f"sd over seeds {seeds:.2g}, of the paired differences {paired:.2g}{saved}"
