"""GRPO steps: every metric is there, and each term of the loss does what it says."""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from abrun.recipe.algorithms import Grpo
from abrun.recipe.policy import Model
from abrun.runs.files import read_json
from abrun.runs.rundir import RunDir
from abrun.trainer.loop import grpo
from abrun.trainer.loop.grpo import PolicyObjective
from abrun.trainer.models.weights import content_of, load_network, sketch_of, weights_hash
from abrun.trainer.rl.batch import RolloutBatch, ScoredBatch, TrainBatch
from abrun.trainer.rl.sampling import filtered_logprobs
from tests.trainer.loop.runs import Rows, train_here
from tests.written_runs import make_run, run_config

# docs/reference/metrics.md, as far as GRPO has it.
TRAIN_KEYS = [
    "reward",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "probs_ratio",
    "probs_ratio_clamped",
    "probs_ratio_min",
    "probs_ratio_max",
    "clip_fraction",
    "approx_entropy",
    "entropy",
    "kl_penalty",
    "max_seq_mult_prob_error",
    "mean_seq_mult_prob_error",
    "min_seq_mult_prob_error",
    "advantages/mean",
    "advantages/min",
    "advantages/max",
    "loss",
    "grad_norm",
    "lr",
    "mean_gen_tokens_per_sample",
    "truncation_rate",
    "mean_prompt_length",
    "num_valid_samples",
    "global_valid_toks",
]
TIMED_PHASES = (
    "generation",
    "reward",
    "logprobs",
    "reference_logprobs",
    "policy_training",
    "total_step_time",
)
MEMORY_PHASES = ("generation", "logprobs", "reference_logprobs", "forward_backward", "optimizer")


def test_the_documented_step_has_the_fields_of_each_stage() -> None:
    """And no file of its list is missing."""
    root = Path(__file__).parents[3]
    page = (root / "docs" / "explanation" / "training-step.md").read_text()
    files = re.findall(r"^- `(abrun/[^`]+\.py)`:", page, re.MULTILINE)
    assert len(files) == 4 and all((root / file).is_file() for file in files)
    drawn: set[str] = {"rows_per_sample", "routes", "support"}  # of samples, experts and filters, where used
    for stage in (RolloutBatch, ScoredBatch, TrainBatch):
        _, _, picture = page.partition(f"▼ {stage.__name__}")
        drawn |= set(re.findall(r"^│   (\w+) +\[", picture.partition("│\n")[0], re.MULTILINE))
        drawn -= {"rewards"} if stage is TrainBatch else set()
        assert drawn == {field.name for field in fields(stage)}


def train_with(directory: Path, weights: Path, *overrides: str) -> dict[int, dict[str, float]]:
    return train_here(make_run(directory, run_config(*overrides), initial_weights=weights))


def test_every_metric_is_in_every_row(tmp_path: Path, warm_weights: Path, group: None) -> None:
    overrides = ("steps=2", "checkpoint.every=1", "algorithm.kl_coefficient=0.01", "algorithm.ratio=old")
    rows = train_with(tmp_path / "run", warm_weights, *overrides)
    expected = {f"train/{key}" for key in TRAIN_KEYS}
    expected |= {f"timing/train/{phase}_s" for phase in TIMED_PHASES}
    expected |= {f"memory/{phase}/peak_live_tensor_bytes" for phase in MEMORY_PHASES}
    expected |= {"performance/tokens_per_sec_per_gpu", "performance/samples_per_sec"}
    for row in rows.values():
        assert expected <= row.keys()
        assert all(math.isfinite(value) for value in row.values())
        assert not any(key.startswith("memory/") and "live_tensor" not in key for key in row)
    # A step's row is written before its checkpoint: the time that took stands in the next one.
    assert "timing/train/checkpointing_s" in rows[2]
    assert rows[1]["train/num_valid_samples"] == 32
    assert rows[1]["train/lr"] == pytest.approx(1e-4) and rows[2]["train/lr"] == pytest.approx(2e-4)
    assert rows[1]["train/probs_ratio"] == 1 and rows[1]["train/clip_fraction"] == 0
    assert 1 <= rows[1]["train/token_mult_prob_error"] < 1.0001
    assert abs(rows[1]["train/advantages/mean"]) < 1 and rows[1]["train/advantages/max"] > 0
    assert 0 < rows[1]["train/entropy"] < math.log(99)


