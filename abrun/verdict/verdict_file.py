"""Content of `verdict.json`, a stable format for other programs. Its JSON schema is `verdict.schema.json`
(written by docs/verdict_schema.py)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from abrun.errors import StoreError
from abrun.logs.log import Axis
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages import records
from abrun.messages.codes import Code, Reason
from abrun.runs.files import read_json
from abrun.runs.redaction import shortened
from abrun.verdict.decide import EXIT_CODES, ArmSection, ArmVerdict, Verdict, worst_verdict
from abrun.verdict.evidence import Evidence, Kind, select_evidence
from abrun.verdict.grids import grid_notes
from abrun.verdict.injected import measure_sensitivity
from abrun.verdict.machines import code_notes, environment_notes
from abrun.verdict.outcomes import after_looking_reason
from abrun.verdict.results import ClaimEstimate, ClaimResult, ClaimTerms, Power
from abrun.verdict.seed_noise import OneArm
from abrun.verdict.trace import describe_trace

SCHEMA_VERSION = 7
# Version 6 had a list for each kind of evidence.
_KINDS: dict[str, Kind] = {
    "descriptions": "description",
    "new_runs": "new run",
    "seed_noise": "seed noise",
    "guards": "guard",
    "step_one": "step one",
    "divergence": "divergence",
    "final_weights": "final weights",
    "savings": "cost",
}
# Records of a ClaimResult, flattened into one row.
PARTS = {"claim": ClaimTerms, "estimate": ClaimEstimate, "power": Power}
_Judged = TypeVar("_Judged", ArmVerdict, OneArm)
_ENVIRONMENT = ("python", "versions", "devices", "hosts", "drivers", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """Versions and devices, and the runs that had them."""

    runs: list[str]
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFile:
    """The verdict over all treatments (their worst) with all evidence; every record names its arm."""

    schema_version: int
    experiment: str
    baseline: str
    verdict: Verdict
    exit_code: int  # 0 MATCH, PASS or a description, 3 MISMATCH or FAIL, 4 INCONCLUSIVE, 5 INVALID
    reasons: list[Reason]  # why, claim by claim
    post_hoc: bool  # claims or options were not declared before the runs
    num_pairs: int  # pairs compared
    paired: bool  # False: the arms are independent, whatever their seeds (Welch)
    axis: Axis = "steps"  # final or prompts: the runs have scores, no curves
    claims: list[ClaimResult]
    evidence: list[Evidence]
    arms: dict[str, ArmSection]
    not_tested: list[Reason]  # what the verdict does not cover
    guessed: list[Reason]  # runs that abrun did not launch: guessed meaning of names and columns
    # Decisions of launch and reading, runs of different code, arms of different precision.
    notes: list[Reason]
    wandb: dict[str, str]  # run -> URL of its wandb run
    environments: list[RunEnvironment]
    reference: str | None  # name of the frozen reference that is the baseline or gives sigma

    def select(self, kind: Kind, arm: str | None = None) -> list[Evidence]:
        """Return the evidence of one kind, on one arm or on all."""
        return select_evidence(self.evidence, kind, arm)

    @property
    def is_description(self) -> bool:
        """True if no claim was made, so that the report only describes the arms."""
        return self.verdict == "DESCRIPTION"


def _describing(judged: _Judged) -> _Judged:
    """Return what was judged without a claim as a description, unless it shows more than that."""
    return replace(judged, verdict="DESCRIPTION") if judged.verdict == "INCONCLUSIVE" else judged


def build_verdict_file(
    experiment: RecordedExperiment,
    arms: Sequence[ArmVerdict],
    post_hoc: Reason | None,
    one_arm: OneArm | None = None,
) -> VerdictFile:
    """Build the content of `verdict.json` from the arms' verdicts.

    `post_hoc` is the reason why the comparison was not declared before the runs, or None. `one_arm`:
    without a treatment, the description of the baseline.
    """
    unclaimed = (Code.NO_CLAIM, Code.NOTHING_CLAIMED)
    arms = [
        _describing(arm) if any(reason.code in unclaimed for reason in arm.reasons) else arm for arm in arms
    ]
    one_arm = _describing(one_arm) if one_arm and not experiment.compare.claims else one_arm
    judged = [*arms, *([one_arm] if one_arm else [])]
    claims = [claim for section in judged for claim in section.claims]
    late_margins = after_looking_reason(claims) if post_hoc else None
    verdict = worst_verdict([section.verdict for section in judged])
    reasons = one_arm.reasons if one_arm else _merge_arm_reasons(arms, verdict)
    return VerdictFile(
        schema_version=SCHEMA_VERSION,
        experiment=experiment.name,
        baseline=experiment.baseline,
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=[
            *reasons,
            *experiment.left_out,
            *grid_notes(experiment, [arm.arm for arm in arms if _uses_all_runs(arm)]),
            *([Code.POST_HOC(why=post_hoc)] if post_hoc else []),
            *([late_margins] if late_margins else []),
            *code_notes(experiment),
        ],
        post_hoc=post_hoc is not None,
        num_pairs=min((arm.num_pairs for arm in arms), default=0),
        paired=experiment.compare.paired,
        axis=experiment.axis,
        claims=claims,
        evidence=[
            *(item for section in judged for item in section.evidence),
            *measure_sensitivity(experiment),
            *describe_trace(experiment),
        ],
        arms={
            arm.arm: ArmSection(**{key: getattr(arm, key) for key in ArmSection.__dataclass_fields__})
            for arm in arms
        },
        not_tested=list(dict.fromkeys(reason for arm in arms for reason in arm.not_tested)),
        guessed=list(experiment.guessed),
        notes=[*environment_notes(experiment), *experiment.decided, *_reading_problems(experiment)],
        wandb={str(run.name): run.wandb for run in experiment.runs.values() if run.wandb},
        environments=_group_environments(experiment),
        reference=experiment.reference.name if experiment.reference else None,
    )


def _uses_all_runs(arm: ArmVerdict) -> bool:
    """Return whether an arm is compared on the steps of all of its runs."""
    is_cut = any(
        reason.code == Code.LEFT_OUT_OF_METRICS and reason["covered"] is not None for reason in arm.reasons
    )
    return arm.verdict != "INVALID" and not is_cut


def _merge_arm_reasons(arms: Sequence[ArmVerdict], verdict: Verdict) -> list[Reason]:
    """Return the reasons of the arms with the overall verdict; those that all arms share come once, last."""
    shared = [reason for reason in arms[0].reasons if all(reason in arm.reasons for arm in arms)]
    own = (
        Code.OF_ARM(arm=arm.arm, reason=reason)
        for arm in arms
        if arm.verdict == verdict
        for reason in arm.reasons
        if reason not in shared
    )
    return [*own, *shared]


def _reading_problems(experiment: RecordedExperiment) -> Iterator[Reason]:
    """Yield each note on the runs' logs, with the runs that it applies to, and why a trace is not shown."""
    names: dict[str | Reason, list[str]] = {}
    for run in experiment.runs.values():
        for note in run.notes:
            names.setdefault(note, []).append(str(run))
    for note, runs in names.items():
        yield Code.NOTE_OF_RUNS(runs=runs, note=note)
    if isinstance(experiment.trace, Reason):
        yield experiment.trace


