"""Verdict of each treatment from its evidence, with the reasons for it (docs/explanation/verdict.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from abrun.logs.recorded.experiment import (
    RecordedExperiment,
    RecordedRun,
    Sides,
    has_prompts_as_units,
    no_shared_step_reason,
    select_units,
)
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, is_one_sided
from abrun.recipe.faults import ONE_ULP
from abrun.runs.metric_names import MEMORY_PEAK, TOKEN_MULT_PROB_ERROR
from abrun.stats.equivalence import ALPHA
from abrun.stats.sequential import interim_levels
from abrun.verdict.claims import apply_holm, apply_holm_to_passes, judge_equivalence
from abrun.verdict.description import (
    count_metrics,
    describe_metrics,
    description_reasons,
    far_apart_reason,
    no_shared_metric_reason,
)
from abrun.verdict.divergence import measure_divergence
from abrun.verdict.evidence import Evidence, Kind, select_evidence
from abrun.verdict.final_weights import compare_final_weights
from abrun.verdict.guards import (
    MetricWindow,
    check_guards,
    count_tests,
    measure_savings,
    pair_with_all_baselines,
    shared_memory_metrics,
    shared_peak_counter,
)
from abrun.verdict.limits import counts_failures, has_diverged, judge_limit
from abrun.verdict.machines import INITIAL_WEIGHTS, code_notes, has_treated_machine
from abrun.verdict.margins import resolve_margin
from abrun.verdict.new_run import measure_new_run, new_run_reasons
from abrun.verdict.outcomes import outcome_reason
from abrun.verdict.results import ClaimResult, ErrorRates
from abrun.verdict.sensitivity import are_identical, learning_metrics
from abrun.verdict.spare_runs import NO_SPARE_RUNS, find_spare_runs
from abrun.verdict.step_one import (
    RAISED_BY_ROUNDING,
    check_step_one,
    first_step_unread_reason,
    has_shared_prompts,
)
from abrun.verdict.validity import Coverage, find_treatment_diff, invalid_reasons, measure_coverage

# MATCH and MISMATCH if the arms are claimed to agree, PASS and FAIL if every claim is one-sided.
# DESCRIPTION: nothing was claimed, so nothing is decided
Verdict = Literal["MATCH", "PASS", "MISMATCH", "FAIL", "INCONCLUSIVE", "INVALID", "DESCRIPTION"]
EXIT_CODES: dict[Verdict, int] = {
    "MATCH": 0,
    "PASS": 0,
    "DESCRIPTION": 0,
    "MISMATCH": 3,
    "FAIL": 3,
    "INCONCLUSIVE": 4,
    "INVALID": 5,
}
PASSING: tuple[Verdict, ...] = ("MATCH", "PASS")
FAILING: tuple[Verdict, ...] = ("MISMATCH", "FAIL")
_WORST_FIRST: tuple[Verdict, ...] = ("INVALID", *FAILING, "INCONCLUSIVE", "DESCRIPTION", *PASSING)
_UNDECIDED_GUARDS = ("baseline too", "open")
_MAX_FAULTS = 6  # reasons shown; one mistake often shows in every run


@dataclass(frozen=True, slots=True, kw_only=True)
class InterimAnalysis:
    """A verdict taken when `num_pairs` pairs had ended, at its share of alpha."""

    num_pairs: int
    alpha: float  # one-sided alpha of a match
    alpha_difference: float  # familywise alpha of a mismatch by a claim
    alpha_guards: float  # alpha of a mismatch by a guard or step one
    verdict: Verdict | None = None  # None: not yet analysed


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSection:
    """The verdict on one treatment."""

    verdict: Verdict
    reasons: list[Reason]
    not_tested: list[Reason]
    num_pairs: int  # finished pairs
    num_planned_pairs: int
    num_runs: tuple[int, int] | None  # unpaired: finished runs of each arm
    treatment_diff: dict[str, list[Any]]  # dotted key -> [baseline's value, the arm's]
    coverage: Coverage
    num_metrics: tuple[int, int] | None  # recorded by every run, by any run; None with claims
    interim_analyses: list[InterimAnalysis]  # empty if none were declared


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict(ArmSection):
    """One treatment against the baseline, with the evidence."""

    arm: str
    claims: list[ClaimResult]
    evidence: list[Evidence]

    def select(self, kind: Kind) -> list[Evidence]:
        """Return the evidence of one kind."""
        return select_evidence(self.evidence, kind)


def judge(
    experiment: RecordedExperiment,
    claims: Sequence[Claim],
    *,
    alpha: float | None = None,
    may_repeat: bool = False,
) -> list[ArmVerdict]:
    """Gather the evidence for every treatment and decide. Raises ComparisonError for an unusable claim.

    With interim analyses, the first that decides stands. Their levels keep the familywise error of all of
    them at that of one verdict (see abrun.stats.sequential). `alpha` is the error rate of a match, and also
    that of a mismatch; by default that of the comparison. `may_repeat`: bit-identical arms were expected.
    """
    alpha = experiment.compare.alpha if alpha is None else alpha
    may_repeat = may_repeat or any(claim.exact for claim in claims)
    arms = experiment.treatments
    planned = planned_analyses(experiment, len(claims), alpha)
    due_analyses = [
        analysis for analysis in planned if all(_has_ended(experiment, arm, analysis) for arm in arms)
    ] or planned[:1]
    judged: dict[str, ArmVerdict] = {}
    analyses: dict[str, list[InterimAnalysis]] = {arm: [] for arm in arms}
    for analysis in due_analyses:
        results = judge_claims(experiment, claims, analysis, may_repeat=may_repeat)
        for arm in arms:
            if not analyses[arm] or analyses[arm][-1].verdict == "INCONCLUSIVE":
                arm_verdict = judge_arm(experiment, arm, claims, results[arm], analysis)
                judged[arm] = _add_new_runs(experiment, claims, arm_verdict)
                analyses[arm].append(replace(analysis, verdict=judged[arm].verdict))
    if not experiment.compare.interim:
        return list(judged.values())
    return [
        replace(verdict, interim_analyses=[*analyses[arm], *planned[len(analyses[arm]) :]])
        for arm, verdict in judged.items()
    ]


def judge_claims(
    experiment: RecordedExperiment,
    claims: Sequence[Claim],
    analysis: InterimAnalysis,
    *,
    may_repeat: bool = False,
) -> dict[str, list[ClaimResult]]:
    """Return the results of all claims by treatment at one analysis, corrected over all treatments.

    Of a single arm, only claims on its level are tested.
    """
    rates = ErrorRates(analysis.alpha, analysis.alpha_difference)
    tested, arms = [], experiment.treatments or (experiment.baseline,)
    for arm in arms:
        sides = experiment.sides(arm, analysis.num_pairs)
        for claim in claims:
            claim_sides, grid = select_units(sides, claim.metric), experiment.metric_steps(claim.metric)
            unit = "seed" if claim_sides is sides else "prompt"
            if arm == experiment.baseline:
                result = judge_limit(arm, claim_sides, claim, grid, rates)
            elif claim.difference_kind is not None:
                margin = resolve_margin(claim, experiment.reference)
                # Without a declared treatment, nothing says that the numbers have to change
                undeclared = not find_treatment_diff(experiment, arm)
                spare = NO_SPARE_RUNS if unit == "prompt" else find_spare_runs(experiment, arm, sides)
                result = judge_equivalence(
                    *(arm, claim_sides, claim, margin, grid, rates),
                    may_repeat=may_repeat or undeclared,
                    spare=spare,
                )
                if undeclared and not result.problem and are_identical(claim_sides.finished):
                    further = (warning for warning in result.warnings if warning.code != Code.BOUND_OF_ZERO)
                    result = replace(result, warnings=(Code.ARMS_IDENTICAL(declared=False), *further))
            else:
                result = judge_limit(arm, claim_sides, claim, grid, rates)
            tested.append(result.over_scores(sides.axis, unit))
    corrected = apply_holm(tested)
    results = {arm: [result for result in corrected if result.arm == arm] for arm in arms}
    if experiment.compare.require == "any":
        return {arm: apply_holm_to_passes(arm_results) for arm, arm_results in results.items()}
    return results


def planned_analyses(
    experiment: RecordedExperiment, num_claims: int = 1, alpha: float = ALPHA
) -> list[InterimAnalysis]:
    """Return the declared interim analyses; without any, a single analysis at all pairs.

    `alpha` is the familywise error rate of calling equal arms a mismatch. Guards and step one get the
    share that `guards.alpha` is of 5 %, the claims the rest. Each claim of each treatment gets an equal
    part of that rest, which is then spread over the interim analyses. If one claim suffices, each treatment's
    claims share `alpha` likewise: Holm's correction divides their level again.
    """
    counts = experiment.compare.interim or [
        max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    ]
    guard_alpha = experiment.compare.guards.alpha * alpha / ALPHA
    family_size = max(1, num_claims * len(experiment.treatments))
    spending = experiment.compare.spending
    num_sharing = max(1, num_claims) if experiment.compare.require == "any" else 1
    match_levels = interim_levels(counts, alpha / num_sharing, spending)
    mismatch_levels = interim_levels(counts, (alpha - guard_alpha) / family_size, spending)
    return [
        InterimAnalysis(
            num_pairs=count,
            alpha=num_sharing * match_level,
            alpha_difference=family_size * mismatch_level,
            alpha_guards=guard_alpha / len(counts) / max(1, len(experiment.treatments)),
        )
        for count, match_level, mismatch_level in zip(counts, match_levels, mismatch_levels, strict=True)
    ]


def _has_ended(experiment: RecordedExperiment, arm: str, analysis: InterimAnalysis) -> bool:
    pairs = experiment.pairs(arm)[: analysis.num_pairs]
    runs = [run for pair in pairs for run in (pair.baseline, pair.treatment)]
    return len(pairs) >= analysis.num_pairs and all(run.finished or run.status == "failed" for run in runs)


def judge_arm(
    experiment: RecordedExperiment,
    arm: str,
    claims: Sequence[Claim],
    results: Sequence[ClaimResult],
    analysis: InterimAnalysis,
) -> ArmVerdict:
    """Return one treatment's verdict at one analysis, from its claims' results and all other evidence."""
    # All runs: a failure after this analysis still counts.
    sides, pairs, compare = experiment.sides(arm), experiment.pairs(arm), experiment.compare
    invalid = invalid_reasons(experiment, arm, analysis.num_pairs, claims)
    left_out = [reason for reason in invalid if reason.code == Code.SEEDS_NOT_SHARED]
    invalid = [reason for reason in invalid if reason not in left_out]
    savings, test_alpha = measure_savings(arm, sides), analysis.alpha_guards / count_tests(compare)
    windows = [(result.claim.metric, result.claim.steps) for result in results if result.claim.steps]
    guards = _check_guards(experiment, arm, claims, windows, savings, test_alpha)
    first_steps = check_step_one(arm, pairs, compare, test_alpha, analysis.num_pairs)
    unread_reason = step_one_unread_reason(experiment, arm, first_steps)
    first_steps = [] if unread_reason else first_steps
    described = describe_metrics(experiment, arm, claims)
    evidence = [*described, *guards, *first_steps, *measure_divergence(arm, pairs, claims)]
    evidence += [*compare_final_weights(arm, pairs), *savings]
    verdict, reasons = decide_verdict(
        invalid,
        evidence,
        results,
        reads_step_one=unread_reason is None,
        recorded=experiment.metrics(),
        no_shared_step=no_shared_step_reason([run for pair in pairs for run in pair.runs]),
        has_recipe=experiment.has_recipe,
        baseline_arm=experiment.baseline,
        require=compare.require,
    )
    if described and verdict == "INVALID" and not (claims or experiment.launched_compare_sha256):
        # Nothing is decided, so that the rest can be described
        verdict, reasons = "INCONCLUSIVE", [*reasons, Code.NOTHING_CLAIMED()]
    if described or not (claims or experiment.launched_compare_sha256):
        verdict, reasons = _add_description_reasons(experiment, sides, described, verdict, reasons)
    reasons += left_out
    if verdict in PASSING and (far_apart := far_apart_reason(sides, _claimed_metrics(sides, claims))):
        reasons.append(far_apart)
    reasons += [Code.PROMPTS_AS_UNITS()] if has_prompts_as_units(sides) else []
    if verdict == "INVALID":  # INVALID runs keep their numbers, but no claim is tested
        results = [replace(result, result="not tested") for result in results]
    return ArmVerdict(
        arm=arm,
        verdict=verdict,
        reasons=reasons,
        not_tested=list_not_tested(experiment, sides, results, claims, evidence, unread_reason),
        num_pairs=sum(pair.finished for pair in pairs[: analysis.num_pairs]),
        num_planned_pairs=len(pairs),
        num_runs=None if sides.paired else sides.finished.sizes,
        treatment_diff=find_treatment_diff(experiment, arm),
        coverage=measure_coverage(sides),
        num_metrics=None if claims or not described else count_metrics(sides),
        claims=list(results),
        evidence=evidence,
        interim_analyses=[],
    )


def _check_guards(
    experiment: RecordedExperiment,
    arm: str,
    claims: Sequence[Claim],
    windows: Sequence[MetricWindow],
    savings: Sequence[Evidence],
    alpha: float,
) -> list[Evidence]:
    """Check the guards. Runs that diverge are the result of a claim that counts them, and no guard's."""
    sides, limits = experiment.sides(arm), experiment.compare.guards
    pairs = experiment.pairs(arm) if sides.paired else pair_with_all_baselines(sides)
    if not counts_failures(claims):
        return check_guards(arm, pairs, sides, limits, savings, windows, alpha)
    pairs = [pair for pair in pairs if not has_diverged(pair.treatment)]
    guards = check_guards(arm, pairs, sides, limits, savings, windows, alpha)
    return [guard for guard in guards if guard["guard"] != "finished"]


