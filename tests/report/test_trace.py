"""A report shows the result of `abrun trace` in its experiment's folder, unless it is of other values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from abrun.logs.recorded.sources import ReadingOptions
from abrun.messages.codes import Code
from abrun.recipe.experiment import load_recipe
from abrun.report.comparing import compare_sources
from abrun.runs.files import write_json
from tests.golden.cases.verdicts import set_metric
from tests.report.test_report import shown
from tests.verdict.simulate import write_experiment

NAMES = ("activation:model.layers.0", "activation:lm_head.logprobs", "activation:loss", "update:lm_head")


def write_trace(experiment_dir: Path, ratios: tuple[float, ...], **changes: Any) -> Path:
    recipe = load_recipe(experiment_dir)
    tensors = [
        {"name": name, "relative_error": ratio / 100, "ulps": 10 * ratio, "ratio": ratio}
        for name, ratio in zip(NAMES, ratios, strict=True)
    ]
    content = {
        **{"arm": "treatment", "seed": 0, "step": 1, "num_replicas": 19, "limit": 3.0, "tensors": tensors},
        "missing": [],
        "configs": {arm: recipe.run_config(arm).model_dump(mode="json") for arm in recipe.arms},
    }
    write_json(experiment_dir / "trace" / "trace.json", content | changes)
    return experiment_dir / "trace" / "trace.json"


def compared(experiment_dir: Path) -> Any:
    return compare_sources([str(experiment_dir)], ReadingOptions(), output=experiment_dir / "report")


def test_the_first_difference_is_in_every_form_of_the_report(tmp_path: Path) -> None:
    experiment_dir = write_experiment(tmp_path / "runs/demo", steps=12, seeds=[0, 1])
    set_metric(experiment_dir, "treatment", "train/grad_norm", 9.0, 1, 1)
    before = compared(experiment_dir)
    assert before.content.select("trace") == [] and "abrun trace" in shown(before)
    write_trace(experiment_dir, (0.5, 1.2, 40.0, math.inf))
    comparison = compared(experiment_dir)
    sentence = (
        "step 1 of seed 0, on the same rollouts: the arms first differ in activation:loss, by 0.4 of its "
        "size (at most 400 ULPs); up to activation:lm_head.logprobs they agree; 2 of 4 tensors differ"
    )
    text = " ".join(shown(comparison, 2000).split())
    assert sentence in text and "abrun trace" not in text
    report = experiment_dir / "report"
    assert "activation:loss" in (report / "report.md").read_text().replace("\\", "")
    evidence = json.loads((report / "verdict.json").read_text())["evidence"]
    (stored,) = (item for item in evidence if item["kind"] == "trace")
    values = stored["values"]
    assert values["first"] == "activation:loss" and values["last_agreeing"] == "activation:lm_head.logprobs"
    assert values["tensors"][3]["ratio"] == "Infinity" and stored["reason"] == sentence
    assert stored["reason_code"]["code"] == Code.TRACE_DIFFERS
    assert sentence in (report / "report.html").read_text()


def test_a_trace_without_a_difference_says_so(tmp_path: Path) -> None:
    experiment_dir = write_experiment(tmp_path / "runs/demo", steps=12, seeds=[0, 1])
    write_trace(experiment_dir, (0.5, 1.2, 3.0, 0.0))
    (trace,) = compared(experiment_dir).content.select("trace")
    assert trace.reason and trace.reason.code is Code.TRACE_AGREES and trace["first"] is None
    assert [tensor["name"] for tensor in trace["tensors"]] == [NAMES[2], NAMES[1], NAMES[0]]


def test_a_trace_of_other_values_is_not_shown_but_named(tmp_path: Path) -> None:
    experiment_dir = write_experiment(tmp_path / "runs/demo", steps=12, seeds=[0, 1])
    path = write_trace(experiment_dir, (0.5, 1.2, 40.0, 9.0))
    configs = json.loads(path.read_text())["configs"]
    configs["treatment"]["policy"]["dtype"] = "bfloat16"
    configs["baseline"]["policy"]["compile"] = True  # a traced step is never compiled
    configs["baseline"]["limits"]["retries"] = 7  # changes no number
    write_trace(experiment_dir, (0.5, 1.2, 40.0, 9.0), configs=configs)
    content = compared(experiment_dir).content
    assert content.select("trace") == []
    assert Code.TRACE_OF_OTHER_VALUES(arm="treatment", step=1, keys=["policy.dtype"]) in content.notes


@pytest.mark.parametrize("damage", ["{", '{"arm": "treatment"}', '{"tensors": [{"name": 3}]}'])
def test_a_damaged_trace_is_a_note_and_no_error(tmp_path: Path, damage: str) -> None:
    experiment_dir = write_experiment(tmp_path / "runs/demo", steps=12, seeds=[0, 1])
    write_trace(experiment_dir, (0.5, 1.2, 40.0, 9.0)).write_text(damage)
    content = compared(experiment_dir).content
    assert content.select("trace") == []
    assert [note.code for note in content.notes].count(Code.TRACE_UNREADABLE) == 1
