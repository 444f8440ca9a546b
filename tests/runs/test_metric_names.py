"""The table of metrics, and what is said of a claim before any run. (Every row of the trainer's tests is
checked against the table in tests/trainer/loop/runs.py.)
"""

from pathlib import Path

import pytest

import abrun
from abrun.logs.aliases import FRAMEWORKS
from abrun.runs.metric_names import (
    METRICS,
    find_metric,
    is_clock,
    learning_sign,
    peak_memory_phase,
    unrecorded_metric_problem,
)

SOURCES = [path.read_text() for path in (Path(abrun.__path__[0]) / "trainer").rglob("*.py")]


def test_every_name_of_the_table_is_written_somewhere() -> None:
    """A metric that the trainer gave up must not stay a claim that a dry run accepts."""
    source = "\n".join(SOURCES)
    assert [metric.key for metric in METRICS if not is_written(metric.key, source)] == []


def is_written(key: str, source: str) -> bool:
    whole, tail = key.replace("<phase>", "{phase}"), key.rsplit("/", 1)[-1].replace("<phase>", "{phase}")
    endings = (whole, key.removeprefix("train/"), key.removeprefix("train/critic/"), tail)
    return any(f'{end}"' in source for end in endings)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_other_trainers_names_are_translated_to_ours(framework):
    assert [ours for ours in FRAMEWORKS[framework] if find_metric(ours) is None] == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("timing/train/total_step_time_s", "timing/train/total_step_time_s"),
        ("timing/train/weight_sync_s", "timing/train/<phase>_s"),
        ("memory/logprobs/peak_live_tensor_bytes", "memory/<phase>/peak_live_tensor_bytes"),
    ],
)
def test_a_phase_s_name_is_any(name, key):
    found = find_metric(name)
    assert found is not None and found.key == key


@pytest.mark.parametrize("name", ["train/rewards", "memory/a/b/peak_allocated_bytes", "timing/train/x"])
def test_other_names_are_unknown(name):
    assert find_metric(name) is None


@pytest.mark.parametrize(
    ("metric", "algorithm", "hint"),
    [
        ("train/rewrad", "grpo", "mean 'train/reward'?"),
        ("train/critic/los", "ppo", "mean 'train/critic/loss'?"),
        ("train/rewards/accuracies", "dpo", "mean 'train/rewards/accuracy'?"),
        ("train/reward", "sft", "recorded are train/loss, train/grad_norm, "),
    ],
)
def test_a_claim_on_what_it_does_not_record_is_named_with_the_nearest(metric, algorithm, hint):
    reason = unrecorded_metric_problem(metric, algorithm)
    assert reason is not None and "\n" not in reason
    assert reason.startswith(f"got {metric!r}, ") and f"{algorithm} runs do not record" in reason
    assert hint in reason


def test_a_phase_is_read_from_a_peak_of_one_counter():
    assert peak_memory_phase("memory/logprobs/peak_allocated_bytes", "peak_allocated_bytes") == "logprobs"
    assert peak_memory_phase("memory/logprobs/peak_reserved_bytes", "peak_allocated_bytes") is None


def test_clocks_are_known_in_other_trainers_words():
    clocks = ["timing_s/step", "perf/throughput", "train_samples_per_second", "elapsed", "step_duration"]
    assert all(
        map(
            is_clock,
            [*clocks, "wall_time", "tokens_per_sec", "latency_ms", "timestamp", "perf/mfu", "wall_clock"],
        )
    )
    assert not any(map(is_clock, ["train/reward", "train/loss", "epoch", "timesteps", "critic/score/mean"]))
    trl = "profiling/Time taken: GRPOTrainer._calculate_rewards"
    assert is_clock(trl) and learning_sign(trl, policy_gradient=False) is None
