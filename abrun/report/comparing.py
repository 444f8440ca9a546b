"""Comparison of the arms of an experiment, from sources to the written report.

Sources -> Experiment -> validity, guards, evidence -> verdict -> plots and report. Importing this module
loads numpy and scipy, so the command line imports it only to compare.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from abrun.errors import ComparisonError
from abrun.experiment.plan import compare_hash
from abrun.extras import missing_package
from abrun.metric_names import default_transform
from abrun.present.figures import FIGURE_FORMATS
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim, Compare
from abrun.recorded.claim_tests import find_earlier_claim_tests, make_claim_test
from abrun.recorded.experiment import RecordedExperiment, Reference, resolve_claims
from abrun.recorded.ledger import Ledger
from abrun.recorded.reference import freeze, load_reference, make_regression_experiment
from abrun.recorded.sources import ReadingOptions, SourceContents, read_sources
from abrun.regular_files import exists, is_file
from abrun.report.next_step import NextStep, next_steps
from abrun.report.write import FORMATS, choose_report_folder, render_terminal, writable_formats, write_report
from abrun.verdict.decide import ArmVerdict, Verdict, judge
from abrun.verdict.margins import freeze_claims
from abrun.verdict.verdict_file import VerdictFile, as_json, build_verdict_file, read_verdict, tested_arms

if TYPE_CHECKING:
    from rich.console import RenderableType

# Folders of reports in the directory of an experiment.
REPORT, REPORT_AGAINST_REFERENCE = "report", "report-against-reference"
# Suffix, followed by the hash of the comparison, if options change the declared comparison. The report of the
# declared one stays.
POST_HOC = "-post-hoc-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict on all treatments, with its evidence and the files of the report."""

    content: VerdictFile
    arms: list[ArmVerdict]
    files: list[Path]
    next_steps: list[NextStep]
    declared: Path | None = None  # folder of the report on the declared comparison, if this one is post hoc

    @property
    def verdict(self) -> Verdict:
        return self.content.verdict

    @property
    def exit_code(self) -> int:
        return self.content.exit_code

    def as_json(self) -> dict[str, Any]:
        """Return the content of verdict.json."""
        return as_json(self.content)

    def summary(self) -> "RenderableType":
        """Return the verdict, its reasons, the evidence and the files, for a terminal."""
        return render_terminal(self.content, self.files, self.next_steps, self.declared)


class CompareOptions(TypedDict, total=False):
    """Keyword arguments of `compare_contents`."""

    claims: Sequence[Claim] | None
    reference: Path | None
    arm: str | None
    step_one: bool
    output: Path | None
    formats: Collection[str] | None
    command: str | None


def compare_sources(
    sources: Sequence[str], reading: ReadingOptions, **options: Unpack[CompareOptions]
) -> Comparison:
    """Read runs from wherever they are, judge them, and write the report; see `compare_contents`."""
    return compare_contents(read_sources(sources, reading), **options)


def compare_contents(
    contents: SourceContents,
    *,
    claims: Sequence[Claim] | None = None,
    reference: Path | None = None,
    arm: str | None = None,
    step_one: bool = True,
    output: Path | None = None,
    formats: Collection[str] | None = None,
    command: str | None = None,
) -> Comparison:
    """Judge runs that have been read, and write the report.

    With a `reference`, or a single arm whose recipe names one, `arm` is compared with the frozen reference
    by the claims of the reference; an experiment with several arms requires `arm`. `claims` replace the
    declared claims. By default the report of a stored experiment goes into its directory, into a folder of
    its own if the options change the declared comparison; for other runs see `choose_report_folder`. The
    report names the `command` that made it. Raise StoreError or ComparisonError for runs that cannot be
    read.
    """
    directory, reading = contents.directory, contents.reading
    experiment = contents.experiment(allows_one_arm=reference is not None, may_unpair=claims is None)
    folder = REPORT
    if reference is not None and reading.versions_differ:
        raise ComparisonError(Code.VERSIONS_DIFFER_OF_REFERENCE())
    if reference is not None or (experiment.reference and not experiment.treatments):
        frozen = load_reference(reference) if reference else experiment.reference
        assert frozen is not None
        has_several_arms = len(experiment.arms) > 1
        if arm is None and has_several_arms:
            raise ComparisonError(Code.REFERENCE_NEEDS_ARM(experiment=experiment.name, arms=experiment.arms))
        experiment = make_regression_experiment(experiment, frozen, arm or experiment.baseline)
        folder = f"{REPORT_AGAINST_REFERENCE}-{arm}" if has_several_arms else REPORT_AGAINST_REFERENCE
    elif arm is not None:
        raise ComparisonError(Code.ARM_WITHOUT_REFERENCE(arm=arm))
    declared = experiment.compare
    experiment = with_options(experiment, claims, step_one=step_one, unpaired=reading.unpaired)
    claims = sorted(experiment.compare.claims, key=str)  # in whatever order they were given
    compare_sha256 = compare_hash(experiment.compare.model_copy(update={"claims": claims}))
    if directory is None:
        source_names = [*contents.sources, *([str(reference)] if reference else [])]
        reading_options = [*map(str, reading.given_options.items()), str(arm), compare_sha256]
        experiment = replace(
            experiment, request_sha256=_sha256([*map(os.path.abspath, source_names), *reading_options])
        )
    default_folder = directory / folder if directory else choose_report_folder(experiment)
    declared_folder = None
    if directory and _find_change(experiment.compare, declared):
        declared_folder, default_folder = (
            default_folder,
            default_folder.with_name(f"{folder}{POST_HOC}{compare_sha256[:8]}"),
        )
    if output is None and default_folder.is_symlink():  # a stranger's could lead anywhere
        raise ComparisonError(Code.REPORT_IS_LINK(folder=default_folder))
    comparison = compare(
        experiment, declared=declared, output=output or default_folder, formats=formats, command=command
    )
    has_declared_report = (
        declared_folder is not None and output is None and exists(declared_folder / "verdict.json")
    )
    return replace(comparison, declared=declared_folder if has_declared_report else None)


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def read_last_verdict(experiment_dir: Path) -> Verdict | None:
    """Return the verdict of the report in an experiment's directory; None if there is no report."""
    for folder in (REPORT, REPORT_AGAINST_REFERENCE):
        path = experiment_dir / folder / "verdict.json"
        if is_file(path):
            return read_verdict(path)
    return None


