"""From evidence to a verdict and the sentences that carry it (verdict.md, rules 6 and 9)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import RecordedExperiment, Sides, no_shared_step_reason
from abrun.stats.equivalence import ALPHA
from abrun.stats.sequential import interim_levels
from abrun.verdict.claims import judge_equivalence, with_holm
from abrun.verdict.description import (
    Description,
    description_reasons,
    descriptions,
    no_shared_metric,
    num_metrics,
)
from abrun.verdict.divergence import Divergence, divergence
from abrun.verdict.final_weights import FinalWeights, final_weights
from abrun.verdict.guards import Guard, Saving, check_guards, measure_savings, num_tests, opposed
from abrun.verdict.limits import judge_limit
from abrun.verdict.margins import resolved_margin
from abrun.verdict.outcomes import outcome
from abrun.verdict.results import ClaimResult, ErrorRates
from abrun.verdict.step_one import StepOne, step_one
from abrun.verdict.untested import not_tested, step_one_unread
from abrun.verdict.validity import Coverage, coverage, differences, invalid_reasons

Verdict = Literal["MATCH", "MISMATCH", "INCONCLUSIVE", "INVALID"]
EXIT_CODES: dict[Verdict, int] = {"MATCH": 0, "MISMATCH": 3, "INCONCLUSIVE": 4, "INVALID": 5}
_WORST_FIRST: tuple[Verdict, ...] = ("INVALID", "MISMATCH", "INCONCLUSIVE", "MATCH")
_OPEN_GUARDS = ("baseline too", "open")
_SHOWN_FAULTS = 6  # of a kind of fault that every run may have


@dataclass(frozen=True, slots=True, kw_only=True)
class InterimAnalysis:
    """A verdict taken when that many pairs had ended, at its share of alpha."""

    num_pairs: int
    alpha: float  # of a match: its one-sided level
    alpha_difference: float  # of a mismatch by a claim, over all claims
    alpha_guards: float  # of a mismatch by a guard or step one
    verdict: Verdict | None = None  # None: not taken yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSection:
    """The verdict on one treatment as a whole."""

    verdict: Verdict
    reasons: list[Reason]
    not_tested: list[Reason]
    num_pairs: int  # finished pairs, of
    num_planned_pairs: int
    num_runs: tuple[int, int] | None  # finished ones of both arms, where they are not paired
    treatment_diff: dict[str, list[Any]]  # dotted key -> [baseline's value, the arm's]
    coverage: Coverage
    num_metrics: tuple[int, int] | None  # in every run, in any; None: something is claimed
    interim_analyses: list[InterimAnalysis]  # empty where none were declared: one verdict over all pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict(ArmSection):
    """One treatment against the baseline, with the evidence."""

    arm: str
    step_one: list[StepOne]
    divergence: list[Divergence]
    final_weights: list[FinalWeights]  # one; none where no finished pair says what it ended with
    descriptions: list[Description]  # of two runs, one of each arm; empty where there are more
    claims: list[ClaimResult]
    guards: list[Guard]
    savings: list[Saving]


def judge(
    experiment: RecordedExperiment,
    claims: Sequence[Claim],
    *,
    alpha: float = ALPHA,
    may_repeat: bool = False,
) -> list[ArmVerdict]:
    """Gather the evidence for every treatment and decide. Raises ComparisonError for a claim it cannot read.

    With interim analyses declared, the first that decides stands: each tests at a level of which all of
    them together err no more often than one verdict would (see abrun.stats.sequential). `alpha` is what a
    match, and what a mismatch, may err; `may_repeat`: arms that are bit-identical were expected to be.
    """
    margins = [
        resolved_margin(claim, experiment.reference) if claim.margin is not None else None for claim in claims
    ]
    may_repeat = may_repeat or any(claim.exact for claim in claims)
    arms = experiment.treatments
    planned = planned_analyses(experiment, len(claims), alpha)
    taken = [
        analysis for analysis in planned if all(_ended(experiment, arm, analysis) for arm in arms)
    ] or planned[:1]
    judged: dict[str, ArmVerdict] = {}
    analyses: dict[str, list[InterimAnalysis]] = {arm: [] for arm in arms}
    for analysis in taken:
        rates = ErrorRates(analysis.alpha, analysis.alpha_difference)
        results = []
        for arm in arms:
            sides = experiment.sides(arm, analysis.num_pairs)
            for claim, margin in zip(claims, margins, strict=True):
                grid = experiment.metric_steps(claim.metric)
                if margin:
                    result = judge_equivalence(arm, sides, claim, margin, grid, rates, may_repeat=may_repeat)
                else:
                    result = judge_limit(arm, sides, claim, grid, rates)
                results.append(result)
        results = with_holm(results)
        for arm in arms:
            if not analyses[arm] or analyses[arm][-1].verdict == "INCONCLUSIVE":
                of_arm = [result for result in results if result.arm == arm]
                judged[arm] = judge_arm(experiment, arm, claims, of_arm, analysis)
                analyses[arm].append(replace(analysis, verdict=judged[arm].verdict))
    if not experiment.compare.interim:
        return list(judged.values())
    return [
        replace(one, interim_analyses=[*analyses[arm], *planned[len(analyses[arm]) :]])
        for arm, one in judged.items()
    ]


def planned_analyses(
    experiment: RecordedExperiment, num_claims: int = 1, alpha: float = ALPHA
) -> list[InterimAnalysis]:
    """The declared interim analyses; where there are none, one at all pairs.

    Of the `alpha` in which equal arms may be called a mismatch, the guards and step one have the share that
    `guards.alpha` is of 5 %, the claims the rest. Each claim of each treatment has its part of that, before
    it is spread over them.
    """
    counts = experiment.compare.interim or [
        max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    ]
    for_guards = experiment.compare.guards.alpha * alpha / ALPHA
    family = max(1, num_claims * len(experiment.treatments))
    spending = experiment.compare.alpha_spending
    of_matches = interim_levels(counts, alpha, spending)
    of_mismatches = interim_levels(counts, (alpha - for_guards) / family, spending)
    return [
        InterimAnalysis(
            num_pairs=count,
            alpha=of_match,
            alpha_difference=family * of_mismatch,
            alpha_guards=for_guards / len(counts) / max(1, len(experiment.treatments)),
        )
        for count, of_match, of_mismatch in zip(counts, of_matches, of_mismatches, strict=True)
    ]


def _ended(experiment: RecordedExperiment, arm: str, analysis: InterimAnalysis) -> bool:
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
    """Return one treatment's verdict at one interim analysis, from its claims and all other evidence."""
    sides = experiment.sides(arm)  # what broke after the analysis is no less broken
    pairs, compare = experiment.pairs(arm), experiment.compare
    invalid = invalid_reasons(experiment, arm, analysis.num_pairs, claims)
    savings = measure_savings(arm, sides)
    windows = [(result.claim.metric, result.claim.steps) for result in results if result.claim.steps]
    tests = analysis.alpha_guards / num_tests(compare)
    excused = pairs if sides.paired else opposed(sides)
    guards = check_guards(arm, excused, sides, compare.guards, savings, windows, tests)
    first_steps = step_one(arm, pairs, compare, tests, analysis.num_pairs)
    unread = step_one_unread(experiment, arm, first_steps)
    first_steps = [] if unread else first_steps
    diverged = divergence(arm, pairs, claims)
    ended = final_weights(arm, pairs)
    verdict, reasons = decide(
        invalid,
        first_steps,
        guards,
        results,
        reads_step_one=unread is None,
        recorded=experiment.metrics(),
        apart=no_shared_step_reason([run for pair in pairs for run in (pair.baseline, pair.treatment)]),
        has_recipe=experiment.has_recipe,
    )
    described = descriptions(experiment, arm, claims)
    if described or not (claims or experiment.launched_compare_sha256):
        verdict, reasons = _as_described(experiment, sides, described, verdict, reasons)
    if verdict == "INVALID":  # the numbers stay to be looked at, the claims must not
        results = [replace(result, result="not tested") for result in results]
    return ArmVerdict(
        arm=arm,
        verdict=verdict,
        reasons=reasons,
        not_tested=not_tested(experiment, sides, claims, first_steps, diverged, unread),
        num_pairs=sum(pair.finished for pair in pairs[: analysis.num_pairs]),
        num_planned_pairs=len(pairs),
        num_runs=None if sides.paired else sides.finished.sizes,
        treatment_diff=differences(experiment, arm),
        coverage=coverage(sides),
        num_metrics=None if claims or not described else num_metrics(sides),
        step_one=first_steps,
        divergence=diverged,
        final_weights=[ended] if ended else [],
        descriptions=described,
        claims=list(results),
        guards=guards,
        savings=savings,
        interim_analyses=[],
    )


