"""Content of `verdict.json`, a stable format for other programs. Its JSON schema is `verdict.schema.json`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.log import Axis
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages import records
from abrun.messages.codes import Code, Reason
from abrun.runs.files import read_json
from abrun.runs.redaction import display_safe, shortened
from abrun.runs.traces import StoredTrace, TracedTensor
from abrun.verdict.decide import EXIT_CODES, ArmSection, ArmVerdict, Verdict, worst_verdict
from abrun.verdict.description import Description
from abrun.verdict.divergence import Divergence
from abrun.verdict.final_weights import FinalWeights
from abrun.verdict.grids import grid_notes
from abrun.verdict.guards import Guard, Saving
from abrun.verdict.injected import Sensitivity, measure_sensitivity
from abrun.verdict.machines import code_notes, environment_notes
from abrun.verdict.new_run import NewRun
from abrun.verdict.results import ClaimEstimate, ClaimResult, ClaimTerms, Power
from abrun.verdict.seed_noise import OneArm, SeedNoise
from abrun.verdict.step_one import StepOne

# The first tensor in which one step of two arms differs, as `abrun trace` found it. It judges nothing.


NEIGHBOURS = 3  # tensors kept before and after the first difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step of both arms on the same rollouts, tensor by tensor."""

    arm: str
    step: int
    seed: int
    level: float  # the probability with which clean arms differ in any tensor, at most
    limit: float  # of a tensor's ratio
    num_tensors: int
    num_beyond: int  # tensors beyond the limit
    first: str | None  # the first of them in the order of execution: forward, backward, update
    last_agreeing: str | None  # the tensor before the first
    tensors: list[TracedTensor]  # around the first difference; without one, those of the largest ratios
    reason: Reason


def describe_trace(experiment: RecordedExperiment) -> Trace | None:
    """Return the result of the experiment's last trace; None if there is none of these arms."""
    stored = experiment.trace
    if not isinstance(stored, StoredTrace) or stored.arm not in experiment.treatments or stored.limit is None:
        return None
    tensors = [replace(tensor, name=display_safe(tensor.name)) for tensor in stored.tensors]
    beyond = [index for index, tensor in enumerate(tensors) if tensor.ratio > stored.limit]
    values = {"step": stored.step, "seed": stored.seed, "num_tensors": len(tensors)}
    if beyond:
        index = beyond[0]
        first, last_agreeing = tensors[index], tensors[index - 1].name if index else None
        shown = tensors[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]
        reason = Code.TRACE_DIFFERS(
            **values,
            first=first.name,
            relative_error=first.relative_error,
            ulps=first.ulps,
            last_agreeing=last_agreeing,
            num_beyond=len(beyond),
        )
    else:
        first, last_agreeing = None, None
        shown = sorted(tensors, key=lambda tensor: tensor.ratio, reverse=True)[:NEIGHBOURS]
        reason = Code.TRACE_AGREES(
            **values, detectable_error=stored.detectable_error, num_zero=len(stored.zero)
        )
    return Trace(
        arm=stored.arm,
        step=stored.step,
        seed=stored.seed,
        level=stored.level,
        limit=stored.limit,
        num_tensors=len(tensors),
        num_beyond=len(beyond),
        first=first and first.name,
        last_agreeing=last_agreeing,
        tensors=shown,
        reason=reason,
    )


