"""Evidence on one recipe of a fleet: verdict and p-values of its runs against its frozen reference."""

import hashlib
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from abrun.errors import AbrunError, ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, Reference, Sides
from abrun.logs.recorded.reference import REFERENCE_ARM, load_reference, make_regression_experiment
from abrun.logs.recorded.sources import ReadingOptions, read_sources
from abrun.messages.codes import Code
from abrun.messages.numbers import listed
from abrun.recipe.claims import ClaimKind
from abrun.report.comparing import CompareOptions, Comparison, compare, with_options
from abrun.report.write import PAGE
from abrun.runs.experiment import REFERENCE, is_experiment
from abrun.runs.files import exists, is_directory, is_file
from abrun.runs.layout import REPORT, RunName
from abrun.runs.rundir import RunDir
from abrun.stats.equivalence import ALPHA, MIN_FOR_MISMATCH
from abrun.tools.drift.chain import is_over_budget
from abrun.verdict.decide import PASSING, Verdict
from abrun.verdict.guards import check_guards, pair_with_all_baselines
from abrun.verdict.limits import judge_limit
from abrun.verdict.results import ClaimResult

FLEET_FILE = "fleet.json"
# The page draws its own charts; drawing pictures would take ten times as long as all the rest.
_FORMATS = ("json", "html", "markdown")
_DIFFERENCE_TESTS = ("paired TOST", "Welch TOST", "paired t-test", "Welch t-test")
_ACCIDENTS = ("finished", "finite")  # guards that a single run can break