def as_json(content: VerdictFile) -> dict[str, Any]:
    """Return the content of verdict.json: a sentence for each reason, with its code next to it."""
    evidence = [evidence_row(item) for item in content.evidence]
    return {**records.as_json(content), "claims": claim_rows(content), "evidence": evidence}


def evidence_row(item: Evidence) -> dict[str, Any]:
    """Return evidence as in verdict.json: a reason among its values is a code with its values."""
    return {**records.as_json(item), "values": records.encode_reasons(item.values)}


def claim_rows(content: VerdictFile) -> list[dict[str, Any]]:
    """Return a row for each claim's result, as in verdict.json."""
    return [flatten_claim(records.as_json(result)) for result in content.claims]


def values_of(content: VerdictFile, *codes: Code) -> list[Mapping[str, Any]]:
    """Return the values of all treatments' reasons with one of these codes."""
    reasons = (reason for section in content.arms.values() for reason in section.reasons)
    return [reason.values for reason in reasons if reason.code in codes]


def flatten_claim(result: dict[str, Any]) -> dict[str, Any]:
    """Return a claim's records as one row, with its warnings as one text."""
    fields = {key: value for record_name in PARTS for key, value in result.pop(record_name).items()}
    if fields["noise"] is None:
        del fields["noise"]
    warning = "; ".join(result.pop("warnings")) or None
    return {"arm": result.pop("arm"), **fields, "warning": warning, **result}


