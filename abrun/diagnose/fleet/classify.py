"""Status of every recipe of a fleet, at a false discovery rate over the recipes that were not red before."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from abrun.diagnose.fleet.evidence import Judgement, RecipeEvidence
from abrun.reasons import Code, Reason
from abrun.stats.equivalence import ALPHA
from abrun.stats.false_discovery import benjamini_hochberg, p_of_failures
from abrun.verdict.decide import FAILING, PASSING

Status = Literal["regressed here", "not judged", "open", "flaked", "red before", "green"]
# Most urgent first: the order of the rows
STATUSES: tuple[Status, ...] = ("regressed here", "not judged", "open", "flaked", "red before", "green")
EXIT_CODES: dict[Status, int] = {"regressed here": 3, "not judged": 5, "open": 4}  # 0 for the others
# Shares of a recipe's level: tests of its claims and guards, and the number of its failed runs
_TESTS_SHARE, _FAILURES_SHARE = 0.9, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRow:
    """A recipe's row of an earlier fleet."""

    status: Status
    is_red: bool  # shown to be red, or below the level of a test of this recipe alone
    reference_sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow:
    """One recipe: its status and why."""

    name: str
    status: Status
    reason: Reason
    verdict: str | None  # of the recipe alone; None: not judged
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


def classify(evidence: Sequence[RecipeEvidence], earlier: Mapping[str, EarlierRow] | None = None) -> Fleet:
    """Decide the status of every recipe.

    A recipe is red at a false discovery rate of 5 % (Benjamini-Hochberg) over all recipes that were not red
    before. Recipes that an earlier fleet showed to be red leave that family first: they would otherwise
    loosen the bound for the others. A red recipe with a rerun needs the rerun to be red as well.
    """
    rate = estimate_failure_rate(evidence)
    earlier = earlier or {}
    p_values = {
        recipe.name: p_value_of(recipe, rate)
        for recipe in evidence
        if not _was_red(recipe, earlier) and not (recipe.judgement and recipe.judgement.reference_problem)
    }
    tested = {name: p_value for name, p_value in p_values.items() if p_value is not None}
    adjusted = dict(zip(tested, benjamini_hochberg(list(tested.values())), strict=True))
    rows = [_make_row(recipe, earlier.get(recipe.name), rate, adjusted) for recipe in evidence]
    rows.sort(key=lambda row: (STATUSES.index(row.status), row.name))
    return Fleet(rows=rows, num_tested=len(tested), failure_rate=rate)


def estimate_failure_rate(evidence: Sequence[RecipeEvidence]) -> float:
    """Estimate the probability that a run fails by accident, from the fleet itself (Jeffreys' mean).

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
    return (num_accidents + 0.5) / (num_runs + 1)


def p_value_of(recipe: RecipeEvidence, failure_rate: float) -> float | None:
    """Return the p-value of a recipe before the correction for many recipes; None if nothing was tested.

    Bonferroni over two parts: the tests of its claims and guards, and the number of its failed runs, which
    accidents explain at the fleet's rate.
    """
    judgement = recipe.judgement
    if judgement is None:
        return None
    if judgement.breaks_exact_rule:
        return 0.0
    parts = [] if judgement.p_value is None else [judgement.p_value / _TESTS_SHARE]
    if judgement.failed_seeds:
        num_failed, num_runs = len(judgement.failed_seeds), judgement.num_runs
        if recipe.rerun:
            num_failed += len(recipe.rerun.failed_seeds)
            num_runs += recipe.num_rerun
        parts.append(p_of_failures(num_failed, num_runs, failure_rate) / _FAILURES_SHARE)
    return min(1.0, *parts) if parts else None


def _was_red(recipe: RecipeEvidence, earlier: Mapping[str, EarlierRow]) -> bool:
    """Return True if the earlier fleet showed the recipe to be red against the same reference."""
    row = earlier.get(recipe.name)
    return row is not None and row.is_red and row.reference_sha256 == recipe.reference_sha256


def _make_row(
    recipe: RecipeEvidence, earlier: EarlierRow | None, rate: float, adjusted: Mapping[str, float]
) -> FleetRow:
    judgement = recipe.judgement
    status, reason = "not judged", recipe.problem
    was_red = _was_red(recipe, {recipe.name: earlier} if earlier else {})
    adjusted_p = adjusted.get(recipe.name)
    if judgement is not None:
        status, reason = _decide_status(recipe, judgement, adjusted_p, was_red=was_red)
    assert reason is not None
    return FleetRow(
        name=recipe.name,
        status=status,
        reason=reason,
        verdict=judgement and judgement.verdict,
        p_value=p_value_of(recipe, rate),
        adjusted_p=adjusted_p,
        num_runs=judgement.num_runs if judgement else 0,
        num_rerun=recipe.num_rerun,
        rerun_verdict=recipe.rerun and recipe.rerun.verdict,
        reference_sha256=recipe.reference_sha256,
        report=judgement and judgement.report,
    )


def _decide_status(
    recipe: RecipeEvidence, judgement: Judgement, adjusted_p: float | None, *, was_red: bool
) -> tuple[Status, Reason]:
    cause = judgement.reasons[0]
    is_red = judgement.verdict in FAILING or bool(judgement.failed_seeds)
    if judgement.reference_problem and judgement.verdict not in PASSING:
        return "red before", Code.FLEET_REFERENCE_RED(problem=judgement.reference_problem)
    if judgement.verdict in PASSING:
        if recipe.retried:
            attempt, num_more = recipe.retried[0], len(recipe.retried) - 1
            return "flaked", Code.FLEET_GONE_ON_RETRY(attempt=attempt, num_more=num_more)
        return "green", Code.FLEET_REPAIRED(cause=cause) if was_red else cause
    if is_red and recipe.rerun and recipe.rerun.verdict in PASSING:
        return "flaked", Code.FLEET_GONE_ON_RERUN(cause=cause, num_runs=recipe.num_rerun)
    if is_red and was_red:
        return "red before", Code.FLEET_RED_EARLIER(cause=cause)
    if not is_red:
        status = "not judged" if judgement.verdict == "INVALID" else "open"
        return status, cause
    if adjusted_p is not None and adjusted_p <= ALPHA:
        return _confirm(recipe, cause)
    return "open", _undecided_reason(recipe, judgement, cause, adjusted_p)


def _confirm(recipe: RecipeEvidence, cause: Reason) -> tuple[Status, Reason]:
    """Return the status of a recipe that is red, and whose rerun, if any, did not match."""
    if recipe.rerun_problem:
        return "open", Code.FLEET_RERUN_UNREADABLE(cause=cause, problem=recipe.rerun_problem)
    if recipe.rerun is None:
        return "regressed here", cause
    if recipe.rerun.verdict in FAILING or recipe.rerun.failed_seeds:
        return "regressed here", Code.FLEET_RED_ON_RERUN(cause=cause, num_runs=recipe.num_rerun)
    return "open", Code.FLEET_RERUN_OPEN(cause=cause, rerun=recipe.rerun.reasons[0])


def _undecided_reason(
    recipe: RecipeEvidence, judgement: Judgement, cause: Reason, adjusted_p: float | None
) -> Reason:
    """Return why a recipe that is red by itself is not called red in the fleet."""
    if judgement.failed_seeds:
        seeds = list(judgement.failed_seeds)
        return Code.FLEET_FEW_FAILED(
            cause=cause, seeds=seeds, num_runs=judgement.num_runs, is_rerun=recipe.rerun is not None
        )
    return Code.FLEET_MAY_BE_CHANCE(cause=cause, rate=1.0 if adjusted_p is None else adjusted_p)
