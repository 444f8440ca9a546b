"""Comparison of the arms of an experiment, from sources to the written report.

Sources -> Experiment -> validity, guards, evidence -> verdict -> plots and report. Importing this module
loads numpy and scipy, so the command line imports it only to compare.
"""

import os
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import RenderableType

from abrun.errors import ComparisonError, UnknownRunsError
from abrun.experiment.plan import compare_hash
from abrun.logs.recorded.claim_tests import find_earlier_claim_tests, in_reported_order, make_claim_test
from abrun.logs.recorded.experiment import RecordedExperiment, Reference, resolve_claims
from abrun.logs.recorded.ledger import Ledger
from abrun.logs.recorded.reference import freeze, load_reference, make_regression_experiment
from abrun.logs.recorded.sources import ReadingOptions, SourceContents, read_sources
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import listed
from abrun.recipe.claims import Claim, Compare, claim_option
from abrun.recipe.extras import missing_package
from abrun.recipe.refusals import validated
from abrun.report.next_step import NextStep, next_steps
from abrun.report.present.figures import FIGURE_FORMATS
from abrun.report.write import FORMATS, render_terminal, writable_formats, write_report
from abrun.runs.experiment import is_experiment
from abrun.runs.files import exists
from abrun.runs.layout import REPORT, VERDICT
from abrun.runs.metric_names import default_transform
from abrun.verdict.decide import ArmVerdict, Verdict, judge
from abrun.verdict.margins import freeze_claims
from abrun.verdict.new_run import has_single_run
from abrun.verdict.noise_history import record_noise, with_history
from abrun.verdict.seed_noise import describe_one_arm
from abrun.verdict.verdict_file import VerdictFile, as_json, build_verdict_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict on all treatments, with its evidence and the files of the report."""

    content: VerdictFile
    arms: list[ArmVerdict]
    files: list[Path]  # of the report; none if no folder was given
    next_steps: list[NextStep]

    @property
    def verdict(self) -> Verdict:
        return self.content.verdict

    @property
    def exit_code(self) -> int:
        return self.content.exit_code

    def as_json(self) -> dict[str, Any]:
        """Return the content of verdict.json."""
        return as_json(self.content)

    def summary(self, *, verbose: bool = False) -> RenderableType:
        """Return the evidence, the verdict, the next command and the report, for a terminal."""
        return render_terminal(self.content, self.files, self.next_steps, verbose=verbose)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of `abrun compare` that do not say how to read the runs."""

    claims: Sequence[Claim] | None = None  # these three replace what was declared
    alpha: float | None = None
    require: Literal["all", "any"] | None = None
    reference: Path | None = None  # compare `arm` with this frozen reference, by its claims
    arm: str | None = None  # required if an experiment has several
    step_one: bool = True
    noise: Path | None = None  # the history of logs of the same training
    output: Path | None = None  # the folder of the report; None: write nothing
    formats: Collection[str] | None = None
    command: str | None = None  # that made the report

    @property
    def level(self) -> dict[str, Any]:
        values = {"alpha": self.alpha, "require": self.require}
        return {key: value for key, value in values.items() if value is not None}

    def to_words(self) -> list[str]:
        """Return the options as words of a command line, without those of the report."""
        words = [word for claim in self.claims or () for word in ("--claim", claim_option(claim))]
        words += [] if self.reference is None else ["--reference", str(self.reference)]
        words += [] if self.arm is None else ["--arm", self.arm]
        words += [word for key, value in self.level.items() for word in (f"--{key}", str(value))]
        words += [] if self.noise is None else ["--noise", str(self.noise)]
        return [*words, *([] if self.step_one else ["--no-step-one"])]


def compare_sources(sources: Sequence[str], reading: ReadingOptions, **options: Any) -> Comparison:
    """Read runs from wherever they are and judge them; `options` are the fields of CompareOptions."""
    return compare_contents(read_sources(sources, reading), CompareOptions(**options))