SCHEMA_VERSION = 6
_EVIDENCE = (
    "claims",
    "descriptions",
    "guards",
    "step_one",
    "divergence",
    "final_weights",
    "savings",
    "new_runs",
)
# Records of a ClaimResult, flattened into one row.
_PARTS = {"claim": ClaimTerms, "estimate": ClaimEstimate, "power": Power}
_WITHOUT_CLAIM = (Code.NO_CLAIM, Code.NOTHING_CLAIMED)  # reasons of a description
# Reasons of stored files that counted how often runs had been compared.
_REMOVED_CODES = ("read_several_times", "several_comparisons")
_REASON = "#/$defs/Reason"
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
    descriptions: list[Description]  # for arms with one run each, or without claims
    guards: list[Guard]
    step_one: list[StepOne]
    divergence: list[Divergence]
    final_weights: list[FinalWeights]
    savings: list[Saving]  # step time and peak memory relative to the baseline
    arms: dict[str, ArmSection]
    not_tested: list[Reason]  # what the verdict does not cover
    guessed: list[Reason]  # runs that abrun did not launch: guessed meaning of names and columns
    # Decisions of launch and reading, runs of different code, arms of different precision.
    notes: list[Reason]
    wandb: dict[str, str]  # run -> URL of its wandb run
    environments: list[RunEnvironment]
    sensitivity: Sensitivity | None  # None without injected faults (controls.faults)
    reference: str | None  # name of the frozen reference that is the baseline or gives sigma
    new_runs: list[NewRun] = field(default_factory=list)  # a single run beside several of the other arm
    seed_noise: list[SeedNoise] = field(default_factory=list)  # of one arm alone
    trace: Trace | None = None  # result of `abrun trace`

    @property
    def is_description(self) -> bool:
        """True if no claim was made, so that the report only describes the arms."""
        return self.verdict == "INCONCLUSIVE" and self.exit_code == 0


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
    judged = [*arms, *([one_arm] if one_arm else [])]
    verdict = worst_verdict([section.verdict for section in judged])
    reasons = one_arm.reasons if one_arm else _merge_arm_reasons(arms, verdict)
    has_no_claim = any(reason.code in _WITHOUT_CLAIM for arm in arms for reason in arm.reasons)
    has_no_claim |= one_arm is not None and not experiment.compare.claims
    return VerdictFile(
        schema_version=SCHEMA_VERSION,
        experiment=experiment.name,
        baseline=experiment.baseline,
        verdict=verdict,
        exit_code=0 if verdict == "INCONCLUSIVE" and has_no_claim else EXIT_CODES[verdict],
        reasons=[
            *reasons,
            *experiment.left_out,
            *grid_notes(experiment, [arm.arm for arm in arms if arm.verdict != "INVALID"]),
            *([Code.POST_HOC(why=post_hoc)] if post_hoc else []),
            *code_notes(experiment),
        ],
        post_hoc=post_hoc is not None,
        num_pairs=min((arm.num_pairs for arm in arms), default=0),
        paired=experiment.compare.paired,
        axis=experiment.axis,
        **{key: [entry for arm in judged for entry in getattr(arm, key, ())] for key in _EVIDENCE},
        arms={
            arm.arm: ArmSection(**{key: getattr(arm, key) for key in ArmSection.__dataclass_fields__})
            for arm in arms
        },
        not_tested=list(dict.fromkeys(reason for arm in arms for reason in arm.not_tested)),
        guessed=list(experiment.guessed),
        notes=[*environment_notes(experiment), *experiment.decided, *_reading_problems(experiment)],
        wandb={str(run.name): run.wandb for run in experiment.runs.values() if run.wandb},
        environments=_group_environments(experiment),
        sensitivity=measure_sensitivity(experiment),
        reference=experiment.reference.name if experiment.reference else None,
        seed_noise=one_arm.seed_noise if one_arm else [],
        trace=describe_trace(experiment),
    )


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


def select_arm(content: VerdictFile, arm: str) -> VerdictFile:
    """Return the verdict file as if `arm` were the only treatment."""
    evidence = {key: [record for record in getattr(content, key) if record.arm == arm] for key in _EVIDENCE}
    section = content.arms[arm]
    return replace(content, **evidence, arms={arm: section}, verdict=section.verdict)


def as_json(content: VerdictFile) -> dict[str, Any]:
    """Return the content of verdict.json: a sentence for each reason, with its code next to it."""
    return {**records.as_json(content), "claims": claim_rows(content)}


def claim_rows(content: VerdictFile) -> list[dict[str, Any]]:
    """Return a row for each claim's result, as in verdict.json."""
    return [flatten_claim(records.as_json(result)) for result in content.claims]


def values_of(content: VerdictFile, *codes: Code) -> list[Mapping[str, Any]]:
    """Return the values of all treatments' reasons with one of these codes."""
    reasons = (reason for section in content.arms.values() for reason in section.reasons)
    return [reason.values for reason in reasons if reason.code in codes]


