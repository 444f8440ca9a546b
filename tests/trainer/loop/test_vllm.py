"""Runs whose completions vLLM samples: trainer and engine agree, and the trainer trains as without it."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.runs.rundir import RunDir
from tests.trainer.loop.runs import Rows, Trainer, metrics_by_step, run_to_end
from tests.trainer.loop.test_batch_cuts_of_a_run import assert_same_up_to_rounding
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.rollout.vllm_sampling import PRESET, needs_vllm
from tests.written_runs import events, make_run, metric_values, run_config

pytestmark = needs_vllm

LEARNING = "policy.optimizer={learning_rate: 1.0e-2, warmup_steps: 0}"
LAYOUTS = {
    "data": "cluster.cpu_ranks=2",
    "context": "cluster.cpu_ranks=2 policy.backend.context_parallel=2",
    "tensor": "cluster.cpu_ranks=2 policy.backend.tensor_parallel=2",
    "megatron": "cluster.cpu_ranks=2 policy.backend={type:\u00a0megatron,tensor_parallel:\u00a02}",
}


def settings(folder: Path, *overrides: str) -> tuple[str, ...]:
    return (
        f"model.preset={PRESET}",
        "rollout={engine: vllm, max_new_tokens: 12}",
        "task=" + verifier(folder),
        LEARNING,
        *overrides,
    )


def trained(directory: Path, *overrides: str, ranks: int = 1) -> dict[int, dict[str, float]]:
    make_run(directory, run_config(*settings(directory.parent, *overrides)))
    trainer = Trainer(directory, ranks=ranks)
    assert trainer.wait(280) == 0, trainer.stderr
    return metrics_by_step(directory)


def untimed(rows: Rows) -> Rows:
    """A step that was killed before its checkpoint has no time of one."""
    return {
        step: {key: row[key] for key in row if not key.startswith("timing/")} for step, row in rows.items()
    }


def assert_resumes(directory: Path, whole: Rows, start: Callable[[Path], Trainer]) -> None:
    """Kill a run as its third step begins; resumed, it is as one that never stopped."""
    trainer = start(directory)
    trainer.wait_for_step(2, 400)  # then the checkpoint of step 1 is complete
    trainer.send(signal.SIGKILL)
    trainer.wait()
    trainer = start(directory)
    assert trainer.wait(500) == 0, trainer.stderr
    assert "resumed" in events(directory)
    assert_same_up_to_rounding(untimed(metrics_by_step(directory)), untimed(whole))


def test_trainer_and_engine_agree_in_every_step(tmp_path: Path) -> None:
    filters = "rollout={engine: vllm, max_new_tokens: 12, temperature: 0.8, top_p: 0.9}"
    rows = trained(tmp_path / "run", "steps=20", filters, "validation={every: 10, num_prompts: 4}")
    errors = [row["train/token_mult_prob_error"] for step, row in rows.items() if step]
    print(
        "largest token_mult_prob_error",
        max(errors),
        "reward",
        [row.get("train/reward") for row in rows.values()],
    )
    assert len(errors) == 20 and max(errors) <= 1.00001
    assert rows[20]["train/reward"] > 2 * rows[1]["train/reward"] > 0
    assert rows[20]["train/truncation_rate"] > 0
    assert rows[20]["timing/train/weight_sync_s"] > 0


@pytest.mark.parametrize("engines", ["tensor_parallel=1", "tensor_parallel=2", "devices=1"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_sample_and_train_as_one(layout: str, engines: str, tmp_path: Path) -> None:
    """Whether each rank has an engine, or two share one, or the engine has a process of its own."""
    one = trained(tmp_path / "one", "steps=3")
    assert one[1]["train/grad_norm"] > 1e-3
    overrides = [word.replace("\u00a0", " ") for word in LAYOUTS[layout].split(" ")]
    overrides.append(f"rollout.{engines}")
    assert_same_up_to_rounding(trained(tmp_path / "spread", "steps=3", *overrides, ranks=2), one)


@pytest.mark.parametrize("engines", ["tensor_parallel=2", "devices=1"])
def test_experts_over_ranks(engines: str, tmp_path: Path) -> None:
    overrides = ("steps=3", "model.preset=qwen3-moe-tiny-128", f"rollout.{engines}", "cluster.cpu_ranks=2")
    spread = ("policy.backend.expert_parallel=2",)
    rows = trained(tmp_path / "run", *overrides, *spread, ranks=2)
    assert max(row["train/token_mult_prob_error"] for row in rows.values()) <= 1.00001
    assert rows[3]["train/grad_norm"] > 1e-3


@pytest.mark.parametrize("shared", [1, 2])
def test_two_processes_sample_for_one_rank(shared: int, tmp_path: Path) -> None:
    """As two engines, or as one."""
    one = trained(tmp_path / "one", "steps=3")
    engines = ("rollout.devices=2", f"rollout.tensor_parallel={shared}")
    assert_same_up_to_rounding(trained(tmp_path / "apart", "steps=3", *engines), one)


def test_a_prefix_cache_that_is_never_reset_is_seen_from_step_two(tmp_path: Path) -> None:
    """Prompts of several of its blocks, which recur in every step."""
    asked = "12+34=46, and what else there is to know of numbers stands in no book that is read. " * 4
    (tmp_path / "long.jsonl").write_text(
        "".join(f'{{"prompt": "{n}: {asked}", "answer": "1"}}\n' for n in range(4))
    )
    verifier = "tests.trainer.loop.test_implementations:digits"
    task = f"task={{type: jsonl, path: {tmp_path}/long.jsonl, verifier: '{verifier}'}}"
    errors = {}
    for fault in ("null", "stale_prefix_cache", "{name: stale_prefix_cache, size: 1}"):
        folder = tmp_path / f"run-{len(errors)}"
        rows = trained(folder, "steps=4", task, f"injected_fault={fault}")
        errors[fault] = [rows[step]["train/token_mult_prob_error"] for step in (1, 2, 3, 4)]
    print(errors)
    right, wrong, every_second = errors.values()
    assert max(right) < 1.00001 and wrong[0] == right[0] and min(wrong[1:]) > 1.0001
    assert every_second[1] > 1.0001 and every_second[2] < 1.00001 < every_second[3]


def test_training_draws_and_computes_what_it_would_without_vllm(tmp_path: Path) -> None:
    """Supervised, validated before, in between and after: to the last bit."""
    values = []
    for engine in ("torch", "vllm"):
        directory = tmp_path / engine
        config = run_config(
            f"model.preset={PRESET}",
            "algorithm={type: sft, batch_size: 8}",
            "validation={every: 2, num_prompts: 4}",
            f"rollout.engine={engine}",
        )
        run_to_end(make_run(directory, config))
        values.append(
            {key: series for key, series in metric_values(directory).items() if not key.startswith("memory/")}
        )
    assert values[0] == values[1]
    assert "validation/accuracy" in values[0] and len(values[0]["train/loss"]) == 12


def test_killed_and_resumed_it_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", "steps=3", "checkpoint.every=1")
    config = run_config(*settings(tmp_path, "steps=3", "checkpoint.every=1"))
    assert_resumes(make_run(tmp_path / "killed", config), whole, Trainer)


def test_an_engine_that_fails_ends_the_run_in_a_line(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", run_config("rollout.engine=vllm", "steps=2"))  # heads of 24
    trainer = Trainer(directory)
    assert trainer.wait(280) == 2, trainer.stderr
    last = RunDir(directory).events()[-1]
    assert last["event"] == "failed" and "head_dim=24" in last["message"], json.dumps(last)
    assert "rollout.engine: vllm failed" in last["message"]