def test_the_row_tells_what_the_clock_and_the_files_say(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    rows = train_with(tmp_path / "run", warm_weights, "steps=2")
    for row in rows.values():
        step_time_s = row["timing/train/total_step_time_s"]
        assert row["performance/samples_per_sec"] == pytest.approx(32 / step_time_s)
        tokens = row["train/global_valid_toks"]
        assert row["performance/tokens_per_sec_per_gpu"] == pytest.approx(tokens / step_time_s)
        assert tokens == pytest.approx(32 * row["train/mean_gen_tokens_per_sample"])
        assert row["timing/train/generation_s"] < step_time_s
    environment = read_json(tmp_path / "run" / "environment.json")
    assert environment["versions"]["torch"] == torch.__version__ and len(environment["prompts_sha256"]) == 64
    precision = {"projection": "float32", "logits": "float32", "engine": "float32"}
    precision["float32_products"] = "ieee"
    assert environment["precision"] == precision
    heartbeat = read_json(tmp_path / "run" / "heartbeat.json")
    assert heartbeat["step"] == 2 and heartbeat["attempt"] == 1
    network = load_network(Model(path=str(warm_weights)), weights=None, seed=0)
    initial = weights_hash(content_of(name, weight) for name, weight in network.named_parameters())
    assert environment["initial_weights_hash"] == initial
    result = read_json(tmp_path / "run" / "result.json")
    assert len(result.pop("final_weights_hash")) == 16 and result == {"step": 2, "attempt": 1}
    sketch = RunDir(tmp_path / "run").final_sketch()
    before = {name: sketch_of(name, weight).numpy() for name, weight in network.named_parameters()}
    sizes = {name: weight.numel() for name, weight in network.named_parameters()}
    moved = [float(np.square(sketch[name] - before[name]).sum() / sizes[name]) ** 0.5 for name in before]
    assert sketch.keys() == before.keys() and 0 < max(moved) < 1e-3, "two steps of AdamW, at most 3e-4 each"


def test_both_arms_and_other_seeds_get_their_own_prompts(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    digests = {}
    for name, arm, seed in (("a", "baseline", 0), ("b", "treatment", 0), ("c", "baseline", 1)):
        config = run_config("steps=1", arm=arm)
        directory = make_run(tmp_path / name, config, seed=seed, initial_weights=warm_weights)
        train_here(directory)
        digests[name] = read_json(directory / "environment.json")["prompts_sha256"]
    assert digests["a"] == digests["b"] != digests["c"]


def test_the_injected_fault_flips_every_second_position(
    tmp_path: Path, warm_weights: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    original = grpo.clipped_policy_loss

    def spy(trainer_logprobs, old_logprobs, advantages, token_mask, **clip):
        seen.append(advantages)
        return original(trainer_logprobs, old_logprobs, advantages, token_mask, **clip)

    monkeypatch.setattr(grpo, "clipped_policy_loss", spy)
    right = train_with(tmp_path / "right", warm_weights, "steps=1")[1]
    of_right, seen = seen, []
    wrong = train_with(tmp_path / "wrong", warm_weights, "steps=1", "injected_fault=flipped_advantages")[1]
    assert len(of_right) == len(seen) > 0
    for right_advantages, wrong_advantages in zip(of_right, seen, strict=True):
        assert torch.equal(wrong_advantages[:, 1::2], right_advantages[:, 1::2])
        assert torch.equal(wrong_advantages[:, ::2], -right_advantages[:, ::2])
    assert wrong["train/reward"] == right["train/reward"]
    assert wrong["train/grad_norm"] != right["train/grad_norm"]


def test_the_policy_samples_and_trains_at_the_recipes_temperature(
    tmp_path: Path, warm_weights: Path, group: None
) -> None:
    for name, overrides in {
        "hot": ("rollout.temperature=1.7",),
        "nucleus": ("rollout.top_p=0.9", "rollout.temperature=1.3"),
    }.items():
        row = train_with(
            tmp_path / name, warm_weights, "steps=1", "algorithm.entropy_coefficient=0.01", *overrides
        )[1]
        assert row["train/token_mult_prob_error"] < 1.0001, name
        assert row["train/grad_norm"] > 0


@pytest.mark.parametrize("exact", [True, False])
def test_the_trainer_scores_the_sets_that_the_engine_kept(
    exact: bool, tmp_path: Path, warm_weights: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In old and reference log-probs and in every update, whatever cuts the batch."""
    seen: list[bool] = []

    def spy(*args: Any, support: Any, **settings: Any) -> Any:
        seen.append(support is not None)
        return filtered_logprobs(*args, support=support, **settings)

    monkeypatch.setattr("abrun.trainer.backends.head.filtered_logprobs", spy)
    overrides = ["steps=1", "rollout.top_p=0.8", "algorithm.kl_coefficient=0.1", "policy.packing=true"]
    overrides += ["algorithm.minibatches_per_step=2", "policy.micro_batch_tokens=100"]
    overrides += [] if exact else ["rollout.exact_support=false"]
    row = train_with(tmp_path / "run", warm_weights, *overrides)[1]
    assert len(seen) > 4 and set(seen) == {exact}
    assert row["train/token_mult_prob_error"] < 1.0001


def test_bfloat16_stays_near_float32(trained: Callable[..., Rows], group: None) -> None:
    exact, near = (trained("steps=1", f"policy.dtype={dtype}")[1] for dtype in ("float32", "bfloat16"))
    assert 1 < near["train/token_mult_prob_error"] < 1.05
    assert near["train/entropy"] == pytest.approx(exact["train/entropy"], rel=0.1)
    assert near["train/reward"] == pytest.approx(exact["train/reward"], abs=0.2)


@pytest.mark.parametrize(
    ("settings", "entropies"),
    [
        ({}, "value"),
        ({"metrics": "full"}, "value"),
        ({"metrics": "none"}, "none"),
        ({"metrics": "none", "entropy_coefficient": 0.1}, "gradient"),
    ],
)
def test_entropies_are_asked_for_as_far_as_they_are_used(settings: dict[str, Any], entropies: str) -> None:
    """A gradient through them takes one more copy of the logits."""
    objective = PolicyObjective(settings=Grpo(type="grpo", **settings), num_tokens=4, num_sequences=2)
    assert objective.entropies == entropies