def flatten_claim(result: dict[str, Any]) -> dict[str, Any]:
    """Return a claim's records as one row, with its warnings as one text."""
    fields = {key: value for record_name in _PARTS for key, value in result.pop(record_name).items()}
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
        for record_name, record in _PARTS.items()
    }
    return remaining | records_by_name


def read_verdict_file(path: Path) -> VerdictFile:
    """Read a verdict.json of this schema version. Raises StoreError for any other file."""
    content = read_json(path)
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise StoreError(
            Code.OTHER_VERDICT_SCHEMA(path=path, version=shortened(version), readable=SCHEMA_VERSION)
        )
    return parse_verdict_file(content, path)


def parse_verdict_file(content: Mapping[str, Any], path: Path) -> VerdictFile:
    """Parse the mapping that `as_json` returned; NaN and Inf may be text. Raises StoreError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        restored = records.restore_reasons(_with_known_codes(content))
        restored["claims"] = [_unflatten_claim(row) for row in restored["claims"]]
        return TypeAdapter(VerdictFile).validate_python(restored)
    except ValidationError as error:
        first_error = error.errors()[0]
        place = ".".join(map(str, first_error["loc"]))
        raise StoreError(Code.VERDICT_DAMAGED(path=path, field=place, problem=first_error["msg"])) from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # such as a code of a newer version
        problem = f"{type(error).__name__}: {error}"
        raise StoreError(Code.VERDICT_DAMAGED(path=path, field="verdict.json", problem=problem)) from None


def _with_known_codes(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with a code of today for every note and every reason of a removed code: its text."""
    codes_and_texts = zip(content["note_codes"], content["notes"], strict=True)
    notes = [records.stored_reason(code, text) for code, text in codes_and_texts]
    reasons = [
        records.encode_reasons(Code.FOREIGN_TEXT(text=text)) if code["code"] in _REMOVED_CODES else code
        for code, text in zip(content["reason_codes"], content["reasons"], strict=True)
    ]
    return {**content, "note_codes": records.encode_reasons(notes), "reason_codes": reasons}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of `verdict.json`; `verdict.schema.json` in this package is a copy."""
    from pydantic import TypeAdapter

    schema = _add_code_fields(TypeAdapter(VerdictFile).json_schema(mode="serialization"))
    schema = _allow_non_finite_numbers(schema)
    _flatten_claim_schema(schema["$defs"])
    schema["$defs"]["Number"] = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "abrun verdict"}


def _flatten_claim_schema(definitions: dict[str, Any]) -> None:
    """Change the schema of a claim's result to that of its row."""
    result = definitions["ClaimResult"]
    for record_name, record in _PARTS.items():
        properties = definitions.pop(record.__name__)
        del result["properties"][record_name]
        result["properties"] |= properties["properties"]
        result["required"] = [*result["required"], *properties.get("required", ())]
    del result["properties"]["warnings"]
    result["properties"]["warning"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    result["required"].remove("claim")


def _add_code_fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of `records.as_json`: a sentence for each reason, with its code next to it."""
    for record in (schema, *schema.get("$defs", {}).values()):
        properties = record.get("properties", {})
        for name, content in list(properties.items()):
            if _REASON in repr(content):
                is_list = content.get("type") == "array"
                codes_field = records.codes_key(name, list[Reason] if is_list else Reason)
                properties |= {name: _replace_reasons_by_text(content), codes_field: content}
                if name in record.get("required", ()):
                    record["required"].append(codes_field)
    if "Code" in schema.get("$defs", {}):
        schema["$defs"]["Code"] = {"type": "string", "description": "one of docs/reference/codes.md"}
        schema["$defs"]["Reason"]["required"] = ["code", "values"]
    return schema


def _replace_reasons_by_text(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_replace_reasons_by_text(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") == _REASON:
        return {"type": "string"}
    return {key: _replace_reasons_by_text(entry) for key, entry in schema.items()}


def _allow_non_finite_numbers(schema: Any) -> Any:
    """Return the schema with NaN and Inf allowed as text, since JSON has no numbers for them."""
    if isinstance(schema, list):
        return [_allow_non_finite_numbers(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number":
        return {"$ref": "#/$defs/Number"}
    return {key: _allow_non_finite_numbers(value) for key, value in schema.items()}


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
