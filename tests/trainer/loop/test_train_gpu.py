"""The quickstart on GPUs: the same loop over nccl, with the allocator's own memory peaks."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from abrun.recipe.run import OwnRunConfig
from tests.trainer.loop.runs import Trainer, metrics_by_step
from tests.written_runs import events, make_run, run_config

pytestmark = pytest.mark.gpu

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
NOT_COMPARED = ("timing/", "performance/", "memory/", "time_s", "attempt")


def gpu_config(*overrides: str, gpus: int = 1, arm: str = "baseline") -> OwnRunConfig:
    return run_config("steps=3", f"cluster.gpus_per_node={gpus}", *overrides, arm=arm)


def torchrun(directory: Path, ranks: int) -> dict[int, dict[str, float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [*command, "-m", "abrun.trainer", str(directory)], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return metrics_by_step(directory)


@pytest.mark.parametrize("arm", ["baseline", "treatment"])
def test_a_few_steps_give_finite_metrics_and_real_peaks(arm: str, tmp_path: Path, warm_weights: Path) -> None:
    config = gpu_config("algorithm.kl_coefficient=0.1", arm=arm)
    directory = make_run(tmp_path / "run", config, initial_weights=warm_weights)
    trainer = Trainer(directory)
    assert trainer.wait(240) == 0, trainer.stderr
    rows = metrics_by_step(directory)
    assert rows.keys() == {1, 2, 3}
    for row in rows.values():
        assert all(math.isfinite(value) for value in row.values())
        assert 1 <= row["train/token_mult_prob_error"] < 1.01 and row["train/grad_norm"] > 0
        for phase in ("generation", "reference_logprobs", "forward_backward", "optimizer"):
            allocated = row[f"memory/{phase}/peak_allocated_bytes"]
            assert 1_000_000 < allocated <= row[f"memory/{phase}/peak_reserved_bytes"]
        assert not any("live_tensor" in key for key in row)


def test_the_first_step_is_the_one_of_the_cpu(tmp_path: Path, warm_weights: Path) -> None:
    rows, one_pass = {}, "policy.logprobs={impl: triton, one_pass: true}"
    for name, config in {
        "cpu": run_config("steps=1"),
        "gpu": gpu_config("steps=1"),
        "triton": gpu_config("steps=1", one_pass),
    }.items():
        trainer = Trainer(make_run(tmp_path / name, config, initial_weights=warm_weights))
        assert trainer.wait(240) == 0, trainer.stderr
        rows[name] = metrics_by_step(tmp_path / name)[1]
    for key in ("train/reward", "train/global_valid_toks", "train/entropy", "train/loss", "train/grad_norm"):
        for name in ("gpu", "triton"):
            assert rows[name][key] == pytest.approx(rows["cpu"][key], rel=1e-3, abs=1e-5), (name, key)


def test_killed_and_resumed(tmp_path: Path, warm_weights: Path) -> None:
    config = gpu_config("steps=20", "checkpoint.every=2")
    directory = make_run(tmp_path / "run", config, initial_weights=warm_weights)
    trainer = Trainer(directory)
    trainer.wait_for_step(5)
    trainer.send(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    trainer = Trainer(directory)
    assert trainer.wait(240) == 0, trainer.stderr
    rows = metrics_by_step(directory)
    assert list(rows) == list(range(1, 21))
    assert events(directory)[-1] == "finished" and "resumed" in events(directory)


@needs_two_gpus
def test_two_gpus_agree_with_one(tmp_path: Path, warm_weights: Path) -> None:
    rows = {}
    for gpus in (1, 2):
        config = gpu_config("policy.micro_batch_size=8", "algorithm.kl_coefficient=0.1", gpus=gpus)
        directory = make_run(tmp_path / str(gpus), config, initial_weights=warm_weights)
        rows[gpus] = torchrun(directory, gpus)[1]
    for key, value in rows[1].items():
        if not key.startswith(NOT_COMPARED):
            assert rows[2][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("backbone", ["own", "shared"])
def test_ppo_packed_in_bfloat16(backbone: str, tmp_path: Path, warm_weights: Path) -> None:
    """The first step of padded rows in float32 on the CPU, to bfloat16's rounding."""
    algorithm = (
        "algorithm={type: ppo, prompts_per_step: 32, group_size: 1, minibatches_per_step: 2, "
        f"value_backbone: {backbone}, kl_coefficient: 0.1, kl_in: reward, loss: clipped}}"
    )
    packed = ("policy.dtype=bfloat16", "policy.packing=true", "policy.micro_batch_tokens=64")
    rows = {}
    for name, config in {
        "cpu": run_config("steps=2", algorithm),
        "gpu": gpu_config("steps=2", algorithm, *packed, "policy.logprobs.impl=triton"),
    }.items():
        trainer = Trainer(make_run(tmp_path / name, config, initial_weights=warm_weights))
        assert trainer.wait(240) == 0, trainer.stderr
        rows[name] = metrics_by_step(tmp_path / name)
    for row in rows["gpu"].values():
        assert all(math.isfinite(value) for value in row.values())
        for phase in ("values", "value_forward_backward", "value_optimizer"):
            assert row[f"memory/{phase}/peak_allocated_bytes"] > 1_000_000
    for key in ("train/critic/values_mean", "train/critic/returns_mean", "train/entropy"):
        assert rows["gpu"][1][key] == pytest.approx(rows["cpu"][1][key], rel=0.15, abs=0.05), key