# single: one run, whose noise is that of the reference's runs
Design = Literal["paired", "unpaired", "single"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Settings of one fleet comparison."""

    folder: Path
    references: Path | None = None  # folder with NAME.json; None: `folder`, or NAME/reference.json there
    rerun: Path | None = None  # folder with second runs of some recipes, of the same names
    earlier: Path | None = None  # report folder of an earlier fleet, or its fleet.json
    arm: str | None = None
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    step_one: bool = True
    output: Path | None = None
    command: str = "abrun compare --fleet"


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
    def loss(self) -> float:
        """Return the difference for the worse."""
        difference = self.difference or 0.0
        return -difference if self.better == "higher" else difference

    @property
    def distance(self) -> float:
        """Return how far the difference is towards its margin."""
        return abs(self.loss) if self.kind == "within" else self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict on runs of one recipe, with the evidence for a decision over all recipes."""

    verdict: Verdict
    reason: str
    claims: tuple[ClaimEvidence, ...]  # those that can be tested
    p_guards: float | None  # smallest level at which a test of a guard fails; None: none was made
    is_open_apart_from_claims: bool  # a guard or step one is undecided
    breaks_exact_rule: bool  # step one or an exact claim, which no noise breaks
    num_runs: int
    failed_seeds: tuple[int, ...]  # seeds whose run failed or became NaN alone
    reference_problem: str | None  # why the reference itself is red
    report: Path | None  # the page of its report


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeEvidence:
    """Judgements of one recipe, or the reason why there is none."""

    name: str
    problem: str | None = None
    reference_sha256: str | None = None
    judgement: Judgement | None = None
    rerun: Judgement | None = None  # of the runs in which reruns replace the runs of their seeds
    rerun_problem: str | None = None
    num_rerun: int = 0
    retried: tuple[str, ...] = ()  # failed attempts of runs that finished later


def find_recipes(options: FleetOptions) -> list[str]:
    """Return the names of all recipes of the fleet, also of those without runs or reference.

    Raises ComparisonError for a folder that is missing or has no recipe.
    """
    folders = {"--fleet": options.folder, "--reference": options.references, "--rerun": options.rerun}
    for option, folder in folders.items():
        if folder is not None and not is_directory(folder):
            problem = "not a folder" if exists(folder) else "no such folder"
            raise ComparisonError(
                f"{option}: got {folder}, {problem}; give a folder with a subfolder for each recipe"
            )
    names = {path.name for path in options.folder.iterdir() if _holds_runs(path)}
    files = (options.references or options.folder).glob("*.json")
    without_runs = [path for path in files if path.stem not in names]
    # The folder of the fleet may hold other JSON files
    names |= {path.stem for path in without_runs if options.references is not None or _is_reference(path)}
    if not names:
        raise ComparisonError(
            f"--fleet: {options.folder} has no recipe; give a folder with a subfolder of runs for each recipe"
        )
    return sorted(names)


def _holds_runs(path: Path) -> bool:
    """Return True for a folder that could hold runs: not hidden, and not the report of a fleet."""
    try:
        return not path.name.startswith(".") and is_directory(path) and not exists(path / FLEET_FILE)
    except OSError:  # it may not be entered; its row says so
        return True


def _is_reference(path: Path) -> bool:
    try:
        load_reference(path)
    except (AbrunError, OSError):
        return False
    return True


def _find_reference(name: str, options: FleetOptions) -> Path:
    """Return the only reference of a recipe that has runs. Raises ComparisonError or OSError."""
    folder = options.folder / name
    paths = [options.folder / f"{name}.json", folder / REFERENCE]
    if options.references is not None:
        paths = [options.references / f"{name}.json"]
    references = [path for path in paths if is_file(path)]
    if not references:
        raise ComparisonError(f"{name} has no reference; make one: abrun reference save RUNS -o {paths[0]}")
    if len(references) > 1:
        first, second = references
        raise ComparisonError(f"{name} has two references, {first} and {second}; remove one")
    if not is_directory(folder):
        raise ComparisonError(
            f"{name} has a reference but no runs in {folder}; run it, or remove its reference"
        )
    return references[0]


def gather_evidence(name: str, options: FleetOptions) -> RecipeEvidence:
    """Read and judge one recipe, and write its report if the options name a folder.

    A recipe that cannot be read or judged has a problem instead of a judgement.
    """
    folder = options.folder / name
    try:
        path = _find_reference(name, options)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        reference = load_reference(path)
        judge = partial(_judge, reference, path, options)
        experiment = _open_runs(folder, reference, options)
        retried = tuple(_failed_attempts(experiment))
        judgement = judge(experiment, folder, Path(name))
    except (AbrunError, OSError) as error:
        return RecipeEvidence(name=name, problem=_problem_of(error))
    evidence = RecipeEvidence(name=name, reference_sha256=sha256, judgement=judgement, retried=retried)
    rerun_folder = options.rerun / name if options.rerun else None
    if rerun_folder is None or judgement.verdict in PASSING:
        return evidence
    try:
        if not is_directory(rerun_folder):
            return evidence
        runs = _open_runs(rerun_folder, reference, options).runs
        rerun = {
            RunName(arm=experiment.treatments[0], seed=run.name.seed): run
            for run in runs.values()
            if run.name.arm != REFERENCE_ARM
        }
        renamed = {name: replace(run, name=name, identity=None) for name, run in rerun.items()}
        merged = replace(experiment, runs={**experiment.runs, **renamed})
        second = judge(merged, rerun_folder, Path(name) / "rerun")
    except (AbrunError, OSError) as error:
        return replace(evidence, rerun_problem=_problem_of(error))
    return replace(evidence, rerun=second, num_rerun=len(renamed))


def _problem_of(error: AbrunError | OSError) -> str:
    return str(error) if isinstance(error, AbrunError) else f"{error.filename}: {error.strerror or error}"


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
    reference: Reference,
    path: Path,  # of the reference
    options: FleetOptions,
    experiment: RecordedExperiment,
    folder: Path,  # of the runs
    place: Path,  # of the report, in that of the fleet
) -> Judgement:
    against = CompareOptions(reference=path, arm=options.arm, step_one=options.step_one)
    words = ["abrun", "compare", str(folder), *options.reading.to_words(), *against.to_words()]
    output = options.output / place / REPORT if options.output else None
    declared, command = reference.compare, shlex.join(words)
    comparison = compare(experiment, output=output, declared=declared, formats=_FORMATS, command=command)
    content, alpha = comparison.content, experiment.compare.alpha
    (section,) = content.arms.values()
    guards, checks = content.select("guard"), content.select("step one")
    # A failure comes first: runs that failed early also lack steps to compare
    failures = [guard for guard in guards if guard["guard"] in _ACCIDENTS and guard.result == "fail"]
    reasons = [Code.GUARD_FAILS(guard=guard["guard"], reason=guard.reason) for guard in failures]
    tests_of_guards = [guard.reason.values for guard in guards if guard.reason]
    levels_of_guards = [
        min(1.0, values["p"] * alpha / values["level"])
        for values in tests_of_guards
        if values.get("p") is not None and values.get("level")
    ]
    return Judgement(
        verdict=content.verdict,
        reason=str([*reasons, *section.reasons][0]),
        claims=tuple(_claim_evidence(comparison, alpha)) if content.verdict != "INVALID" else (),
        p_guards=min(levels_of_guards, default=None),
        is_open_apart_from_claims=any(check.result == "open" for check in checks)
        or any(guard.result in ("open", "baseline too") for guard in guards),
        breaks_exact_rule=any(check.result == "fail" for check in checks)
        or any(claim.claim.test == "exact" and claim.result == "different" for claim in content.claims),
        num_runs=len(experiment.sides(comparison.arms[0].arm).treatments),
        failed_seeds=tuple(_failed_seeds(experiment, content.claims)),
        reference_problem=_find_reference_problem(experiment, reference, comparison),
        report=place / REPORT / PAGE if output else None,
    )


