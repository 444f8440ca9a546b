"""Compare the arms of an experiment: `compare_experiment` reads the store, decides, and writes the report.

Sources -> validity, guards, evidence -> verdict -> plots and report. Importing this pulls in scipy
(half a second): the command line imports it when it compares, not before.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.compare.metrics import default_transform
from abrun.compare.report import FORMATS, terminal_summary, write_report
from abrun.compare.sources import Experiment, load_experiment, refuse_unknown_metrics
from abrun.compare.verdict import EXIT_CODES, ArmVerdict, Verdict, judge_arm, worst
from abrun.errors import ComparisonError
from abrun.plan import compare_hash
from abrun.recipe import Primary

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The verdict over all treatments: the worst of theirs."""

    verdict: Verdict
    exit_code: int  # 0 MATCH, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID
    reasons: list[str]
    post_hoc: bool
    arms: list[ArmVerdict]
    content: dict[str, Any]  # what verdict.json holds
    files: list[Path]

    def summary(self) -> "RenderableType":
        """For a terminal: the verdict first, then why, then the evidence, then the files."""
        return terminal_summary(self.content, self.files)


def compare_experiment(
    experiment_dir: Path,
    *,
    primaries: Sequence[Primary] | None = None,
    output: Path | None = None,
    formats: Collection[str] = FORMATS,
) -> Comparison:
    """Judge every treatment against the baseline, and write the report (default: to `report/` inside).

    `primaries` replaces the recipe's claims; others than those declared at launch make the verdict post hoc.
    Raises ComparisonError for a claim that cannot be read on these runs, StoreError for files that cannot be.
    """
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise ComparisonError(f"--format: got {unknown[0]!r}; allowed: {', '.join(FORMATS)}")
    experiment = load_experiment(experiment_dir)
    claims = experiment.recipe.compare.primary if primaries is None else primaries
    if primaries is not None:
        refuse_unknown_metrics(experiment, primaries)
    arms = [judge_arm(experiment, arm, claims) for arm in experiment.treatments]
    verdict = worst([arm.verdict for arm in arms])
    post_hoc = is_post_hoc(experiment, claims)
    reasons = [
        f"{arm.arm}: {reason}" if len(arms) > 1 else reason
        for arm in arms
        if arm.verdict == verdict
        for reason in arm.reasons
    ]
    if post_hoc:
        reasons.append("post hoc: the comparison is not the one declared when the experiment was launched")
    content = _content(experiment, verdict, reasons, post_hoc, arms)
    files = write_report(experiment, content, arms, output or experiment_dir / "report", formats)
    return Comparison(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=reasons,
        post_hoc=post_hoc,
        arms=arms,
        content=content,
        files=files,
    )


def is_post_hoc(experiment: Experiment, claims: Sequence[Primary]) -> bool:
    """Whether the comparison differs from the one hashed at launch; planning assumptions are no claim."""
    declared = experiment.recipe.compare.primary
    changed = [_claim(primary) for primary in claims] != [_claim(primary) for primary in declared]
    return changed or compare_hash(experiment.recipe) != experiment.launched_compare_sha256


def _claim(primary: Primary) -> dict[str, Any]:
    transform = primary.transform or default_transform(primary.metric)
    return {**primary.model_dump(include={"metric", "window", "margin"}), "transform": transform}


def _content(
    experiment: Experiment, verdict: Verdict, reasons: list[str], post_hoc: bool, arms: list[ArmVerdict]
) -> dict[str, Any]:
    """verdict.json: evidence as flat lists in which every entry names its arm, and a section an arm."""
    evidence = ("primaries", "guards", "step_one", "divergence", "savings")
    dumps = [asdict(arm) for arm in arms]
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": experiment.name,
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "reasons": reasons,
        "post_hoc": post_hoc,
        "num_pairs": min(arm.num_pairs for arm in arms),
        **{key: [entry for dump in dumps for entry in dump[key]] for key in evidence},
        "arms": {
            dump["arm"]: {key: value for key, value in dump.items() if key not in (*evidence, "arm")}
            for dump in dumps
        },
    }
