"""Evidence on one recipe of a fleet: verdict and p-values of its runs against its reference."""

import hashlib
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from scipy import special

from abrun.errors import AbrunError, ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, Reference, Sides
from abrun.logs.recorded.reference import REFERENCE_ARM, load_reference, make_regression_experiment
from abrun.logs.recorded.sources import read_sources
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import listed
from abrun.recipe.claims import ClaimKind
from abrun.report.comparing import Comparison, compare, with_options
from abrun.report.write import PAGE
from abrun.runs.experiment import is_experiment
from abrun.runs.files import is_directory
from abrun.runs.layout import REPORT, RunName
from abrun.runs.rundir import RunDir
from abrun.stats.equivalence import ALPHA, MIN_FOR_MISMATCH
from abrun.stats.many_tests import VariancePrior, fit_prior
from abrun.tools.drift.fleet.recipes import FleetOptions, FleetRecipe, problem_of_file
from abrun.tools.drift.ledger.drift import is_over_budget
from abrun.verdict.decide import PASSING, Verdict
from abrun.verdict.guards import check_guards, pair_with_all_baselines
from abrun.verdict.limits import judge_limit
from abrun.verdict.results import ClaimResult

# The page draws its own charts; drawing pictures would take ten times as long as all the rest.
_FORMATS = ("json", "html", "markdown")
_DIFFERENCE_TESTS = ("paired TOST", "Welch TOST", "paired t-test", "Welch t-test")
_ACCIDENTS = ("finished", "finite")  # guards that a single run can break