def _claim_evidence(comparison: Comparison, alpha: float) -> Iterator[ClaimEvidence]:
    """Yield the claims with the statistics that the fleet's tests need."""
    single_runs = {
        (run["metric"], run["window"]): run
        for run in comparison.content.select("new run")
        if run["several"] == REFERENCE_ARM and run["num_runs"] >= MIN_FOR_MISMATCH
    }
    for result in comparison.content.claims:
        terms, estimate = result.claim, result.estimate
        variances: dict[str, Any] = {}
        counts = (terms.num_pairs,) if terms.num_runs is None else terms.num_runs
        p_alone = estimate.p_beyond if min(counts) >= MIN_FOR_MISMATCH else None
        single = single_runs.get((terms.metric, terms.window))
        difference, error, margin = estimate.mean_difference, estimate.standard_error, terms.margin
        if terms.test not in _DIFFERENCE_TESTS or not margin or terms.kind == "better":
            pass  # no difference with a margin of its own
        elif p_alone is None and single is not None:
            variances = {
                "design": "single",
                "difference": single["difference"] / margin,
                "margin": margin,
                "variance": (single["sd"] / margin) ** 2,
                "variance_factor": 1 + 1 / single["num_runs"],
                "dof": single["num_runs"] - 1,
            }
        elif (
            p_alone is not None
            and difference is not None
            and error is not None
            and estimate.freedom
            and math.isfinite(error / margin)
        ):
            factor = sum(1 / number for number in counts)
            variances = {
                "design": "paired" if terms.num_runs is None else "unpaired",
                "difference": difference / margin,
                "margin": margin,
                "variance": (error / margin) ** 2 / factor,
                "variance_factor": factor,
                "dof": estimate.freedom,
            }
        yield ClaimEvidence(
            metric=terms.metric,
            kind=terms.kind,
            better=terms.better,
            p_alone=p_alone,
            share=terms.alpha_difference / alpha,
            **variances,
        )


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
            itself = judge_limit(REFERENCE_ARM, sides, claim, experiment.metric_steps(claim.metric))
            p_value = itself.estimate.p_beyond
            if p_value is not None and p_value < ALPHA:
                return f"its own runs break the limit {result.claim.margin_text} on {claim.metric}"
    return None
