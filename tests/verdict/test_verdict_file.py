"""verdict.json keeps the contract that its published schema states."""

import json
import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest

from abrun.errors import StoreError
from abrun.messages import records, sentence
from abrun.messages.codes import Code, Reason
from abrun.runs.files import json_text
from abrun.verdict.evidence import Kind
from abrun.verdict.verdict_file import as_json, read_verdict_file
from tests.verdict.simulate import edit_rows
from tests.verdict.verdicts import claim, verdict

WRITER = runpy.run_path(str(Path(__file__).parents[2] / "docs/verdict_schema.py"))
SCHEMA = json.loads(WRITER["SCHEMA"].read_text())


def test_the_published_schema_is_that_of_the_code():
    assert WRITER["json_schema"]() == SCHEMA, "write it again: python docs/verdict_schema.py"


def nan(experiment_dir):
    edit_rows(experiment_dir / "treatment/seed-1", lambda row: row.update({"train/grad_norm": "NaN"}))


def exchanged(experiment_dir):
    left, right = (experiment_dir / arm / "seed-0" for arm in ("baseline", "treatment"))
    left.rename(experiment_dir / "x")
    right.rename(left)
    (experiment_dir / "x").rename(right)


SIGMA = {"compare": {"claims": [{"metric": "train/reward", "margin": "1 sigma"}], "interim": [3, 5]}}
MANY = {"arms": {"baseline": {}, "a": {"policy.dtype": "bfloat16"}, "b": {"policy.logprobs.impl": "chunked"}}}


@pytest.mark.parametrize(
    ("scenario", "change"),
    [({}, None), ({"shift": 0.1}, None), ({}, nan), ({}, exchanged), (SIGMA, None), (MANY, None)],
)
def test_every_verdict_fits_it(simulated, judged, scenario, change):
    experiment_dir = simulated(**scenario)
    if change:
        change(experiment_dir)
    judged(experiment_dir)
    path = experiment_dir / "report/verdict.json"
    content = json.loads(path.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    assert json.loads(json_text(as_json(read_verdict_file(path)))) == content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "schema_version is 2, but this abrun reads 7"),
        ({"schema_version": None}, "schema_version is null"),
        ({"num_pairs": "many"}, "num_pairs: "),
        ({"claims": [{"arm": "treatment"}]}, "claims.0.claim.metric: "),
    ],
)
def test_a_file_of_another_shape_is_one_line(tmp_path, change, said):
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(as_json(verdict([claim()])) | change))
    with pytest.raises(StoreError) as refused:
        read_verdict_file(path)
    assert said in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"claims": None},
        {"claims": ["claim"]},
        {"reasons": ["new"], "reason_codes": [{"code": "no_claim", "values": []}]},
        {"reasons": ["new"], "reason_codes": [{"code": "of_a_newer_version", "values": {}}] * 2},
    ],
)
def test_a_file_with_codes_that_cannot_be_read_is_refused(tmp_path, change):
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(as_json(verdict([claim()])) | change))
    with pytest.raises(StoreError, match="; compare the runs again"):
        read_verdict_file(path)


def test_a_file_with_device_time_and_counted_comparisons_is_read_without_them(tmp_path):
    path = tmp_path / "verdict.json"
    content = as_json(verdict([claim()]))
    expected = verdict([claim()])
    path.write_text(
        json.dumps(
            content
            | {
                "spent": {"device": "GPU", "held_s": 200.0, "useful_share": 0.8},
                "readings": [{"arm": "treatment", "num_pairs": [3, 5], "false_match": 0.08}],
                "reasons": [*content["reasons"], "these runs were compared 2 times"],
                "reason_codes": [
                    *content["reason_codes"],
                    {"code": "read_several_times", "values": {"num_pairs": [3, 5], "level": 0.05}},
                ],
            }
        )
    )
    repeated = Code.FOREIGN_TEXT(text="these runs were compared 2 times")
    assert read_verdict_file(path) == replace(expected, reasons=[*expected.reasons, repeated])


@dataclass
class Noted:
    problem: Reason | None
    reasons: list[Reason]
    exit_code: int


def test_a_reason_without_a_known_code_is_read_as_its_text(tmp_path):
    path = tmp_path / "verdict.json"
    content = as_json(verdict([claim()])) | {"notes": ["ran hours apart"]}
    content["note_codes"] = [{"code": "hours_apart", "values": {"gap_s": 7200.0}}]
    step_one = {"kind": "step one", "arm": "treatment", "result": "redefined", "reason": "differs alone"}
    code = {"code": "reward_redefined", "values": {"seed": 3}}
    content["evidence"] = [step_one | {"reason_code": code, "values": {"metric": "train/reward"}}]
    path.write_text(json.dumps(content))
    restored = read_verdict_file(path)
    assert restored.notes == [Code.FOREIGN_TEXT(text="ran hours apart")]
    assert restored.evidence[0].reason == Code.FOREIGN_TEXT(text="differs alone")


def test_reasons_are_read_from_the_codes_beside_their_sentences():
    nested = Reason(Code.NO_CLAIM, {"inner": Reason(Code.NOTHING_CLAIMED), "seeds": [1, 2]})
    for noted in (Noted(nested, [nested], 3), Noted(None, [], 0)):
        content = json.loads(json.dumps(records.as_json([noted])))
        assert Noted(**records.restore_reasons(content)[0]) == noted


def test_a_claim_of_a_file_from_before_one_sided_claims_has_its_kind(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    stored = json.loads((root / "docs/evidence/smollm2-fp32-head/verdict.json").read_text())
    for row in stored["claims"]:
        for key in ("kind", "better", "improvement", "p_equivalence_holm", "axis", "unit"):
            del row[key]
    (tmp_path / "verdict.json").write_text(json.dumps(stored))
    content = read_verdict_file(tmp_path / "verdict.json")
    assert [claim.claim.kind for claim in content.claims] == ["limit", "limit", "within"] * 2


def test_the_evidence_of_a_file_of_version_6_is_read() -> None:
    path = Path(__file__).parents[2] / "docs/evidence/smollm2-fp32-head/verdict.json"
    stored, content = json.loads(path.read_text()), read_verdict_file(path)
    lists: dict[Kind, str] = {
        "guard": "guards",
        "step one": "step_one",
        "divergence": "divergence",
        "cost": "savings",
    }
    for kind, name in lists.items():
        read = [{**item.values, "arm": item.arm, "result": item.result} for item in content.select(kind)]
        assert len(read) == len(stored[name])
        for item, row in zip(read, stored[name], strict=True):
            assert row.keys() - item.keys() <= {"text", "text_code"}
            assert all(item[key] == value for key, value in row.items() if key in item)
    assert [sentence(guard.reason) for guard in content.select("guard") if guard.reason] == [
        row["text"] for row in stored["guards"]
    ]
    faults = content.select("injected fault")
    assert [(fault["fault"], fault.result) for fault in faults] == [
        (fault["fault"], fault["verdict"]) for fault in stored["sensitivity"]["faults"]
    ]
    assert {fault["num_steps"] for fault in faults} == {stored["sensitivity"]["num_steps"]}
