"""What `verdict.json` holds: the contract with whoever reads it. Its JSON schema is `verdict.schema.json`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.messages import records
from abrun.reasons import Code, Reason
from abrun.recorded.claim_tests import ClaimTest
from abrun.recorded.experiment import RecordedExperiment
from abrun.redaction import shortened
from abrun.runs.files import read_as, read_json
from abrun.verdict.decide import EXIT_CODES, ArmSection, ArmVerdict, Verdict, worst
from abrun.verdict.description import Description
from abrun.verdict.divergence import Divergence
from abrun.verdict.final_weights import FinalWeights
from abrun.verdict.grids import grid_notes
from abrun.verdict.guards import Guard, Saving
from abrun.verdict.injected import Sensitivity, sensitivity
from abrun.verdict.machines import code_notes, stack_notes
from abrun.verdict.readings import Readings, count_readings, reading_notes
from abrun.verdict.results import ClaimResult, ClaimTerms, Estimate, Power
from abrun.verdict.step_one import StepOne

SCHEMA_VERSION = 6
_EVIDENCE = (
    "claims",
    "descriptions",
    "guards",
    "step_one",
    "divergence",
    "final_weights",
    "savings",
)
_PARTS = {"claim": ClaimTerms, "estimate": Estimate, "power": Power}  # of a result, which make one row
_REASON = "#/$defs/Reason"
_ENVIRONMENT = ("python", "versions", "devices", "hosts", "drivers", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOfRuns:
    """Versions and devices, and the runs that had them."""

    runs: list[str]
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFile:
    """The verdict over all treatments, the worst of theirs, and all evidence; every entry names its arm."""

    schema_version: int
    experiment: str
    baseline: str
    verdict: Verdict
    exit_code: int  # 0 MATCH, 3 MISMATCH, 4 INCONCLUSIVE, 5 INVALID
    reasons: list[Reason]
    post_hoc: bool
    num_pairs: int
    paired: bool  # False: the arms' runs are independent, whatever their seeds (Welch)
    claims: list[ClaimResult]
    descriptions: list[Description]  # of arms with one run each, or where nothing is claimed
    guards: list[Guard]
    step_one: list[StepOne]
    divergence: list[Divergence]
    final_weights: list[FinalWeights]
    savings: list[Saving]
    arms: dict[str, ArmSection]
    readings: list[Readings]  # of each treatment whose claims were tested, this comparison among them
    not_tested: list[Reason]
    guessed: list[Reason]  # of runs that abrun did not launch: what names and columns were taken for
    # What launch and reading had to decide, pairs that were placed differently, arms of other precision
    notes: list[Reason]
    wandb: dict[str, str]  # by run, where its mirror is seen
    environments: list[EnvironmentOfRuns]
    sensitivity: Sensitivity | None  # of injected faults; None: the experiment has none (controls.faults)
    reference: str | None  # name of the frozen ensemble that was the baseline, or that sigma comes from


def verdict_file(
    experiment: RecordedExperiment,
    arms: Sequence[ArmVerdict],
    post_hoc: Reason | None,
    earlier: Collection[ClaimTest] = (),
) -> VerdictFile:
    """`post_hoc` says why the comparison was not declared before the runs; None where it was.

    `earlier`: the comparisons that reports beside this one were written for.
    """
    verdict = worst([arm.verdict for arm in arms])
    shared = [reason for reason in arms[0].reasons if all(reason in arm.reasons for arm in arms)]
    reasons = [
        *(
            Code.OF_ARM(arm=arm.arm, reason=reason)
            for arm in arms
            if arm.verdict == verdict
            for reason in arm.reasons
            if reason not in shared
        ),
        *shared,
    ]
    readings = [count_readings(experiment, arm.arm, earlier) for arm in tested(arms)]
    notes = _reading_notes(experiment, readings, post_hoc, len(arms))
    return VerdictFile(
        schema_version=SCHEMA_VERSION,
        experiment=experiment.name,
        baseline=experiment.baseline,
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=[
            *reasons,
            *experiment.left_out,
            *grid_notes(experiment, [one.arm for one in arms if one.verdict != "INVALID"]),
            *([Code.POST_HOC(why=post_hoc)] if post_hoc else []),
            *notes,
            *code_notes(experiment),
        ],
        post_hoc=post_hoc is not None,
        num_pairs=min(arm.num_pairs for arm in arms),
        paired=experiment.compare.paired,
        **{key: [entry for arm in arms for entry in getattr(arm, key)] for key in _EVIDENCE},
        arms={
            arm.arm: ArmSection(**{key: getattr(arm, key) for key in ArmSection.__dataclass_fields__})
            for arm in arms
        },
        readings=readings,
        not_tested=list(dict.fromkeys(reason for arm in arms for reason in arm.not_tested)),
        guessed=list(experiment.guessed),
        notes=[
            *stack_notes(experiment),
            *experiment.decided,
            *_notes_of_runs(experiment),
        ],
        wandb={str(run.name): run.wandb for run in experiment.runs.values() if run.wandb},
        environments=_environments(experiment),
        sensitivity=sensitivity(experiment),
        reference=experiment.reference.name if experiment.reference else None,
    )


def _notes_of_runs(experiment: RecordedExperiment) -> Iterator[Reason]:
    """Yield each note of the runs' logs once, with the runs that it is on."""
    names: dict[str | Reason, list[str]] = {}
    for run in experiment.runs.values():
        for note in run.notes:
            names.setdefault(note, []).append(str(run))
    for note, runs in names.items():
        yield Code.NOTE_OF_RUNS(runs=runs, note=note)