# single: one run, whose noise is that of the reference's runs
Design = Literal["paired", "unpaired", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimEvidence:
    """One claim of a recipe, in units of its margin: differences of recipes then have similar noise."""

    metric: str
    kind: ClaimKind
    better: str | None  # direction of an improvement
    p_alone: float | None  # with the recipe's own noise; None: not tested
    share: float  # of the recipe's level
    # The rest is None unless the claim is about a difference with a margin of its own
    design: Design | None = None
    difference: float | None = None  # treatment - reference
    margin: float | None = None
    variance: float | None = None  # of one pair, or of one run of the reference
    variance_factor: float = 1.0  # variance of the difference / variance
    dof: float = 0.0

    @property
    def is_improvement(self) -> bool:
        if self.difference is None or self.better is None:
            return False
        return (self.difference > 0) == (self.better == "higher")


@dataclass(frozen=True, slots=True)
class FleetNoise:
    """Distributions of the variances, by metric and design; none for few recipes."""

    priors: Mapping[tuple[str, Design | None], VariancePrior | None]

    def p_beyond(self, claim: ClaimEvidence) -> float | None:
        """Return the p-value of a difference (`not_worse`: a loss) beyond the margin; None: no test."""
        if claim.difference is None:
            return claim.p_alone
        error, dof = self._error(claim)
        if not error:
            return claim.p_alone
        if claim.kind == "within":
            distance = abs(claim.difference)
            return sum(float(special.stdtr(dof, (end - distance) / error)) for end in (1, -1))
        loss = -claim.difference if claim.better == "higher" else claim.difference
        return float(special.stdtr(dof, (1 - loss) / error))

    def p_within(self, claim: ClaimEvidence) -> float:
        """Return the p-value of the claim itself; 1 if the noise is unknown."""
        if claim.difference is None:
            return 1.0
        error, dof = self._error(claim)
        if not error:
            return 1.0
        loss = -claim.difference if claim.better == "higher" else claim.difference
        distance = abs(claim.difference) if claim.kind == "within" else loss
        return float(special.stdtr(dof, (distance - 1) / error))

    def _error(self, claim: ClaimEvidence) -> tuple[float, float]:
        """Return the standard error of the difference and its degrees of freedom; 0 if it is unknown."""
        assert claim.variance is not None
        prior = self.priors.get((claim.metric, claim.design))
        variance, dof = prior.moderate(claim.variance, claim.dof) if prior else (claim.variance, claim.dof)
        return (variance * claim.variance_factor) ** 0.5, dof


def fit_noise(claims: Iterable[ClaimEvidence]) -> FleetNoise:
    """Fit the distribution of the variances of each metric and design."""
    groups: dict[tuple[str, Design | None], list[ClaimEvidence]] = defaultdict(list)
    for claim in claims:
        if claim.variance is not None:
            groups[claim.metric, claim.design].append(claim)
    return FleetNoise(
        {
            key: fit_prior([claim.variance or 0.0 for claim in group], [claim.dof for claim in group])
            for key, group in groups.items()
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict on runs of one recipe, with the evidence for a decision over all recipes."""

    verdict: Verdict
    reasons: tuple[Reason, ...]
    claims: tuple[ClaimEvidence, ...]  # those that can be tested
    p_guards: float | None  # smallest level at which a test of a guard fails; None: none was made
    is_open_apart_from_claims: bool  # a guard or step one is undecided
    breaks_exact_rule: bool  # step one or an exact claim, which no noise breaks
    num_runs: int
    failed_seeds: tuple[int, ...]  # seeds whose run failed or became NaN alone
    reference_problem: str | None  # why the reference itself is red
    report: Path | None  # the page of its report

    @property
    def is_single_run(self) -> bool:
        return self.num_runs == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeEvidence:
    """Judgements of one recipe, or the reason why there is none."""

    name: str
    problem: Reason | None = None
    reference_sha256: str | None = None
    judgement: Judgement | None = None
    rerun: Judgement | None = None  # of the runs in which reruns replace the runs of their seeds
    rerun_problem: Reason | None = None
    num_rerun: int = 0
    retried: tuple[str, ...] = ()  # failed attempts of runs that finished later


def gather_evidence(recipe: FleetRecipe, options: FleetOptions) -> RecipeEvidence:
    """Read and judge one recipe, and write its report if the options name a folder.

    A recipe that cannot be read or judged has a problem instead of a judgement.
    """
    if recipe.problem or recipe.reference is None:
        return RecipeEvidence(name=recipe.name, problem=recipe.problem)
    try:
        sha256 = hashlib.sha256(recipe.reference.read_bytes()).hexdigest()
        reference = load_reference(recipe.reference)
        experiment = _open_runs(recipe.folder, reference, options)
        evidence = RecipeEvidence(name=recipe.name, reference_sha256=sha256)
        evidence = replace(evidence, retried=tuple(_failed_attempts(experiment)))
        command = _comparison_command(recipe.folder, recipe.reference, options)
        judgement = _judge(experiment, reference, options, Path(recipe.name), command)
    except (AbrunError, OSError) as error:
        return RecipeEvidence(name=recipe.name, problem=_reason_of(error))
    evidence = replace(evidence, judgement=judgement)
    rerun_folder = options.rerun / recipe.name if options.rerun else None
    if rerun_folder is None or judgement.verdict in PASSING:
        return evidence
    try:
        if not is_directory(rerun_folder):
            return evidence
        rerun = _open_runs(rerun_folder, reference, options)
        merged, num_rerun = _replace_runs(experiment, rerun)
        command = _comparison_command(rerun_folder, recipe.reference, options)
        second = _judge(merged, reference, options, Path(recipe.name) / "rerun", command)
    except (AbrunError, OSError) as error:
        return replace(evidence, rerun_problem=_reason_of(error))
    return replace(evidence, rerun=second, num_rerun=num_rerun)


def _reason_of(error: AbrunError | OSError) -> Reason:
    return error.reason if isinstance(error, AbrunError) else problem_of_file(error)


def _open_runs(folder: Path, reference: Reference, options: FleetOptions) -> RecordedExperiment:
    contents = read_sources([str(folder)], options.reading)
    experiment = contents.experiment(allows_one_arm=True, may_unpair=True)
    if options.arm is None and len(experiment.arms) > 1:
        raise ComparisonError(
            f"--reference: {experiment.name} has several arms; choose one with --arm: "
            f"{listed(experiment.arms)}"
        )
    arm = options.arm or experiment.baseline
    experiment = make_regression_experiment(experiment, reference, arm)
    return with_options(experiment, step_one=options.step_one, unpaired=options.reading.unpaired)


def _comparison_command(folder: Path, reference: Path, options: FleetOptions) -> str:
    words = ["abrun", "compare", str(folder), "--reference", str(reference)]
    words += [] if options.arm is None else ["--arm", options.arm]
    return shlex.join([*words, *options.reading.to_words(), *([] if options.step_one else ["--no-step-one"])])


def _replace_runs(first: RecordedExperiment, rerun: RecordedExperiment) -> tuple[RecordedExperiment, int]:
    """Return the experiment with the rerun's runs in place of those of their seeds, and their number."""
    arm = first.treatments[0]
    runs = {
        RunName(arm=arm, seed=run.name.seed): run
        for run in rerun.runs.values()
        if run.name.arm != REFERENCE_ARM
    }
    renamed = {name: replace(run, name=name, identity=None) for name, run in runs.items()}
    return replace(first, runs={**first.runs, **renamed}), len(renamed)


def _failed_attempts(experiment: RecordedExperiment) -> Iterator[str]:
    """Yield the failed attempts of runs of abrun's that finished in a later one."""
    directory = experiment.directory
    if directory is None or not is_experiment(directory):
        return
    for run in experiment.runs.values():
        if run.finished and run.name.arm != REFERENCE_ARM:
            for attempt in RunDir(Path(run.place)).attempts():
                if attempt.status == "failed":
                    message = attempt.message or f"exit code {attempt.exit_code}"
                    yield f"attempt {attempt.number} of {run} failed: {message}"


def _judge(
    experiment: RecordedExperiment, reference: Reference, options: FleetOptions, place: Path, command: str
) -> Judgement:
    folder = options.output / place / REPORT if options.output else None
    comparison = compare(
        experiment, output=folder, declared=reference.compare, formats=_FORMATS, command=command
    )
    report = place / REPORT / PAGE if folder else None
    return _summarize(experiment, reference, comparison, report)


def _summarize(
    experiment: RecordedExperiment, reference: Reference, comparison: Comparison, report: Path | None
) -> Judgement:
    content = comparison.content
    (section,) = content.arms.values()
    is_tested = content.verdict != "INVALID"
    failed_seeds = tuple(_failed_seeds(experiment, content.claims))
    guards, checks = content.select("guard"), content.select("step one")
    failures = [guard for guard in guards if guard["guard"] in _ACCIDENTS and guard.result == "fail"]
    # The failure comes first: runs that failed early also lack steps to compare.
    causes = [Code.GUARD_FAILS(guard=failures[0]["guard"], reason=failures[0].reason)] if failures else []
    reasons = dict.fromkeys([*causes, *section.reasons])
    return Judgement(
        verdict=content.verdict,
        reasons=tuple(reasons),
        claims=tuple(_claim_evidence(comparison, experiment.compare.alpha)) if is_tested else (),
        p_guards=min(_guard_levels(comparison, experiment.compare.alpha), default=None),
        is_open_apart_from_claims=any(check.result == "open" for check in checks)
        or any(guard.result in ("open", "baseline too") for guard in guards),
        breaks_exact_rule=any(check.result == "fail" for check in checks)
        or any(claim.claim.test == "exact" and claim.result == "different" for claim in content.claims),
        num_runs=len(experiment.sides(comparison.arms[0].arm).treatments),
        failed_seeds=failed_seeds,
        reference_problem=_find_reference_problem(experiment, reference, comparison),
        report=report,
    )


def _claim_evidence(comparison: Comparison, alpha: float) -> Iterator[ClaimEvidence]:
    """Yield the claims with the statistics that the fleet's tests need."""
    single_runs = {
        (run["metric"], run["window"]): run
        for run in comparison.content.select("new run")
        if run["several"] == REFERENCE_ARM and run["num_runs"] >= MIN_FOR_MISMATCH
    }
    for result in comparison.content.claims:
        terms = result.claim
        plain = ClaimEvidence(
            metric=terms.metric,
            kind=terms.kind,
            better=terms.better,
            p_alone=_p_alone(result),
            share=terms.alpha_difference / alpha,
        )
        single = single_runs.get((terms.metric, terms.window))
        if terms.test not in _DIFFERENCE_TESTS or not terms.margin or terms.kind == "better":
            yield plain
        elif single is not None and plain.p_alone is None:
            yield replace(
                plain,
                design="single",
                difference=single["difference"] / terms.margin,
                margin=terms.margin,
                variance=(single["sd"] / terms.margin) ** 2,
                variance_factor=1 + 1 / single["num_runs"],
                dof=single["num_runs"] - 1,
            )
        elif plain.p_alone is not None:
            yield _with_difference(plain, result)


def _p_alone(result: ClaimResult) -> float | None:
    """Return the p-value of a difference beyond the margin; None with too few runs for a mismatch."""
    terms = result.claim
    num_runs = terms.num_pairs if terms.num_runs is None else min(terms.num_runs)
    return result.estimate.p_beyond if num_runs >= MIN_FOR_MISMATCH else None


def _with_difference(plain: ClaimEvidence, result: ClaimResult) -> ClaimEvidence:
    terms, estimate = result.claim, result.estimate
    if estimate.mean_difference is None or estimate.standard_error is None or not estimate.freedom:
        return plain
    assert terms.margin is not None
    if not math.isfinite(estimate.standard_error / terms.margin):
        return plain
    factor = 1 / terms.num_pairs if terms.num_runs is None else sum(1 / number for number in terms.num_runs)
    return replace(
        plain,
        design="paired" if terms.num_runs is None else "unpaired",
        difference=estimate.mean_difference / terms.margin,
        margin=terms.margin,
        variance=(estimate.standard_error / terms.margin) ** 2 / factor,
        variance_factor=factor,
        dof=estimate.freedom,
    )


def _guard_levels(comparison: Comparison, alpha: float) -> Iterator[float]:
    """Yield the level of the recipe at which each test of a guard fails."""
    reasons = [guard.reason for guard in comparison.content.select("guard") if guard.reason]
    for reason in reasons:
        p_value, level = reason.values.get("p"), reason.values.get("level")
        if p_value is not None and level:
            yield min(1.0, p_value * alpha / level)


def _failed_seeds(experiment: RecordedExperiment, claims: list[ClaimResult]) -> Iterator[int]:
    """Yield the seeds whose run alone breaks a guard on failures or NaN."""
    (arm,) = experiment.treatments
    sides = experiment.sides(arm)
    windows = [(result.claim.metric, result.claim.steps) for result in claims if result.claim.steps]
    for pair in experiment.pairs(arm) if sides.paired else pair_with_all_baselines(sides):
        single = Sides(baselines=(pair.baseline,), treatments=(pair.treatment,), paired=sides.paired)
        guards = check_guards(arm, [pair], single, experiment.compare.guards, (), windows)
        if any(guard["guard"] in _ACCIDENTS and guard.result == "fail" for guard in guards):
            yield pair.seed


def _find_reference_problem(
    experiment: RecordedExperiment, reference: Reference, comparison: Comparison
) -> str | None:
    """Return why the reference is red by the rules that its recipe is held to; None if it is not."""
    if is_over_budget(reference):
        return "the accepted changes in its ledger have drifted beyond the budget"
    for guard in comparison.content.select("guard"):
        if guard.result == "baseline too":
            return str(guard.reason)
    baselines = experiment.sides(comparison.arms[0].arm).baselines
    sides = Sides(baselines=baselines, treatments=baselines, paired=True)
    for claim, result in zip(experiment.compare.claims, comparison.content.claims, strict=True):
        if result.claim.test == "limit" and result.result == "different":
            grid = experiment.metric_steps(claim.metric)
            itself = judge_limit(REFERENCE_ARM, sides, claim, grid)
            p_value = itself.estimate.p_beyond
            if p_value is not None and p_value < ALPHA:
                return f"its own runs break the limit {result.claim.margin_text} on {claim.metric}"
    return None