def _add_description_reasons(
    experiment: RecordedExperiment,
    sides: Sides,
    described: Sequence[Evidence],
    verdict: Verdict,
    reasons: Sequence[Reason],
) -> tuple[Verdict, list[Reason]]:
    """Add the description to the reasons of arms without a claim, or with one run each: nothing is tested."""
    if experiment.launched_compare_sha256 is None:
        no_claim_reason = Code.NO_CLAIM() if described else no_shared_metric_reason(sides)
        reasons = [no_claim_reason if reason.code == Code.NOTHING_CLAIMED else reason for reason in reasons]
    one_run_per_arm = described and max(sides.finished.sizes) == 1 and not has_prompts_as_units(sides)
    if one_run_per_arm and (verdict == "INCONCLUSIVE" or (verdict != "INVALID" and not sides.paired)):
        verdict, reasons = "INCONCLUSIVE", [Code.ONE_RUN_EACH(), *reasons]
    if described and verdict == "INCONCLUSIVE":
        reasons = [*description_reasons(described, experiment.baseline), *reasons]
    return verdict, list(reasons)


def _add_new_runs(experiment: RecordedExperiment, claims: Sequence[Claim], judged: ArmVerdict) -> ArmVerdict:
    """Add the place of a single run among several, which says more than the difference from their mean."""
    new_runs = measure_new_run(experiment, judged.arm, claims)
    judged = replace(judged, evidence=[*new_runs, *judged.evidence])
    if not new_runs or judged.verdict == "INVALID":
        return judged
    replaced = (Code.DESCRIBED, Code.OTHER_METRICS, Code.ONE_RUN_EACH)
    reasons = [reason for reason in judged.reasons if reason.code not in replaced]
    return replace(judged, reasons=[*new_run_reasons(new_runs), *reasons])