def tested(arms: Sequence[ArmVerdict]) -> list[ArmVerdict]:
    """The treatments of which a claim was tested: of an INVALID one nothing is shown."""
    return [
        arm
        for arm in arms
        if arm.verdict != "INVALID" and any(one.result != "not tested" for one in arm.claims)
    ]


def _reading_notes(
    experiment: RecordedExperiment, readings: Sequence[Readings], post_hoc: Reason | None, num_arms: int
) -> list[Reason]:
    """Return the notes on comparisons made before; none where the claims were declared before the runs."""
    if post_hoc is None and experiment.directory is not None and not experiment.regression:
        return []
    paired = experiment.compare.paired
    return [note for one in readings for note in reading_notes(one, paired=paired, arms=num_arms)]


def of_arm(content: VerdictFile, arm: str) -> VerdictFile:
    """Return the verdict file as if `arm` were the only treatment."""
    evidence = {key: [one for one in getattr(content, key) if one.arm == arm] for key in _EVIDENCE}
    section = content.arms[arm]
    return replace(content, **evidence, arms={arm: section}, verdict=section.verdict)


def as_json(content: VerdictFile) -> dict[str, Any]:
    """Return what verdict.json holds: sentences where reasons stand, and their codes beside them."""
    return {**records.as_json(content), "claims": claim_rows(content)}


def claim_rows(content: VerdictFile) -> list[dict[str, Any]]:
    """Return a row for each claim's result, as verdict.json has it."""
    return [row_of_claim(records.as_json(result)) for result in content.claims]


def values_of(content: VerdictFile, *codes: Code) -> list[Mapping[str, Any]]:
    """Return the values of all treatments' reasons with one of these codes."""
    reasons = (reason for section in content.arms.values() for reason in section.reasons)
    return [reason.values for reason in reasons if reason.code in codes]


def row_of_claim(result: dict[str, Any]) -> dict[str, Any]:
    """Return a claim's parts side by side, and its warnings as one text."""
    parts = {key: value for part in _PARTS for key, value in result.pop(part).items()}
    warning = "; ".join(result.pop("warnings")) or None
    return {"arm": result.pop("arm"), **parts, "warning": warning, **result}


