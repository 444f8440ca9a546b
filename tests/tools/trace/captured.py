"""Captures of small runs, made as the ranks of a run do."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from abrun.recipe.run import OwnRunConfig
from abrun.runs.captures import Capture, read_capture
from abrun.tools.trace.command import MAX_TOKENS
from abrun.tools.trace.measure import run_job
from tests.spawn import run_ranks

# Completions of different lengths, and a gradient although random weights get no reward
GRPO: dict[str, Any] = {
    "algorithm": {"type": "grpo", "prompts_per_step": 4, "group_size": 2, "entropy_coefficient": 0.1},
    "model": {"preset": "qwen2-tiny"},
    "policy": {"micro_batch_size": 3, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"max_new_tokens": 6},
    "task": {"type": "arithmetic", "max_operand": 3},
    "steps": 3,
}


def config(*changes: Mapping[str, Any], ranks: int = 1, base: Mapping[str, Any] = GRPO) -> OwnRunConfig:
    """A configuration with sections replaced key by key."""
    content: dict[str, Any] = {**base, "cluster": {"cpu_ranks": ranks}}
    for change in changes:
        for key, value in change.items():
            is_section = isinstance(value, Mapping) and isinstance(content.get(key), Mapping)
            content[key] = {**content[key], **value} if is_section else value
    return OwnRunConfig.model_validate(content)


def capture(
    folder: Path,
    run: OwnRunConfig,
    arm: str,
    *,
    step: int = 1,
    records: bool = False,
    replicas: int = 0,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    weights: Path | None = None,
    timeout_s: float = 120,
    run_rank: Callable[[int, int, Mapping[str, Any]], None] | None = None,
) -> Capture:
    """Capture a step of an arm; without `records` on what an arm before has recorded in the folder.

    `run_rank` runs instead of `run_as_rank`.
    """
    job = {
        "config": run.model_dump(mode="json"),
        "recorded": str(folder / "recorded"),
        "captures": str(folder),
        "arm": arm,
        "seed": seed,
        "step": step,
        "initial_weights": None if weights is None else str(weights),
        "records": records,
        "replicas": replicas,
        "max_tokens": max_tokens,
    }
    run_ranks(run_rank or run_as_rank, run.cluster.ranks, job, timeout_s=timeout_s)
    return read_capture(folder / arm)


def run_as_rank(rank: int, world_size: int, job: Mapping[str, Any]) -> None:
    run_job(job, torch.device("cpu"))


def differences(first: Capture, second: Capture) -> dict[str, float]:
    """The norm of the difference of each tensor, as a share of the norm of the first."""
    others = {tensor.name: tensor for tensor in second.tensors}
    assert [tensor.name for tensor in first.tensors] == list(others)
    result = {}
    for tensor in first.tensors:
        values, other = (x.astype(np.float64) for x in (first.read(tensor), second.read(others[tensor.name])))
        assert values.shape == other.shape, tensor.name
        result[tensor.name] = float(np.linalg.norm(values - other) / max(np.linalg.norm(values), 1e-30))
    return result