def decide_verdict(
    invalid: Sequence[Reason],
    evidence: Sequence[Evidence],
    claims: Sequence[ClaimResult],
    *,
    reads_step_one: bool = True,
    recorded: Sequence[str] = (),
    no_shared_step: Reason | None = None,
    has_recipe: bool = True,
    baseline_arm: str = "baseline",
    require: Literal["all", "any"] = "all",
) -> tuple[Verdict, list[Reason]]:
    """Return the verdict on one arm with its reasons: INVALID before MISMATCH, INCONCLUSIVE and MATCH.

    If every claim is one-sided, FAIL and PASS instead of MISMATCH and MATCH. `recorded` are the metrics of
    all runs; `no_shared_step` is the reason if the arms share no step.
    """
    if invalid:
        return "INVALID", _shorten_reasons(invalid)
    failed_guards = [guard for guard in select_evidence(evidence, "guard") if guard.result == "fail"]
    crashed = any(guard["guard"] == "finished" for guard in failed_guards)
    crashed |= any(result.estimate.diverged is not None for result in claims)
    if reads_step_one and not select_evidence(evidence, "step one") and not crashed:
        return "INVALID", [no_shared_step or Code.FIRST_STEP_MISSING(recorded=recorded)]
    outcomes = [
        (result, outcome_reason(result, has_recipe=has_recipe, baseline_arm=baseline_arm))
        for result in claims
    ]
    all_one_sided = bool(claims) and all(
        is_one_sided(result.claim.kind, result.claim.metric) for result in claims
    )
    holding, broken, still_open = _sort_outcomes(outcomes, require)
    failing, undecided, passed_over = _sort_checks(evidence, claims)
    if failing or broken:
        return ("FAIL" if all_one_sided else "MISMATCH"), [*failing, *broken, *passed_over]
    open_questions = [*undecided, *still_open, *([] if claims else [Code.NOTHING_CLAIMED()])]
    if open_questions:
        return "INCONCLUSIVE", [*open_questions, *passed_over]
    return ("PASS" if all_one_sided else "MATCH"), [*holding, *passed_over]


