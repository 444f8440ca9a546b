"""Status of every recipe of a fleet, at a false discovery rate over the recipes that were not red before."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from abrun.messages.codes import Code, Reason
from abrun.stats.equivalence import ALPHA
from abrun.stats.many_tests import benjamini_hochberg, p_of_failures
from abrun.tools.drift.fleet.evidence import FleetNoise, Judgement, RecipeEvidence, fit_noise
from abrun.verdict.decide import FAILING, PASSING

Status = Literal["regressed here", "not judged", "open", "flaked", "red before", "green"]
# Most urgent first: the order of the rows
STATUSES: tuple[Status, ...] = ("regressed here", "not judged", "open", "flaked", "red before", "green")
EXIT_CODES: dict[Status, int] = {"regressed here": 3, "not judged": 5, "open": 4}  # 0 for the others
# Shares of a recipe's level: tests of its claims and guards, and the number of its failed runs
_TESTS_SHARE, _FAILURES_SHARE = 0.8, 0.2
# Weight of the prior guess that runs rarely fail by accident: half an accident in as many runs
_PRIOR_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRow:
    """A recipe's row of an earlier fleet."""

    status: Status
    is_red: bool  # at the false discovery rate of that fleet, or red before it
    reference_sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow:
    """One recipe: its status and why."""

    name: str
    status: Status
    reason: Reason
    verdict: str | None  # of the recipe alone; None: not judged
    is_red: bool  # by itself, and not gone on a rerun
    p_value: float | None  # of the recipe alone; None: nothing was tested
    adjusted_p: float | None  # smallest false discovery rate at which it is red; None: not in the family
    num_runs: int
    num_rerun: int
    rerun_verdict: str | None
    reference_sha256: str | None
    report: Path | None  # page of the recipe's own report, relative to the fleet's


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All recipes, most urgent first."""

    rows: list[FleetRow]
    num_tested: int  # recipes in the family of the false discovery rate
    failure_rate: float  # estimated probability that a run fails by accident

    @property
    def counts(self) -> Counter[Status]:
        return Counter(row.status for row in self.rows)

    @property
    def exit_code(self) -> int:
        """Exit code of the most urgent status that has one; 0 if nothing regressed here or is undecided."""
        return next((EXIT_CODES[status] for status in EXIT_CODES if self.counts[status]), 0)


@dataclass(frozen=True, slots=True)
class _Chance:
    """Causes of red recipes that are chance: the noise of claims, and runs that fail by accident."""

    noise: FleetNoise
    failure_rate: float

    def p_of_tests(self, judgement: Judgement) -> float | None:
        """Return the level at which a test of claims or guards is red (Bonferroni over the claims)."""
        p_values = [(claim.share, self.noise.p_beyond(claim)) for claim in judgement.claims]
        tested = [(share, p_value) for share, p_value in p_values if p_value is not None]
        levels = [p_value * len(tested) / share for share, p_value in tested]
        levels += [] if judgement.p_guards is None else [judgement.p_guards]
        return min([1.0, *filter(math.isfinite, levels)]) if levels else None

    def p_of(self, recipe: RecipeEvidence) -> float | None:
        """Return the p-value of a recipe before the correction for many recipes; None if nothing was tested.

        Bonferroni over two parts: the tests of its claims and guards, and the number of its failed runs,
        which accidents explain at the fleet's rate.
        """
        judgement = recipe.judgement
        if judgement is None:
            return None
        if judgement.breaks_exact_rule:
            return 0.0
        p_of_tests = self.p_of_tests(judgement)
        parts = [] if p_of_tests is None else [p_of_tests / _TESTS_SHARE]
        if judgement.failed_seeds:
            num_failed, num_runs = len(judgement.failed_seeds), judgement.num_runs
            if recipe.rerun:
                num_failed += len(recipe.rerun.failed_seeds)
                num_runs += recipe.num_rerun
            parts.append(p_of_failures(num_failed, num_runs, self.failure_rate) / _FAILURES_SHARE)
        return min(1.0, *parts) if parts else None

    def is_red(self, judgement: Judgement) -> bool:
        p_value = self.p_of_tests(judgement)
        is_beyond = p_value is not None and p_value <= ALPHA
        return judgement.verdict in FAILING or bool(judgement.failed_seeds) or is_beyond

    def passes(self, judgement: Judgement) -> bool:
        """Return True if the recipe matches, or its single run is within the margins by the fleet's noise."""
        if judgement.verdict != "INCONCLUSIVE":
            return judgement.verdict in PASSING
        return (
            judgement.is_single_run
            and not judgement.is_open_apart_from_claims
            and all(self.noise.p_within(claim) <= ALPHA for claim in judgement.claims)
        )

    def cause(self, judgement: Judgement) -> Reason:
        """Return why a recipe is red or open."""
        reason = judgement.reasons[0]
        if judgement.verdict in FAILING or judgement.failed_seeds or not judgement.claims:
            return reason
        claim = min(judgement.claims, key=lambda claim: self.noise.p_beyond(claim) or 1.0)
        if claim.difference is None or not (self.is_red(judgement) or judgement.is_single_run):
            return reason
        assert claim.margin is not None
        return Code.FLEET_DIFFERENCE(
            metric=claim.metric,
            difference=claim.difference * claim.margin,
            margin=claim.margin,
            p=self.noise.p_beyond(claim),
            runs=judgement.num_runs,
        )