def compare_contents(contents: SourceContents, options: CompareOptions) -> Comparison:
    """Judge runs that have been read, and write the report into the folder `output`, if given.

    A single arm whose recipe names a reference is compared with that, too. Raises StoreError or
    ComparisonError for runs that cannot be read, or a folder that must stay as it is.
    """
    directory, reading = contents.directory, contents.reading
    reference, arm, claims = options.reference, options.arm, options.claims
    is_one_arm = reference is not None
    try:
        experiment = contents.experiment(
            allows_one_arm=is_one_arm, may_be_one_arm=not is_one_arm, may_unpair=claims is None
        )
    except UnknownRunsError as error:  # it ends with a command
        raise UnknownRunsError(" ".join((str(error), *map(shlex.quote, options.to_words())))) from None
    if reference is not None and reading.versions_differ:
        raise ComparisonError(
            "--versions-differ: got it with a reference, which always allows other versions; drop it"
        )
    if reference is not None or (experiment.reference and not experiment.treatments):
        frozen = load_reference(reference) if reference else experiment.reference
        assert frozen is not None
        if arm is None and len(experiment.arms) > 1:
            raise ComparisonError(
                f"--reference: {experiment.name} has several arms; choose one with --arm: "
                f"{listed(experiment.arms)}"
            )
        experiment = make_regression_experiment(experiment, frozen, arm or experiment.baseline)
    elif arm is not None:
        raise ComparisonError(f"--arm requires --reference; add it, or drop --arm {arm}")
    declared = experiment.compare
    if experiment.compare.paired and not (experiment.has_recipe or experiment.regression):
        experiment = _unpair_single_run(experiment)
    experiment = with_options(
        experiment, claims, step_one=options.step_one, unpaired=reading.unpaired, level=options.level
    )
    if options.noise is not None:
        experiment = with_history(experiment, options.noise)
    if reading.interim and not experiment.compare.claims:
        raise ComparisonError(
            f"--interim: got {reading.given_options['--interim']} without a claim, and only a claim has "
            "interim analyses; add --claim METRIC:WINDOW:MARGIN, or drop it"
        )
    command, output = options.command, options.output
    if directory is None and command is None:
        words = [*contents.sources, *reading.to_words(), *options.to_words()]
        command = shlex.join(["abrun", "compare", *words])
    if output is not None:
        is_changed = experiment.launched_baseline or _find_change(experiment.compare, declared)
        is_declared = reference is None and not is_changed
        _refuse_folder(output, directory, is_declared=is_declared)
    return compare(experiment, declared=declared, output=output, formats=options.formats, command=command)


def _unpair_single_run(experiment: RecordedExperiment) -> RecordedExperiment:
    """Return the experiment unpaired if one arm has a single run: one pair shows no spread, all runs do."""
    is_alone = len(experiment.treatments) == 1 and has_single_run(experiment, experiment.treatments[0])
    if not is_alone or experiment.compare.interim:
        return experiment
    return replace(experiment, compare=experiment.compare.model_copy(update={"paired": False}))


def _refuse_folder(output: Path, experiment_dir: Path | None, *, is_declared: bool) -> None:
    """Raise ComparisonError for a folder that a comparison of this experiment, if it is one, must not write.

    A link could be someone else's and lead anywhere; the declared comparison's report is not replaced, and
    another experiment keeps its own.
    """
    own_dir = experiment_dir and Path(os.path.realpath(experiment_dir))
    folder = Path(os.path.realpath(output))
    if folder.name == REPORT and folder.parent != own_dir and is_experiment(folder.parent):
        owner = f"is for the report of the experiment {folder.parent.name}"
        raise ComparisonError(f"--output: {output} {owner}; choose another folder")
    if Path(os.path.realpath(output.parent)) != own_dir:
        return
    if output.is_symlink():
        raise ComparisonError(f"{output}: is a symbolic link; remove it, or choose a folder with --output")
    if output.name == REPORT and not is_declared and exists(output / VERDICT):
        raise ComparisonError(
            f"--output: {output} has the report of the comparison declared at launch, which this one would "
            "replace; choose another folder"
        )


def _check_formats(formats: Collection[str]) -> None:
    """Raise ComparisonError for a format that is unknown, or that needs a missing package."""
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise ComparisonError(f"formats: got {unknown[0]!r}; allowed: {listed(FORMATS)}")
    if set(formats) & set(FIGURE_FORMATS) and (missing := missing_package("figures")):
        raise ComparisonError(f"formats: png and svg: {missing}; or use html, markdown and json")