def _parts_of_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return what `row_of_claim` made a row of."""
    rest = {**row, "warnings": row.get("warning") or []}
    rest.pop("warning", None)
    parts = {
        part: {name: rest.pop(name) for name in record.__dataclass_fields__ if name in rest}
        for part, record in _PARTS.items()
    }
    return rest | parts


def read_verdict_file(path: Path) -> VerdictFile:
    """Read a verdict.json of this schema version. Raises StoreError for any other file."""
    content = read_json(path)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise StoreError(
            Code.OTHER_VERDICT_SCHEMA(path=path, version=shortened(version), readable=SCHEMA_VERSION)
        )
    return verdict_file_of(content, path)


def verdict_file_of(content: Mapping[str, Any], path: Path) -> VerdictFile:
    """Return what `as_json` made a mapping of; NaN and Inf may be text. Raises StoreError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        restored = records.with_reasons(_with_note_codes(content))
        restored["claims"] = [_parts_of_row(row) for row in restored["claims"]]
        return TypeAdapter(VerdictFile).validate_python(restored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise StoreError(Code.VERDICT_DAMAGED(path=path, field=place, problem=first["msg"])) from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # such as a code of a newer version
        problem = f"{type(error).__name__}: {error}"
        raise StoreError(Code.VERDICT_DAMAGED(path=path, field="verdict.json", problem=problem)) from None


def _with_note_codes(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with a code for every note; a note whose code is unknown today becomes its text."""
    noted = zip(content["note_codes"], content["notes"], strict=True)
    notes = [records.stored_reason(code, text) for code, text in noted]
    return {**content, "note_codes": records.coded(notes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _VerdictAlone:
    """The field of verdict.json that is the same in every schema version."""

    verdict: Verdict


def read_verdict(path: Path) -> Verdict:
    """Read the verdict alone, of any schema version. Raises StoreError."""
    return read_as(_VerdictAlone, path).verdict


def json_schema() -> dict[str, Any]:
    """The schema of `verdict.json`, as `verdict.schema.json` beside this module holds it."""
    from pydantic import TypeAdapter

    schema = _with_codes(TypeAdapter(VerdictFile).json_schema(mode="serialization"))
    schema = _with_numbers_of_the_store(schema)
    _flatten_claims(schema["$defs"])
    schema["$defs"]["Number"] = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "abrun verdict"}


def _flatten_claims(records_of: dict[str, Any]) -> None:
    """Change the schema of a claim's result to that of its row."""
    result = records_of["ClaimResult"]
    for part, record in _PARTS.items():
        properties = records_of.pop(record.__name__)
        del result["properties"][part]
        result["properties"] |= properties["properties"]
        result["required"] = [*result["required"], *properties.get("required", ())]
    del result["properties"]["warnings"]
    result["properties"]["warning"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    result["required"].remove("claim")


def _with_codes(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of `records.as_json`: sentences where reasons stand, and their codes beside them."""
    for record in (schema, *schema.get("$defs", {}).values()):
        properties = record.get("properties", {})
        for name, content in list(properties.items()):
            if _REASON in repr(content):
                several = content.get("type") == "array"
                beside = records.name_of_codes(name, list[Reason] if several else Reason)
                properties |= {name: _sentences(content), beside: content}
                if name in record.get("required", ()):
                    record["required"].append(beside)
    if "Code" in schema.get("$defs", {}):
        schema["$defs"]["Code"] = {"type": "string", "description": "one of docs/codes.md"}
        schema["$defs"]["Reason"]["required"] = ["code", "values"]
    return schema


def _sentences(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_sentences(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") == _REASON:
        return {"type": "string"}
    return {key: _sentences(entry) for key, entry in schema.items()}


def _with_numbers_of_the_store(schema: Any) -> Any:
    """JSON has no NaN and Inf: the store writes them as text."""
    if isinstance(schema, list):
        return [_with_numbers_of_the_store(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {"$ref": "#/$defs/Number"}
    return {key: _with_numbers_of_the_store(value) for key, value in schema.items()}


def _environments(experiment: RecordedExperiment) -> list[EnvironmentOfRuns]:
    distinct: dict[str, EnvironmentOfRuns] = {}
    for run in experiment.runs.values():
        environment = run.environment or {}
        known = {key: environment[key] for key in _ENVIRONMENT if environment.get(key)}
        known |= {"code": list(run.code)} if run.code else {}
        if known:
            one = distinct.setdefault(repr(known), EnvironmentOfRuns(runs=[], environment=known))
            one.runs.append(str(run))
    return list(distinct.values())