def _as_described(
    experiment: RecordedExperiment,
    sides: Sides,
    described: Sequence[Description],
    verdict: Verdict,
    reasons: Sequence[Reason],
) -> tuple[Verdict, list[Reason]]:
    """What is said of arms that are described: without a claim, or with one run each, nothing is tested."""
    if experiment.launched_compare_sha256 is None:
        instead = Code.NO_CLAIM() if described else no_shared_metric(sides)
        reasons = [instead if reason.code == Code.NOTHING_CLAIMED else reason for reason in reasons]
    one_each = described and max(sides.finished.sizes) == 1
    if one_each and (verdict == "INCONCLUSIVE" or (verdict != "INVALID" and not sides.paired)):
        verdict, reasons = "INCONCLUSIVE", [Code.ONE_RUN_EACH(), *reasons]
    if described and verdict == "INCONCLUSIVE":
        reasons = [*description_reasons(described, experiment.baseline), *reasons]
    return verdict, list(reasons)


def decide(
    invalid: Sequence[Reason],
    first_steps: Sequence[StepOne],
    guards: Sequence[Guard],
    claims: Sequence[ClaimResult],
    *,
    reads_step_one: bool = True,
    recorded: Sequence[str] = (),
    apart: Reason | None = None,
    has_recipe: bool = True,
) -> tuple[Verdict, list[Reason]]:
    """The verdict of one arm and why: invalid before mismatch before inconclusive before match.

    `recorded`: the metrics of all runs; `apart` says that the arms share no step, where that is so.
    """
    if invalid:
        return "INVALID", _shortened(invalid)
    crashed = any(guard.guard == "finished" and guard.result == "fail" for guard in guards)
    if reads_step_one and not first_steps and not crashed:
        return "INVALID", [apart or Code.FIRST_STEP_MISSING(recorded=recorded)]
    outcomes = [(result, outcome(result, has_recipe=has_recipe)) for result in claims]
    wrong = [
        *(Code.STEP_ONE_DIFFERS(**_deviation(first)) for first in first_steps if first.result == "fail"),
        *(
            Code.GUARD_FAILS(guard=guard.guard, reason=guard.reason)
            for guard in guards
            if guard.result == "fail"
        ),
        *(reason for result, reason in outcomes if result.result == "different"),
    ]
    if wrong:
        return "MISMATCH", wrong
    open_questions = [
        *(Code.STEP_ONE_OPEN(**_deviation(first)) for first in first_steps if first.result == "open"),
        *(
            Code.GUARD_OPEN(guard=guard.guard, reason=guard.reason, result=guard.result)
            for guard in guards
            if guard.result in _OPEN_GUARDS
        ),
        *(reason for result, reason in outcomes if result.result not in ("equivalent", "holds")),
    ]
    if not claims:
        open_questions.append(Code.NOTHING_CLAIMED())
    if open_questions:
        return "INCONCLUSIVE", open_questions
    return "MATCH", [reason for _, reason in outcomes]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=_WORST_FIRST.index)


def _deviation(first: StepOne) -> dict[str, Any]:
    """Return the values of a reason that names a first step."""
    names = ("metric", "baseline", "treatment", "step", "seed", "deviation", "scale", "scale_from")
    return {name: getattr(first, name) for name in (*names, "tolerance", "tolerance_from")}


def _shortened(reasons: Sequence[Reason]) -> list[Reason]:
    """The first few; one mistake often shows in every run and every key."""
    unique = list(dict.fromkeys(reasons))
    more = len(unique) - _SHOWN_FAULTS
    return unique if more <= 0 else [*unique[:_SHOWN_FAULTS], Code.MORE_FAULTS(num=more)]