# Values that overflow are judged as infinite.
@np.errstate(all="ignore")
def compare(
    experiment: RecordedExperiment,
    *,
    output: Path | None = None,
    declared: Compare | None = None,
    formats: Collection[str] | None = None,
    command: str | None = None,
) -> Comparison:
    """Judge every treatment against the baseline, and write the report into the folder `output`, if given.

    `declared` is the comparison before `with_options` changed it. `formats`: of the report's files, by
    default all that the installed packages can write. Raise ComparisonError if there is nothing to compare.
    """
    formats = writable_formats() if formats is None else formats
    _check_formats(formats)
    if not experiment.treatments and experiment.injected:
        raise ComparisonError(
            f"{experiment.name}: has injected faults but no treatment; its report/sensitivity.md says which "
            "were caught (abrun faults run --resume prints it)"
        )
    keeps_order = bool(experiment.compare.interim) and not experiment.has_recipe  # a launch has its own order
    if keeps_order:
        folders = {experiment.directory or Path(), *([output.parent] if output is not None else [])}
        experiment = in_reported_order(experiment, find_earlier_claim_tests(folders))
    arms = judge(experiment, experiment.compare.claims) if experiment.treatments else []
    one_arm = None if arms else describe_one_arm(experiment)
    post_hoc_reason = None
    if arms or (one_arm and one_arm.claims):
        post_hoc_reason = find_post_hoc_reason(experiment, declared or experiment.compare)
    content = build_verdict_file(experiment, arms, post_hoc_reason, one_arm)
    if output is not None:
        content = replace(content, notes=[*content.notes, *record_noise(experiment, arms)])
    judged = [arm for arm in arms if keeps_order and arm.verdict != "INVALID"]
    judged = [arm for arm in judged if any(result.result != "not tested" for result in arm.claims)]
    tests = [make_claim_test(experiment, arm.arm) for arm in judged]
    files = [] if output is None else write_report(experiment, content, output, formats, command, tests)
    steps_to_take = next_steps(experiment, content, command)
    return Comparison(content=content, arms=arms, files=files, next_steps=steps_to_take)


def with_options(
    experiment: RecordedExperiment,
    claims: Sequence[Claim] | None = None,
    *,
    step_one: bool = True,
    unpaired: bool = False,
    level: Mapping[str, Any] | None = None,
) -> RecordedExperiment:
    """Return the experiment with the comparison that these options ask for.

    `claims` replace the declared claims, which in another order are the same; `level` has another `alpha` or
    `require`. Other claims than those declared at launch make the verdict post hoc, as do leaving out step
    one and not pairing the runs. Raises ComparisonError for a claim that cannot be read on these runs.
    """
    changes: dict[str, Any] = dict(level or {})
    validated(Compare, changes, "compare")  # raises RecipeError
    if claims is not None:
        claims = resolve_claims(experiment, claims)
        if _count_claims(claims) != _count_claims(experiment.compare.claims):
            changes["claims"] = claims
    if not step_one:
        changes["step_one"] = False
    if unpaired:
        changes["paired"] = False
    return replace(experiment, compare=experiment.compare.model_copy(update=changes))


@np.errstate(all="ignore")
def freeze_arm(
    experiment: RecordedExperiment,
    arm: str,
    path: Path,
    *,
    begin_ledger: Callable[[Compare], Ledger] | None = None,
) -> Reference | None:
    """Write the runs of an arm as a reference, with the experiment's claims on them; margins become absolute.

    `begin_ledger` makes the ledger that the file gets from those claims. Returns the reference that it
    replaces. Raises ComparisonError where the arm is not there, or lacks what a reference needs.
    """
    claims = freeze_claims(experiment, arm) if len(experiment.arm(arm)) > 1 else None
    ledger = begin_ledger(claims) if begin_ledger and claims else None
    return freeze(experiment, arm, path, claims, ledger)


def find_post_hoc_reason(experiment: RecordedExperiment, declared: Compare) -> Reason | None:
    """Return why the comparison is not the one hashed at launch; None if it is.

    Planning assumptions do not count as a change.
    """
    if experiment.launched_compare_sha256 is None:
        return Code.NOTHING_DECLARED()
    if experiment.launched_baseline:
        return Code.BASELINE_CHANGED(baseline=experiment.baseline, launched=experiment.launched_baseline)
    if changed := _find_change(experiment.compare, declared):
        return changed
    if compare_hash(declared) != experiment.launched_compare_sha256:
        return Code.COMPARISON_CHANGED()
    max_pairs = max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    num_added = max_pairs - experiment.launched_pairs
    return Code.PAIRS_ADDED(num_pairs=num_added) if num_added > 0 else None


def _find_change(compare: Compare, declared: Compare) -> Reason | None:
    if _count_claims(compare.claims) != _count_claims(declared.claims):
        return Code.CLAIMS_CHANGED()
    if compare.paired != declared.paired:
        return Code.PAIRING_CHANGED()
    if compare.step_one != declared.step_one:
        return Code.STEP_ONE_DROPPED()
    if (compare.alpha, compare.require) != (declared.alpha, declared.require):
        return Code.LEVEL_CHANGED()
    return None


_CLAIM_KEYS = {"metric", "window", "margin", "not_worse", "better", "below", "above", "sd", "exact", "climbs"}


def _count_claims(claims: Sequence[Claim]) -> Counter[tuple[Any, ...]]:
    """Count equal claims, ignoring their order and planning assumptions."""
    declared = [tuple(claim.model_dump(include=_CLAIM_KEYS).values()) for claim in claims]
    transforms = [claim.transform or default_transform(claim.metric) for claim in claims]
    return Counter(zip(declared, transforms, [claim.better_direction for claim in claims], strict=True))