# Values that overflow are judged as infinite.
@np.errstate(all="ignore")
def compare(
    experiment: RecordedExperiment,
    *,
    output: Path,
    declared: Compare | None = None,
    formats: Collection[str] | None = None,
    command: str | None = None,
) -> Comparison:
    """Judge every treatment against the baseline, and write the report.

    `declared` is the comparison before `with_options` changed it. Raise ComparisonError if there is nothing
    to compare.
    """
    formats = writable_formats() if formats is None else formats
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise ComparisonError(Code.NOT_ALLOWED(field="--format", got=repr(unknown[0]), allowed=FORMATS))
    if set(formats) & set(FIGURE_FORMATS) and (missing := missing_package("figures")):
        raise ComparisonError(Code.NO_FIGURES(missing=missing))
    if not experiment.treatments and experiment.injected:
        raise ComparisonError(Code.ONLY_INJECTED_FAULTS(experiment=experiment.name))
    if not experiment.treatments:
        raise ComparisonError(Code.ONE_ARM(experiment=experiment.name, arm=experiment.baseline))
    arms = judge(experiment, experiment.compare.claims)
    post_hoc_reason = find_post_hoc_reason(experiment, declared or experiment.compare)
    content = build_verdict_file(experiment, arms, post_hoc_reason, find_earlier_claim_tests(output))
    readings = [make_claim_test(experiment, arm.arm) for arm in tested_arms(arms)]
    files = write_report(experiment, content, output, formats, command, readings)
    steps_to_take = next_steps(experiment, content, command)
    return Comparison(content=content, arms=arms, files=files, next_steps=steps_to_take)


def with_options(
    experiment: RecordedExperiment,
    claims: Sequence[Claim] | None = None,
    *,
    step_one: bool = True,
    unpaired: bool = False,
) -> RecordedExperiment:
    """Return the experiment with the comparison that these options ask for.

    `claims` replace the declared claims, which in another order are the same. Other claims than those
    declared at launch make the verdict post hoc, as do leaving out step one and not pairing the runs. Raises
    ComparisonError for a claim that cannot be read on these runs.
    """
    changes: dict[str, Any] = {}
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
    if changed := _find_change(experiment.compare, declared):
        return changed
    if compare_hash(declared) != experiment.launched_compare_sha256:
        return Code.COMPARISON_CHANGED()
    max_pairs = max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    num_added = max_pairs - experiment.launched_pairs
    if num_added > 0:
        return Code.PAIRS_ADDED(num_pairs=num_added)
    return None


def _find_change(compare: Compare, declared: Compare) -> Reason | None:
    if _count_claims(compare.claims) != _count_claims(declared.claims):
        return Code.CLAIMS_CHANGED()
    if compare.paired != declared.paired:
        return Code.PAIRING_CHANGED()
    if compare.step_one != declared.step_one:
        return Code.STEP_ONE_DROPPED()
    return None


_CLAIM_KEYS = {"metric", "window", "margin", "below", "above", "exact", "climbs"}


def _count_claims(claims: Sequence[Claim]) -> Counter[tuple[Any, ...]]:
    """Count equal claims, ignoring their order and planning assumptions."""
    return Counter(
        (*claim.model_dump(include=_CLAIM_KEYS).values(), claim.transform or default_transform(claim.metric))
        for claim in claims
    )