def _sort_checks(
    evidence: Sequence[Evidence], claims: Sequence[ClaimResult]
) -> tuple[list[Reason], list[Reason], list[Reason]]:
    """Return the reasons of step one and of guards that fail, that are open, and that decide no claim.

    A reward of another definition decides claims on that reward alone.
    """
    failing, undecided, passed_over = [], [], []
    claimed = {result.claim.metric for result in claims}
    for check in select_evidence(evidence, "step one"):
        if check.reason is None:
            continue  # it passes, or is not tested
        if check.result == "open":
            undecided.append(check.reason)
        else:
            is_passed_over = check.result == "redefined" and check["metric"] not in claimed
            (passed_over if is_passed_over else failing).append(check.reason)
    for guard in select_evidence(evidence, "guard"):
        values = {"guard": guard["guard"], "reason": guard.reason}
        if guard.result == "fail":
            failing.append(Code.GUARD_FAILS(**values))
        elif guard.result in _UNDECIDED_GUARDS:
            undecided.append(Code.GUARD_OPEN(**values, result=guard.result))
    return failing, undecided, passed_over


def _sort_outcomes(
    outcomes: Sequence[tuple[ClaimResult, Reason]], require: Literal["all", "any"]
) -> tuple[list[Reason], list[Reason], list[Reason]]:
    """Return the reasons of claims that hold, that are broken, and that are open, as far as they decide.

    If one claim suffices, all must be broken for a mismatch, and none is open once one holds: all others then
    follow those that hold.
    """
    holds = [result.result in ("equivalent", "holds") for result, _ in outcomes]
    holding = [reason for (_, reason), held in zip(outcomes, holds, strict=True) if held]
    remaining = [reason for (_, reason), held in zip(outcomes, holds, strict=True) if not held]
    broken = [reason for result, reason in outcomes if result.result == "different"]
    if require == "all":
        return holding, broken, remaining
    if holding:
        return [*holding, *remaining], [], []
    return [], broken if len(broken) == len(outcomes) else [], remaining