def classify(evidence: Sequence[RecipeEvidence], earlier: Mapping[str, EarlierRow] | None = None) -> Fleet:
    """Decide the status of every recipe.

    A recipe is red at a false discovery rate of 5 % (Benjamini-Hochberg) over all recipes that were not red
    before. Recipes that an earlier fleet showed to be red leave that family first: they would otherwise
    loosen the bound for the others. A red recipe with a rerun needs the rerun to be red as well, and a
    recipe with a single run needs a rerun.
    """
    earlier = earlier or {}
    judgements = [recipe.judgement for recipe in evidence if recipe.judgement]
    noise = fit_noise(claim for judgement in judgements for claim in judgement.claims)
    chance = _Chance(noise, estimate_failure_rate(evidence))
    p_values = {
        recipe.name: chance.p_of(recipe)
        for recipe in evidence
        if not _was_red(recipe, earlier) and not (recipe.judgement and recipe.judgement.reference_problem)
    }
    tested = {name: p_value for name, p_value in p_values.items() if p_value is not None}
    adjusted = dict(zip(tested, benjamini_hochberg(list(tested.values())), strict=True))
    rows = [_make_row(recipe, earlier, chance, adjusted) for recipe in evidence]
    rows.sort(key=lambda row: (STATUSES.index(row.status), row.name))
    return Fleet(rows=rows, num_tested=len(tested), failure_rate=chance.failure_rate)


def estimate_failure_rate(evidence: Sequence[RecipeEvidence]) -> float:
    """Estimate the probability that a run fails by accident, mostly from the fleet itself.

    Accidents are failures that went away in another attempt or a rerun, and those of a single run among
    several of its recipe. Recipes with more failures say nothing about accidents and are left out.
    """
    num_accidents, num_runs = 0, 0
    for recipe in evidence:
        if recipe.judgement is None:
            continue
        num_failed = len(recipe.judgement.failed_seeds)
        is_gone = recipe.rerun is not None and not recipe.rerun.failed_seeds
        is_single = num_failed == 1 < recipe.judgement.num_runs and recipe.rerun is None
        if num_failed == 0 or is_gone or is_single:
            num_accidents += num_failed + len(recipe.retried)
            num_runs += recipe.judgement.num_runs + len(recipe.retried) + recipe.num_rerun
    return (num_accidents + 0.5) / (num_runs + _PRIOR_RUNS)


def _was_red(recipe: RecipeEvidence, earlier: Mapping[str, EarlierRow]) -> bool:
    """Return True if the earlier fleet showed the recipe to be red against the same reference."""
    row = earlier.get(recipe.name)
    return row is not None and row.is_red and row.reference_sha256 == recipe.reference_sha256