MEGATRON = "{type: megatron, tensor_parallel: 2, sequence_parallel: true}"
EXPERTS = (
    "model.preset=qwen3-moe-tiny",
    "algorithm.entropy_coefficient=0.05",
    "algorithm.kl_coefficient=0.1",
)
WIDE = ("model.preset=qwen2-wide-vocab", "algorithm.entropy_coefficient=0.05")  # an even number of layers
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "context": ("{context_parallel: 2}", ()),
    "tensor": ("{tensor_parallel: 2}", ()),
    "sequence": ("{tensor_parallel: 2, sequence_parallel: true}", ()),
    "experts": ("{expert_parallel: 2}", EXPERTS),
    "megatron, data": ("{type: megatron}", ()),
    "megatron, sequence": (MEGATRON, ()),
    "megatron, pipeline": ("{type: megatron, pipeline_parallel: 2}", WIDE),
    "megatron, context": ("{type: megatron, context_parallel: 2}", ()),
    "megatron, context, experts": (
        "{type: megatron, context_parallel: 2, expert_parallel: 2}",
        (*EXPERTS, "policy.router_aux_loss_coefficient=0.01", "policy.replay_routing=true"),
    ),
    "megatron, experts": ("{type: megatron, expert_parallel: 2}", EXPERTS),
}


@pytest.fixture(scope="module")
def first_steps() -> dict[str, dict[str, float]]:
    """Metrics of runs on one GPU, each trained once."""
    return {}


@needs_two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_over_nccl_takes_the_first_step_of_one_gpu(
    layout: str, dtype: str, first_steps: dict[str, dict[str, float]], tmp_path: Path, warm_weights: Path
) -> None:
    """Policy gradient, entropy bonus and sampling; in bfloat16 to its rounding. Prints what differs."""
    backend, model = LAYOUTS[layout]
    settings = (
        "steps=1",
        "policy.packing=true",
        f"policy.dtype={dtype}",
        "policy.logprobs={impl: triton}",
        *model,
    )

    def first_step(*more: str, gpus: int) -> dict[str, float]:
        config = gpu_config(*settings, *more, gpus=gpus)
        weights = None if model else warm_weights
        return torchrun(make_run(tmp_path / str(gpus), config, initial_weights=weights), gpus)[1]

    if str(settings) not in first_steps:
        first_steps[str(settings)] = first_step(gpus=1)
    one, two = first_steps[str(settings)], first_step(f"policy.backend={backend}", gpus=2)
    keys = ("train/loss", "train/grad_norm", "train/entropy", "train/token_mult_prob_error")
    found = {key: (two[key], one[key]) for key in keys}
    print(layout, dtype, {key: f"{split:.6g} {whole:.6g}" for key, (split, whole) in found.items()})
    rel, absolute = (1e-3, 1e-5) if dtype == "float32" else (0.1, 0.02)
    for key, (split, whole) in found.items():
        assert split == pytest.approx(whole, rel=rel, abs=absolute), key
