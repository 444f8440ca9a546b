"""abrun trace from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from abrun.cli import app
from tests.diagnose.trace.captured import GRPO


def run(tmp_path: Path, *words: str, **changes: Any) -> Any:
    recipe = {
        **GRPO,
        "name": "small",
        "arms": {
            "baseline": {"policy.logprobs.impl": "logits"},
            "fused": {"policy.logprobs.impl": "chunked"},
            "faulty": {"injected_fault": "microbatch_mean"},
        },
        "seeds": [0],
        **changes,
    }
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return CliRunner().invoke(app, ["trace", str(file), "--runs-dir", str(tmp_path), *words])


@pytest.mark.slow
def test_a_clean_arm_agrees(tmp_path: Path) -> None:
    done = run(tmp_path, "--arm", "fused", "--replicas", "5")
    assert done.exit_code == 0 and "the arms agree up to rounding" in done.output, done.output


def test_a_faulty_arm_is_found(tmp_path: Path) -> None:
    done = run(tmp_path, "--arm", "faulty", "--step", "2", "--replicas", "2")
    assert done.exit_code == 3, done.output
    assert "the arms first differ in activation:batch.loss_weights" in done.output
    stored = json.loads((tmp_path / "small" / "trace" / "trace.json").read_text())
    assert stored["step"] == 2 and stored["first"] == "activation:batch.loss_weights"
    assert not [*(tmp_path / "small" / "trace").glob(".scratch*")]


@pytest.mark.parametrize(
    ("words", "changes", "problem"),
    [
        (["--arm", "other"], {}, "--arm: got 'other'; give one of fused, faulty"),
        ([], {}, "--arm: got none; give one of fused, faulty"),
        (["--arm", "fused", "--step", "9"], {}, "--step: got 9, but baseline has 3 steps"),
        (["--arm", "fused"], {"warm_start": {"steps": 2}}, "no warm-started weights; launch the recipe"),
        (["--arm", "fused", "--set", "policy.compile=true"], {}, "policy.compile: got true"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(
    tmp_path: Path, words: list[str], changes: dict[str, Any], problem: str
) -> None:
    done = run(tmp_path, *words, **changes)
    assert done.exit_code != 0 and problem in str(done.exception) and "\n" not in str(done.exception)
