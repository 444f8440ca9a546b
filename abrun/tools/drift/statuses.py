"""Status of every recipe of a fleet, at a false discovery rate over the recipes that were not red before."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scipy import special

from abrun.messages.numbers import counted, listed, plural
from abrun.stats.equivalence import ALPHA
from abrun.stats.many_tests import VariancePrior, benjamini_hochberg, fit_prior, p_of_failures
from abrun.tools.drift.evidence import ClaimEvidence, Design, Judgement, RecipeEvidence
from abrun.verdict.decide import FAILING, PASSING

Status = Literal["regressed here", "not judged", "open", "flaked", "red before", "green"]
# Most urgent first: the order of the rows
STATUSES: tuple[Status, ...] = ("regressed here", "not judged", "open", "flaked", "red before", "green")
EXIT_CODES: dict[Status, int] = {"regressed here": 3, "not judged": 5, "open": 4}  # 0 for the others
# Shares of a recipe's level: tests of its claims and guards, and the number of its failed runs
_TESTS_SHARE, _FAILURES_SHARE = 0.8, 0.2
# Weight of the prior guess that runs rarely fail by accident: half an accident in as many runs
_PRIOR_RUNS = 20
RedRecipes = Set[tuple[str, str | None]]  # name and hash of the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow:
    """One recipe: its status and why."""

    name: str
    status: Status
    reason: str
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

    # Distributions of the variances, by metric and design; None for few recipes
    priors: Mapping[tuple[str, Design | None], VariancePrior | None]
    failure_rate: float

    def _error(self, claim: ClaimEvidence) -> tuple[float, float]:
        """Return the standard error of the difference and its degrees of freedom; 0 if it is unknown."""
        if claim.variance is None:
            return 0.0, 0.0
        prior = self.priors.get((claim.metric, claim.design))
        variance, dof = prior.moderate(claim.variance, claim.dof) if prior else (claim.variance, claim.dof)
        return (variance * claim.variance_factor) ** 0.5, dof

    def p_beyond(self, claim: ClaimEvidence) -> float | None:
        """Return the p-value of a difference (`not_worse`: a loss) beyond the margin; None: no test."""
        error, dof = self._error(claim)
        if not error:
            return claim.p_alone
        ends = (1, -1) if claim.kind == "within" else (1,)
        return sum(float(special.stdtr(dof, (end - claim.distance) / error)) for end in ends)

    def p_within(self, claim: ClaimEvidence) -> float:
        """Return the p-value of the claim itself; 1 if the noise is unknown."""
        error, dof = self._error(claim)
        return float(special.stdtr(dof, (claim.distance - 1) / error)) if error else 1.0

    def p_of_tests(self, judgement: Judgement) -> float | None:
        """Return the level at which a test of claims or guards is red (Bonferroni over the claims)."""
        p_values = [(claim.share, self.p_beyond(claim)) for claim in judgement.claims]
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
            and all(self.p_within(claim) <= ALPHA for claim in judgement.claims)
        )

    def cause(self, judgement: Judgement) -> str:
        """Return why a recipe is red or open."""
        if judgement.verdict in FAILING or judgement.failed_seeds or not judgement.claims:
            return judgement.reason
        claim = min(judgement.claims, key=lambda claim: self.p_beyond(claim) or 1.0)
        difference, margin = claim.difference, claim.margin
        is_told_by_fleet = self.is_red(judgement) or judgement.is_single_run
        if difference is None or margin is None or not is_told_by_fleet:
            return judgement.reason
        return (
            f"{claim.metric}: {counted(judgement.num_runs, 'run')}, {difference * margin:+.3g} from the "
            f"reference, margin {margin:.3g}; p = {self.p_beyond(claim):.2g} if the margin held, by the "
            "noise of this fleet's recipes"
        )


def classify(evidence: Sequence[RecipeEvidence], red_before: RedRecipes = frozenset()) -> Fleet:
    """Decide the status of every recipe.

    A recipe is red at a false discovery rate of 5 % (Benjamini-Hochberg) over all recipes that were not red
    before. Recipes that an earlier fleet showed to be red against the same reference leave that family first:
    they would otherwise loosen the bound for the others. A red recipe with a rerun needs the rerun to be red
    as well, and a recipe with a single run needs a rerun.
    """
    chance = _Chance(_fit_priors(evidence), estimate_failure_rate(evidence))
    p_values = {
        recipe.name: chance.p_of(recipe)
        for recipe in evidence
        if (recipe.name, recipe.reference_sha256) not in red_before
        and not (recipe.judgement and recipe.judgement.reference_problem)
    }
    tested = {name: p_value for name, p_value in p_values.items() if p_value is not None}
    adjusted = dict(zip(tested, benjamini_hochberg(list(tested.values())), strict=True))
    rows = [_make_row(recipe, red_before, chance, adjusted.get(recipe.name)) for recipe in evidence]
    rows.sort(key=lambda row: (STATUSES.index(row.status), row.name))
    return Fleet(rows=rows, num_tested=len(tested), failure_rate=chance.failure_rate)


def _fit_priors(
    evidence: Sequence[RecipeEvidence],
) -> dict[tuple[str, Design | None], VariancePrior | None]:
    """Fit the distribution of the variances of each metric and design."""
    samples = defaultdict(list)
    for recipe in evidence:
        for claim in recipe.judgement.claims if recipe.judgement else ():
            if claim.variance is not None:
                samples[claim.metric, claim.design].append((claim.variance, claim.dof))
    return {key: fit_prior(*zip(*group, strict=True)) for key, group in samples.items()}


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


def _make_row(
    recipe: RecipeEvidence, red_before: RedRecipes, chance: _Chance, adjusted_p: float | None
) -> FleetRow:
    judgement = recipe.judgement
    status, reason = "not judged", recipe.problem or ""
    if judgement is not None:
        was_red = (recipe.name, recipe.reference_sha256) in red_before
        status, reason = _decide_status(recipe, judgement, chance, adjusted_p, was_red=was_red)
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
) -> tuple[Status, str]:
    cause, passes, is_red = chance.cause(judgement), chance.passes(judgement), chance.is_red(judgement)
    rerun, num_again = recipe.rerun, counted(recipe.num_rerun, "run")
    if judgement.reference_problem and not passes:
        problem = judgement.reference_problem
        return "red before", f"the reference itself is red: {problem}; make a new reference"
    if passes and recipe.retried:
        more = f", and {len(recipe.retried) - 1} more" if len(recipe.retried) > 1 else ""
        return "flaked", f"{recipe.retried[0]}{more}; every run finished in a later attempt and matches"
    if passes:
        return "green", f"red in the earlier fleet, and matches now: {cause}" if was_red else cause
    if is_red and rerun and chance.passes(rerun):
        return "flaked", f"gone on the rerun, which matches ({num_again}). At first: {cause}"
    if is_red and was_red:
        return "red before", f"red in the earlier fleet as well: {cause}"
    if not is_red:
        return ("not judged" if judgement.verdict == "INVALID" else "open"), cause
    if recipe.rerun_problem:
        return "open", f"{cause}. The rerun cannot be judged: {recipe.rerun_problem}"
    if rerun is None and judgement.is_single_run:
        return "open", f"one run shows no more than an accident could: {cause}; rerun it"
    if adjusted_p is None or adjusted_p > ALPHA:
        return "open", _undecided_reason(judgement, cause, adjusted_p, is_rerun=rerun is not None)
    if rerun and not chance.is_red(rerun):
        return "open", f"{cause}. The rerun decides nothing: {chance.cause(rerun)}; add seeds"
    again = f"red again on the rerun of {num_again}: " if rerun else ""
    # The change is for the better if all claims that moved are
    moved = [claim for claim in judgement.claims if abs(claim.difference or 0.0) > 1]
    is_other_evidence = judgement.failed_seeds or judgement.breaks_exact_rule
    if moved and not is_other_evidence and all(claim.better and claim.loss < 0 for claim in moved):
        again = (
            f"better than the reference, beyond the margin; make a new reference if that is meant. {again}"
        )
    return "regressed here", f"{again}{cause}"


def _undecided_reason(judgement: Judgement, cause: str, adjusted_p: float | None, *, is_rerun: bool) -> str:
    """Return why a recipe that is red by itself is not called red in the fleet."""
    seeds = judgement.failed_seeds
    if seeds:
        again = ", some of them again on the rerun" if is_rerun else ""
        return (
            f"{counted(judgement.num_runs, 'run')}, of which seed {listed(seeds)} failed{again}, as "
            f"accidents in this fleet could: {cause}; rerun {plural(seeds, 'that seed')}"
        )
    rate = 1.0 if adjusted_p is None else adjusted_p
    return (
        "red by itself, but chance among so many recipes could explain it (false discovery rate "
        f"{rate:.2g}): {cause}; rerun it with more seeds"
    )
