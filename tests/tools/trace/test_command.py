"""abrun trace from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from abrun.cli import app
from abrun.runs.captures import read_capture
from abrun.runs.rollouts import read_step
from tests.tools.trace.captured import GRPO, config
from tests.trainer.loop.runs import single_rank, train_here
from tests.written_runs import make_run


def run(tmp_path: Path, *words: str, arms: Any = None, **changes: Any) -> Any:
    recipe = {
        **GRPO,
        "name": "small",
        "arms": {
            "baseline": {"policy.logprobs.impl": "logits"},
            "fused": {"policy.logprobs.impl": "chunked"},
            "faulty": {"injected_fault": "microbatch_mean"},
            **(arms or {}),
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
        (["--arm", "no"], {}, "--arm: got 'no'; give one of fused, faulty"),
        ([], {}, "--arm: got none; give one of fused, faulty"),
        (["--arm", "fused", "--step", "9"], {}, "--step: got 9, but baseline ends at step 3"),
        (["--arm", "fused"], {"warm_start": {"steps": 2}}, "no warm-started weights; launch the recipe"),
        (
            ["--arm", "short", "--step", "2"],
            {"arms": {"short": {"steps": 1}}},
            "--step: got 2, but short ends",
        ),
        *(
            (["--arm", "other"], {"arms": {"other": {key: value}}}, f"arms.other.{key}: got {value!r}, but")
            for key, value in (
                ("algorithm.prompts_per_step", 2),
                ("algorithm.group_size", 4),
                ("model.preset", "qwen2-tiny-128"),
                ("model.shape.num_hidden_layers", 2),
                ("task.max_operand", 5),
            )
        ),
        (
            ["--arm", "other"],
            {"arms": {"other": {"algorithm": {"type": "ppo", "prompts_per_step": 4}}}},
            "arms.other.algorithm.type: got 'ppo', but baseline has 'grpo'; trace arms that train the same",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(
    tmp_path: Path, words: list[str], changes: dict[str, Any], problem: str
) -> None:
    done = run(tmp_path, *words, **changes)
    assert done.exit_code != 0 and problem in str(done.exception) and "\n" not in str(done.exception)


@pytest.mark.slow
def test_arms_that_train_on_recorded_rollouts_are_traced_on_them(tmp_path: Path) -> None:
    recording = config({"rollout": {"record": True}, "steps": 2})
    with single_rank():
        train_here(make_run(tmp_path / "earlier" / "seed-0", recording))
    rollout = {**GRPO["rollout"], "engine": "recorded", "from": str(tmp_path / "earlier")}
    words = ["--arm", "faulty", "--step", "2", "--replicas", "3"]
    done = run(tmp_path, *words, rollout=rollout, steps=2)
    assert done.exit_code == 3, done.output
    assert "the arms first differ in activation:batch.loss_weights" in done.output
    captured = read_capture(tmp_path / "small/trace/baseline")
    tokens = next(tensor for tensor in captured.tensors if tensor.module == "batch.token_ids")
    step = read_step(tmp_path / "earlier/seed-0/rollouts", 2)
    first = step.groups[0]
    recorded_tokens = [*first.prompt, *first.completions[0].token_ids]
    assert captured.read(tokens)[: len(recorded_tokens)].tolist() == recorded_tokens
    done = run(tmp_path, *words, rollout={**rollout, "from": str(tmp_path / "none")}, steps=2)
    assert "has no recorded rollouts of seed 0" in str(done.exception) and "\n" not in str(done.exception)