def worst_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=_WORST_FIRST.index)


def _shorten_reasons(reasons: Sequence[Reason]) -> list[Reason]:
    """Return the first few distinct reasons; one mistake often shows in every run and every key."""
    unique = list(dict.fromkeys(reasons))
    num_hidden = len(unique) - _MAX_FAULTS
    return unique if num_hidden <= 0 else [*unique[:_MAX_FAULTS], Code.MORE_FAULTS(num=num_hidden)]


# Limits of a comparison: what a reader might believe was tested, and was not.


def step_one_unread_reason(
    experiment: RecordedExperiment, arm: str, first_steps: Sequence[Evidence]
) -> Reason | None:
    """Return why step one says nothing about the treatment; None if it does."""
    if experiment.axis != "steps":
        return Code.FIRST_STEP_OF_SCORES()
    if not experiment.compare.paired:
        return Code.FIRST_STEP_NOT_PAIRED()
    if not experiment.compare.step_one:
        option = "compare.step_one: false" if experiment.has_recipe else "--no-step-one"
        return Code.FIRST_STEP_OFF(option=option)
    if has_treated_machine(experiment, arm):
        if experiment.regression:
            return Code.FIRST_STEP_OTHER_REFERENCE()
        return Code.FIRST_STEP_OTHER_VERSIONS()
    pairs = experiment.pairs(arm)
    if pairs and all(pair.has_restarted_counter for pair in pairs):
        return Code.FIRST_STEP_COUNTED_ANEW()
    if not first_steps and experiment.launched_compare_sha256 is None:
        return first_step_unread_reason(experiment.pairs(arm), experiment.metrics())
    checks = [check for check in first_steps if check["sampled_anew"] or check.result != "not tested"]
    differing = [check for check in checks if check.result not in ("pass", "redefined")]
    if not differing or has_shared_prompts(experiment.pairs(arm)):
        return None
    worst = max(differing, key=lambda check: check["deviation"])
    return Code.PROMPTS_NOT_KNOWN(
        metric=worst["metric"],
        baseline=experiment.baseline,
        baseline_value=worst["baseline"],
        arm=arm,
        value=worst["treatment"],
        step=worst["step"],
        seed=worst["seed"],
        hashes=experiment.has_recipe,
    )


