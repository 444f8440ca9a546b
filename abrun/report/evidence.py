"""The evidence of a verdict as labelled lines, for the terminal, Markdown, the page and plans."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abrun.logs.recorded.reference import REFERENCE_ARM as REFERENCE
from abrun.messages import sentence, sentences
from abrun.messages.numbers import (
    deviation_text,
    difference_text,
    interval_level_text,
    more_text,
)
from abrun.report.injected import caught_sentence
from abrun.runs.redaction import yaml_text
from abrun.verdict.claims import ClaimResult
from abrun.verdict.decide import ArmSection
from abrun.verdict.description import Description
from abrun.verdict.divergence import Divergence, UlpGrowth
from abrun.verdict.final_weights import FinalWeights
from abrun.verdict.guards import Guard, Saving
from abrun.verdict.step_one import StepOne
from abrun.verdict.validity import Coverage
from abrun.verdict.verdict_file import VerdictFile, select_arm

MAX_LEVELS = 2  # per arm; the page has all


def evidence_lines(content: VerdictFile) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each kind of evidence and arm, other than the claims."""
    for arm, section in content.arms.items():
        label_prefix = f"{arm}, " if len(content.arms) > 1 else ""
        if label_prefix:
            yield arm, section.verdict
        arm_content = select_arm(content, arm)
        yield from ((f"{label_prefix}levels", level.text) for level in claim_levels(arm_content)[:MAX_LEVELS])
        if section.treatment_diff:
            yield f"{label_prefix}treatment", _treatment_text(section.treatment_diff)
        shared_steps = f"; {_shared_steps_text(content, section.coverage)}" * (content.axis == "steps")
        if section.num_runs:
            run_counts = f"{section.num_runs[0]} of {content.baseline} and {section.num_runs[1]} of {arm}"
            yield f"{label_prefix}runs", f"{run_counts}, unpaired{shared_steps}"
        else:
            yield f"{label_prefix}pairs", f"{_pairs_text(section)}{shared_steps}"
            if content.axis == "steps":
                yield f"{label_prefix}step one", _step_one_text(arm_content.step_one)
        if section.num_metrics and content.post_hoc:
            yield f"{label_prefix}metrics", _metrics_text(arm_content.descriptions, section.num_metrics)
        yield f"{label_prefix}guards", _guards_text(arm_content.guards)
        if not section.num_runs and content.axis == "steps":
            yield f"{label_prefix}divergence", _divergence_text(arm_content.divergence)
        if content.trace and content.trace.arm == arm:
            yield f"{label_prefix}trace", sentence(content.trace.reason)
        for weights in arm_content.final_weights:
            yield f"{label_prefix}final weights", _final_weights_text(weights)
        savings = [_saving_text(saving) for saving in arm_content.savings if "," not in saving.quantity]
        if savings:
            yield f"{label_prefix}cost", f"{arm} relative to {content.baseline}: {'; '.join(savings)}"
        if analyses := section.interim_analyses:
            planned = ", ".join(str(analysis.num_pairs) for analysis in analyses)
            completed = [f"{done.num_pairs} pairs: {done.verdict}" for done in analyses if done.verdict]
            text = f"declared at {planned} pairs; taken: {', '.join(completed) or 'none yet'}"
            yield f"{label_prefix}interim analyses", text
    if content.sensitivity:
        yield "sensitivity", caught_sentence(content.sensitivity, paired=content.paired)
    if content.not_tested:
        yield "not tested", "; ".join(sentences(content.not_tested))
    for guess in content.guessed:
        yield "guessed", sentence(guess)
    if content.notes:
        omitted = [f"and {len(content.notes) - 3} more"] * (len(content.notes) > 3)
        yield "notes", "; ".join([*sentences(content.notes[:3]), *omitted])