def _make_row(
    recipe: RecipeEvidence, earlier: Mapping[str, EarlierRow], chance: _Chance, adjusted: Mapping[str, float]
) -> FleetRow:
    judgement = recipe.judgement
    status, reason = "not judged", recipe.problem
    adjusted_p = adjusted.get(recipe.name)
    if judgement is not None:
        was_red = _was_red(recipe, earlier)
        status, reason = _decide_status(recipe, judgement, chance, adjusted_p, was_red=was_red)
    assert reason is not None
    return FleetRow(
        name=recipe.name,
        status=status,
        reason=reason,
        verdict=judgement and judgement.verdict,
        is_red=judgement is not None and status != "flaked" and chance.is_red(judgement),
        p_value=chance.p_of(recipe),
        adjusted_p=adjusted_p,
        num_runs=judgement.num_runs if judgement else 0,
        num_rerun=recipe.num_rerun,
        rerun_verdict=recipe.rerun and recipe.rerun.verdict,
        reference_sha256=recipe.reference_sha256,
        report=judgement and judgement.report,
    )


def _decide_status(
    recipe: RecipeEvidence, judgement: Judgement, chance: _Chance, adjusted_p: float | None, *, was_red: bool
) -> tuple[Status, Reason]:
    cause, passes, is_red = chance.cause(judgement), chance.passes(judgement), chance.is_red(judgement)
    if judgement.reference_problem and not passes:
        return "red before", Code.FLEET_REFERENCE_RED(problem=judgement.reference_problem)
    if passes and recipe.retried:
        attempt, num_more = recipe.retried[0], len(recipe.retried) - 1
        return "flaked", Code.FLEET_GONE_ON_RETRY(attempt=attempt, num_more=num_more)
    if passes:
        return "green", Code.FLEET_REPAIRED(cause=cause) if was_red else cause
    if is_red and recipe.rerun and chance.passes(recipe.rerun):
        return "flaked", Code.FLEET_GONE_ON_RERUN(cause=cause, num_runs=recipe.num_rerun)
    if is_red and was_red:
        return "red before", Code.FLEET_RED_EARLIER(cause=cause)
    if not is_red:
        return ("not judged" if judgement.verdict == "INVALID" else "open"), cause
    if recipe.rerun_problem:
        return "open", Code.FLEET_RERUN_UNREADABLE(cause=cause, problem=recipe.rerun_problem)
    if adjusted_p is None or adjusted_p > ALPHA or (judgement.is_single_run and recipe.rerun is None):
        return "open", _undecided_reason(recipe, judgement, cause, adjusted_p)
    if recipe.rerun is None:
        return "regressed here", _with_direction(judgement, cause)
    if chance.is_red(recipe.rerun):
        cause = Code.FLEET_RED_ON_RERUN(cause=cause, num_runs=recipe.num_rerun)
        return "regressed here", _with_direction(judgement, cause)
    return "open", Code.FLEET_RERUN_OPEN(cause=cause, rerun=chance.cause(recipe.rerun))


def _with_direction(judgement: Judgement, cause: Reason) -> Reason:
    """Return the cause, and that the change is for the better if all claims that moved are."""
    beyond = [claim for claim in judgement.claims if abs(claim.difference or 0.0) > 1]
    is_other_evidence = judgement.failed_seeds or judgement.breaks_exact_rule
    if beyond and not is_other_evidence and all(claim.is_improvement for claim in beyond):
        return Code.FLEET_IMPROVED(cause=cause)
    return cause


def _undecided_reason(
    recipe: RecipeEvidence, judgement: Judgement, cause: Reason, adjusted_p: float | None
) -> Reason:
    """Return why a recipe that is red by itself is not called red in the fleet."""
    if judgement.is_single_run and recipe.rerun is None:
        return Code.FLEET_ONE_RUN(cause=cause)
    if judgement.failed_seeds:
        seeds = list(judgement.failed_seeds)
        return Code.FLEET_FEW_FAILED(
            cause=cause, seeds=seeds, num_runs=judgement.num_runs, is_rerun=recipe.rerun is not None
        )
    return Code.FLEET_MAY_BE_CHANCE(cause=cause, rate=1.0 if adjusted_p is None else adjusted_p)
