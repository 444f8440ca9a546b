"""verdict.json keeps the contract that its published schema states."""

import json
from pathlib import Path

import jsonschema
import pytest

import abrun.compare
from abrun.compare.judge.verdict_file import json_schema
from tests.compare.simulate import edit_rows

SCHEMA = Path(abrun.compare.__file__).parent / "judge/verdict.schema.json"
WRITE = "python -c 'import json; from abrun.compare.judge.verdict_file import json_schema; "
WRITE += f"print(json.dumps(json_schema(), indent=1))' > abrun/compare/judge/{SCHEMA.name}"


def test_the_published_schema_is_that_of_the_code():
    assert json.loads(SCHEMA.read_text()) == json_schema(), f"write it again: {WRITE}"


def nan(experiment_dir):
    edit_rows(experiment_dir / "treatment/seed-1", lambda row: row.update({"train/grad_norm": "NaN"}))


def exchanged(experiment_dir):
    left, right = (experiment_dir / arm / "seed-0" for arm in ("baseline", "treatment"))
    left.rename(experiment_dir / "x")
    right.rename(left)
    (experiment_dir / "x").rename(right)


SIGMA = {"compare": {"primary": [{"metric": "train/reward", "margin": "1 sigma"}], "looks": [3, 5]}}
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
    content = json.loads((experiment_dir / "report/verdict.json").read_text())
    jsonschema.Draft202012Validator(json_schema()).validate(content)