def _shared_steps_text(content: VerdictFile, coverage: Coverage) -> str:
    num_shared, num_all = coverage.shared_steps, coverage.all_steps
    is_thinned = content.reference and content.baseline == REFERENCE and num_shared < num_all
    explanation = " (the reference keeps all steps in the windows of its claims, and fewer outside)"
    return f"{num_shared} of {num_all} steps shared{explanation * bool(is_thinned)}"


def _pairs_text(section: ArmSection) -> str:
    """Return the number of pairs judged: with interim analyses, those of the last completed one."""
    if section.interim_analyses:
        return f"{section.num_pairs} compared, of {section.num_planned_pairs} planned"
    return f"{section.num_pairs} of {section.num_planned_pairs} finished"


def _metrics_text(described: Sequence[Description], num_metrics: Sequence[int]) -> str:
    num_in_every_run, num_in_any_run = num_metrics
    metrics = ", ".join(description.metric for description in described)
    omitted = more_text(num_in_every_run - len(described))
    return f"{num_in_every_run} of {num_in_any_run} recorded in every run: {metrics}{omitted}"


def describe_changes(treatment_diff: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return a `key: old -> new` text for each key that a treatment changes."""
    return [f"{key}: {yaml_text(old)} -> {yaml_text(new)}" for key, (old, new) in treatment_diff.items()]


def _treatment_text(treatment_diff: Mapping[str, Sequence[Any]]) -> str:
    changes = describe_changes(treatment_diff)
    return "; ".join(changes[:4]) + more_text(len(changes) - 4)


def _step_one_text(checks: Sequence[StepOne]) -> str:
    if not checks:
        return "not checked"
    failed_metrics = [check.metric for check in checks if check.result in ("fail", "redefined")]
    open_metrics = [check.metric for check in checks if check.result == "open"]
    untested = [check for check in checks if check.result == "not tested"]
    tested = [check for check in checks if check.result != "not tested"]
    state = f"{len(tested)} metric{'s' * (len(tested) > 1)} agree{'s' * (len(tested) == 1)}"
    if failed_metrics:
        is_redefined = any(check.result == "redefined" for check in checks)
        state = f"fails for {', '.join(failed_metrics)}{' (another definition)' * is_redefined}"
    elif open_metrics:
        state = f"undecided for {', '.join(open_metrics)}"
    clauses = []
    if tested and not any(check.deviation for check in tested):
        clauses.append(f"{state} exactly")
    elif tested:
        clauses.append(f"{state}; largest deviation: {_largest_deviation_text(tested)}")
    if untested:
        omitted = f", and {len(untested) - 1} more" * (len(untested) > 1)
        clauses.append(f"not tested: {_largest_deviation_text(untested)}{omitted}")
    return "; ".join(clauses)


def _largest_deviation_text(checks: Sequence[StepOne]) -> str:
    """Return the deviation that is largest relative to its tolerance."""
    check = max(checks, key=lambda check: check.deviation / check.tolerance)
    share = deviation_text(check.deviation, check.scale, check.scale_from)
    return f"{check.metric}, {share}; tolerance {check.tolerance:.2g} ({check.tolerance_from})"


def _guards_text(guards: Sequence[Guard]) -> str:
    results = ("fail", "baseline too", "open")
    broken = [f"{guard.guard}: {guard.result}" for guard in guards if guard.result in results]
    passed = [
        f"{guard.guard} (at its limit)" if guard.limit and guard.value == guard.limit > 0 else guard.guard
        for guard in guards
        if guard.result == "pass"
    ]
    return "; ".join([*broken, f"pass: {', '.join(passed)}"] if passed else broken) or "not checked"


def _divergence_text(divergences: Sequence[Divergence]) -> str:
    if not divergences:
        return "not measured: finished pairs share no step of a claimed metric or of a step-one metric"
    main = divergences[0]
    repeating = [divergence for divergence in divergences if divergence.noise_floor == "zero"]
    measured = [divergence for divergence in divergences[:3] if divergence.noise_floor == "measured"]
    clauses = [f"{metric.metric}: {metric.ratio:.2g}x the A/A noise floor" for metric in measured]
    clauses += [_bitwise_reruns_text(repeating)] if repeating else []
    clauses = clauses or ["unknown noise floor (no A/A reruns)"]
    if main.ulp:
        clauses.append(f"{main.metric}: {_ulp_text(main.ulp)}")
    if main.share_of_seed_spread is not None:
        share = f"{main.share_of_seed_spread:.2g}x its sd over seeds"
        clauses.append(f"over all steps, the mean |difference| of {main.metric} at a step is {share}")
    return "; ".join(clauses)


def _ulp_text(growth: UlpGrowth) -> str:
    if growth.ratio is None:
        return "no ratio to the divergence caused by one ULP, as one of the two is 0"
    interval = f" [{growth.ci95[0]:.2g}, {growth.ci95[1]:.2g}]" if growth.ci95 else ""
    return f"{growth.ratio:.2g}x{interval} the divergence caused by one ULP"


def _bitwise_reruns_text(divergences: Sequence[Divergence]) -> str:
    """Return one clause for all metrics in which baseline reruns are bit-identical."""
    divergence_steps = [(metric.first_step_apart, metric.metric) for metric in divergences]
    steps = [step for step, _ in divergence_steps if step is not None]
    is_one = len(divergences) == 1
    treatment = "so is the treatment"
    if steps:
        earliest = [metric for step, metric in divergence_steps if step == min(steps)]
        where = "" if is_one else f", in {earliest[0]}{more_text(len(earliest) - 1)}"
        treatment = f"the arms first differ at step {min(steps)}{where}"
    metrics = divergences[0].metric if is_one else f"{len(divergences)} metrics"
    return f"baseline reruns are bit-identical in {metrics}; {treatment}"


def _final_weights_text(weights: FinalWeights) -> str:
    equal_text = f"bit-identical in {weights.num_equal} of {weights.num_pairs} pairs"
    if weights.num_equal == weights.num_pairs or weights.seed is None:
        return equal_text
    controls = {"A/A": weights.aa_relative_difference, "one ULP": weights.ulp_relative_difference}
    distances = [
        f"; {name} {difference:.2g}" for name, difference in controls.items() if difference is not None
    ]
    return (
        f"{equal_text}; relative distance {weights.relative_difference:.2g} (seed {weights.seed}"
        f"{''.join(distances)}); estimated from a sketch, within 8 %"
    )


def _saving_text(saving: Saving) -> str:
    interval = f" [95 % CI {saving.ci95[0]:.3g}, {saving.ci95[1]:.3g}]" if saving.ci95 else ""
    return f"{saving.quantity} {saving.ratio:.3g}x{interval}"


# --- levels of the arms in the windows of claims ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The levels of both arms in the window of a claim, as text."""

    claim: int  # index into verdict.json's claims
    arm: str
    where: str  # metric and steps
    means: str  # of both arms, with the difference and its interval
    details: str  # the margin as a share of the level, and the spreads; may be empty

    @property
    def text(self) -> str:
        return f"{self.where}: {self.means}{'; ' if self.details else ''}{self.details}"


def claim_levels(content: VerdictFile) -> list[Levels]:
    """Return the levels for each claim that has them in both arms, in the order of verdict.json."""
    levels = []
    for index, claim in enumerate(content.claims):
        terms, means = claim.claim, _means_text(claim, content.baseline)
        if means:
            where = terms.metric + (f", steps {terms.steps[0]}-{terms.steps[1]}" if terms.steps else "")
            details = "; ".join(filter(None, (_margin_text(claim), _spread_text(claim))))
            levels.append(Levels(claim=index, arm=claim.arm, where=where, means=means, details=details))
    return levels


def _means_text(claim: ClaimResult, baseline: str) -> str | None:
    terms, estimate = claim.claim, claim.estimate
    base, treatment, interval = estimate.baseline_mean, estimate.treatment_mean, estimate.interval
    if base is None or treatment is None or interval is None:
        return None
    difference = treatment - base
    confidence = interval_level_text(terms.alpha)
    if terms.transform == "identity":
        qualifier = "difference" if terms.num_runs else "paired difference"
        size = f"{difference_text(difference, interval)} ({confidence} CI{_wider_interval_text(claim)})"
        return f"{baseline} {base:.4g}, {claim.arm} {treatment:.4g}; {qualifier} {size}"
    with np.errstate(over="ignore"):
        low, ratio, high = np.exp([interval[0], difference, interval[1]])
    both = f"{baseline} {_level_text(base, claim)}, {claim.arm} {_level_text(treatment, claim)}"
    qualifier = " of the excess over 1" if terms.transform == "log_excess" else ""
    ratio_text = f"ratio{qualifier} {ratio:.3g} [{low:.3g}, {high:.3g}] ({confidence} CI)"
    return f"{both} (geometric means), {ratio_text}"


def _wider_interval_text(claim: ClaimResult) -> str:
    """Return a note if discrete values of the metric make the interval wider than its differences do."""
    terms, estimate = claim.claim, claim.estimate
    error, sds, sizes = estimate.standard_error, [estimate.sd_difference], [terms.num_pairs]
    if terms.num_runs:
        sds, sizes = [estimate.baseline_sd, estimate.treatment_sd], terms.num_runs
    known_sds = [sd for sd in sds if sd is not None]
    if error is None or len(known_sds) < len(sds):
        return ""
    spread_error = math.hypot(*(sd / math.sqrt(size) for sd, size in zip(known_sds, sizes, strict=True)))
    is_wider = error > (1 + 1e-9) * spread_error
    return ", widened because the metric takes discrete values" if is_wider else ""


def _level_text(mean: float, claim: ClaimResult) -> str:
    with np.errstate(over="ignore"):
        return f"{np.exp(mean) + (claim.claim.transform == 'log_excess'):.4g}"


def _margin_text(claim: ClaimResult) -> str | None:
    """Return the margin as a share of the level and climb, or as a factor if the claim is on a log scale."""
    terms, margin = claim.claim, claim.claim.margin
    if not margin:  # unknown, or `better: 0`
        return None
    number = f"{margin:.3g}" if terms.margin_unit else f"{terms.margin_number:g}"
    margin_text = f"{'±' if terms.kind == 'within' else ''}{number}"
    if terms.transform != "identity":
        with np.errstate(over="ignore"):
            low, high = np.exp([-margin, margin])
        return f"margin {margin_text} is a factor of {low:.3g} to {high:.3g}"
    shares = []
    quantities = {"the baseline's level": claim.estimate.baseline_mean, "its climb": claim.estimate.climb}
    for name, quantity in quantities.items():
        if quantity:
            share = margin / abs(quantity)
            shares.append(
                f"{100 * share:.0f} % of {name}" if share >= 1 else f"{100 * share:.2g} % of {name}"
            )
    return f"margin {margin_text} is {' and '.join(shares)}" if shares else None


def _spread_text(claim: ClaimResult) -> str | None:
    estimate = claim.estimate
    baseline_sd, paired_sd, treatment_sd = (
        estimate.baseline_sd,
        estimate.sd_difference,
        estimate.treatment_sd,
    )
    if baseline_sd is None or paired_sd is None:
        return None
    if claim.claim.num_runs:
        return f"sd over the baseline's runs {baseline_sd:.3g}, unpaired"
    # Records of older versions have no sd of the treatment.
    unpaired_sd = 0.0 if treatment_sd is None else math.hypot(baseline_sd, treatment_sd)
    text = f"sd over {claim.claim.unit}s {baseline_sd:.3g}, sd of the paired differences {paired_sd:.3g}"
    # A smaller paired sd is rounding, and a ratio to it means nothing.
    if 1e-6 * unpaired_sd < paired_sd < unpaired_sd:
        ratio = f"{unpaired_sd / paired_sd:.2g}x below that of unpaired differences"
        text += f", {ratio} ({unpaired_sd:.3g})"
    return text