def _claimed_metrics(sides: Sides, claims: Sequence[Claim]) -> set[str]:
    """Return the metrics under claims; a claim on `memory` covers the peaks of all phases."""
    claimed = {claim.metric for claim in claims}
    runs = sides.finished.runs
    counter = shared_peak_counter(runs) if MEMORY_PEAK in claimed else None
    return claimed | {*(shared_memory_metrics(runs, counter) if counter else ())}


def list_not_tested(
    experiment: RecordedExperiment,
    sides: Sides,
    results: Sequence[ClaimResult],
    claims: Sequence[Claim],
    evidence: Sequence[Evidence],
    step_one_unread: Reason | None,
) -> list[Reason]:
    """Return what a reader might believe was tested, and was not."""
    begun = [run for run in sides.runs if run.status != "pending"]
    # Missing and unreadable runs are reported as INVALID.
    runs = [run for run in begun if run.status not in ("missing", "unreadable")]
    steps = experiment.all_steps()
    num_unclaimed = len({*experiment.metrics()} - _claimed_metrics(sides, claims))
    reasons = [*experiment.left_out]
    reasons += _note_unsettled(evidence, has_recipe=experiment.has_recipe)
    reasons += [*_note_unrecorded(runs, sides), *([Code.OTHER_CODE()] if code_notes(experiment) else [])]
    if step_one_unread:
        reasons.append(Code.STEP_ONE_NOT_READ(why=step_one_unread))
    reasons += _note_unmeasured_token_error(runs)
    if not sides.paired:
        shared = {run.name.seed for run in sides.baselines} & {run.name.seed for run in sides.treatments}
        reasons.append(Code.NOT_PAIRED(num_shared_seeds=len(shared) if experiment.seeds_known else 0))
    if any(run.trains_on_recording for run in runs):
        reasons.append(Code.SAMPLER_NOT_TESTED())
    reasons += _note_unused_seeds(experiment, sides, results)
    reasons += [
        Code.ULP_RUN_NOT_FINISHED(run=str(run), why=run.failure or run.status)
        for name, run in experiment.controls.items()
        if experiment.injected[name.arm].name == ONE_ULP and not run.finished
    ]
    if any(row["noise_floor"] == "unknown" for row in select_evidence(evidence, "divergence")):
        reasons.append(Code.NO_RERUNS(has_recipe=experiment.has_recipe))
    baselines = [run for run in runs if run.name.arm == experiment.baseline]
    if baselines and claims and not learning_metrics(baselines):
        reasons.append(Code.LEARNING_NOT_RECORDED())
    num_clean = len(sides.finished.treatments)
    if num_clean and num_clean == len(sides.treatments):
        rate = 1 - ALPHA ** (1 / num_clean)
        reasons.append(Code.RARE_FAILURES(num_runs=num_clean, paired=sides.paired, rate=rate))
    if claims and all(claim.margin is None for claim in claims):
        reasons.append(Code.NO_MARGIN())
    unlearned = [claim.metric for claim in claims if not claim.climbs]
    if unlearned and experiment.axis == "steps":
        reasons.append(Code.LEARNING_NOT_CHECKED(metrics=unlearned))
    launched = experiment.launched_compare_sha256 is not None and not experiment.regression
    if claims and launched and all(injected.name == ONE_ULP for injected in experiment.injected.values()):
        faults = experiment.describe_arm_faults()
        reasons.append(Code.NO_FAULT_INJECTED(faults=faults, can_inject=experiment.can_inject))
    if claims and num_unclaimed > 0:
        reasons.append(Code.METRICS_WITHOUT_CLAIM(num_metrics=num_unclaimed))
    if experiment.axis != "steps":
        reasons.append(Code.OTHER_SCORES())
    elif len(steps):
        reasons.append(
            Code.OTHER_CONDITIONS(first=steps[0], last=steps[-1], has_recipe=experiment.has_recipe)
        )
    return reasons