def _unflatten_claim(row: dict[str, Any]) -> dict[str, Any]:
    """Return the records from which `flatten_claim` made a row."""
    kinds = {"limit": "limit", "ratio limit": "limit", "exact": "exact"}
    kind = kinds.get(row.get("test", ""), "within")  # of a file from before one-sided claims
    remaining = {"kind": kind, **row, "warnings": row.get("warning") or []}
    remaining.pop("warning", None)
    records_by_name = {
        record_name: {name: remaining.pop(name) for name in record.__dataclass_fields__ if name in remaining}
        for record_name, record in PARTS.items()
    }
    return remaining | records_by_name


def read_verdict_file(path: Path) -> VerdictFile:
    """Read a verdict.json of this schema version or the one before. Raises StoreError for any other file."""
    content = read_json(path)
    version = content.get("schema_version")
    if version not in (6, SCHEMA_VERSION):
        raise StoreError(
            f"{path}: schema_version is {shortened(version)}, but this abrun reads {SCHEMA_VERSION}; compare "
            "the runs again"
        )
    return parse_verdict_file(content, path)


def parse_verdict_file(content: Mapping[str, Any], path: Path) -> VerdictFile:
    """Parse the mapping that `as_json` returned; NaN and Inf may be text. Raises StoreError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        restored = records.restore_reasons(content)
        if restored["schema_version"] == 6:
            restored = _upgrade(restored)
        restored["claims"] = [_unflatten_claim(row) for row in restored["claims"]]
        for row in restored["evidence"]:
            row["values"] = records.decode_reasons(row["values"])
        return TypeAdapter(VerdictFile).validate_python(restored)
    except ValidationError as error:
        first_error = error.errors()[0]
        place = ".".join(map(str, first_error["loc"]))
        raise StoreError(f"{path}: {place}: {first_error['msg']}; compare the runs again") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StoreError(f"{path}: verdict.json: {problem}; compare the runs again") from None


def _upgrade(content: dict[str, Any]) -> dict[str, Any]:
    """Return content of version 6, with its reasons restored, as that of this version."""
    rows = [(kind, row) for name, kind in _KINDS.items() for row in content.pop(name, ())]
    sensitivity, trace = content.pop("sensitivity", None), content.pop("trace", None)
    for fault in sensitivity["faults"] if sensitivity else ():
        row = {**fault, "num_steps": sensitivity["num_steps"], "result": fault["verdict"]}
        rows.append(("injected fault", row))
    if trace:
        rows.append(("trace", {**trace, "result": "differs" if trace["first"] else "agrees"}))
    renamed = {"text": "reason", "problem": "reason"}
    parts = ("arm", "result", "reason")
    evidence = []
    for kind, row in rows:
        values = {renamed.get(name, name): value for name, value in row.items() if name != "verdict"}
        common = {name: values.pop(name) for name in parts if name in values}
        evidence.append({"kind": kind, **common, "values": values})
    is_description = content["verdict"] == "INCONCLUSIVE" and content["exit_code"] == 0
    content = {**content, "schema_version": SCHEMA_VERSION, "evidence": evidence}
    if is_description:
        arms = {arm: {**section, "verdict": "DESCRIPTION"} for arm, section in content["arms"].items()}
        content |= {"verdict": "DESCRIPTION", "arms": arms}
    return content


def _group_environments(experiment: RecordedExperiment) -> list[RunEnvironment]:
    distinct: dict[str, RunEnvironment] = {}
    for run in experiment.runs.values():
        environment = run.environment or {}
        recorded = {key: environment[key] for key in _ENVIRONMENT if environment.get(key)}
        recorded |= {"code": list(run.code)} if run.code else {}
        if recorded:
            group = distinct.setdefault(repr(recorded), RunEnvironment(runs=[], environment=recorded))
            group.runs.append(str(run))
    return list(distinct.values())