def _note_unsettled(evidence: Sequence[Evidence], *, has_recipe: bool) -> Iterator[Reason]:
    """Yield the metrics whose first step neither agrees nor shows a fault."""
    checks = select_evidence(evidence, "step one")
    unsettled = [check for check in checks if check.result == "not tested"]
    size = ("metric", "seed", "deviation", "scale", "scale_from", "tolerance", "tolerance_from")
    for check in unsettled:
        if not check["sampled_anew"]:
            values = {name: check[name] for name in size}
            is_raised = check["metric"] in RAISED_BY_ROUNDING
            yield Code.STEP_ONE_NOT_SETTLED(**values, raised_by_rounding=is_raised, has_recipe=has_recipe)
    if sampled_metrics := [check["metric"] for check in unsettled if check["sampled_anew"]]:
        yield Code.COMPLETIONS_SAMPLED_ANEW(metrics=sampled_metrics)


def _note_unmeasured_token_error(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    values = [run.series(TOKEN_MULT_PROB_ERROR).values for run in runs]
    if all(TOKEN_MULT_PROB_ERROR not in run.metrics for run in runs):
        yield Code.TOKEN_ERROR_NOT_MEASURED(metric=TOKEN_MULT_PROB_ERROR, recorded=False)
    elif not any(np.isfinite(curve).any() for curve in values):
        yield Code.TOKEN_ERROR_NOT_MEASURED(metric=TOKEN_MULT_PROB_ERROR, recorded=True)


def _note_unused_seeds(
    experiment: RecordedExperiment, sides: Sides, results: Sequence[ClaimResult]
) -> Iterator[Reason]:
    """Yield the seeds of a reference that the later runs do not have, and no claim uses without a partner."""
    seeds = {run.name.seed for run in sides.treatments}
    warnings = [warning for result in results for warning in result.warnings]
    used = {
        seed for warning in warnings if warning.code == Code.SEEDS_WITHOUT_PAIR for seed in warning["seeds"]
    }
    if experiment.regression and sides.paired and seeds:
        unused_seeds = sorted(experiment.arm(experiment.baseline).keys() - seeds - used)
        if unused_seeds:
            yield Code.REFERENCE_SEEDS_UNUSED(seeds=unused_seeds)


def _note_unrecorded(runs: Sequence[RecordedRun], sides: Sides) -> list[Reason]:
    is_unrecorded = {
        "exit status": any(run.status == "unknown" for run in runs),
        "configurations": any(run.config is None for run in runs),
        "package versions and devices": any(not (run.environment or {}).get("versions") for run in runs),
    }
    if sides.paired:
        for name, key in (("prompts", "prompts_sha256"), ("initial weights", INITIAL_WEIGHTS)):
            is_unrecorded[name] = any(not (run.environment or {}).get(key) for run in runs)
    unrecorded = [name for name, is_unknown in is_unrecorded.items() if runs and is_unknown]
    return [Code.RUNS_DO_NOT_SAY(missing=unrecorded)] if unrecorded else []
