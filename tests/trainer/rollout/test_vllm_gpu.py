"""vLLM on the GPU that trains: bfloat16, CUDA graphs, and memory given back and forth.

Prints what it measures: `pytest -m gpu -s tests/trainer/rollout/test_vllm_gpu.py`.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from abrun.errors import LaunchError
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.models.sources import preset_config
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.rollout.vllm import transfer
from abrun.trainer.rollout.vllm.startup import cache_bytes
from tests.trainer.loop.runs import Trainer, metrics_by_step, single_rank
from tests.trainer.loop.test_implementations import verifier
from tests.trainer.rollout.vllm_sampling import (
    PATIENCE_S,
    PROMPTS,
    TEXT,
    Sampling,
    backend_of,
    config_of,
    draws,
    global_state,
    stopping,
    to_break,
    tokens,
    with_vllm,
)
from tests.written_runs import make_run, run_config

pytestmark = [pytest.mark.gpu, *with_vllm]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

SUSPICIOUS = 1.05  # of token_mult_prob_error


def gpu_config(*overrides: str) -> OwnRunConfig:
    return config_of("policy.dtype=bfloat16", "cluster.gpus_per_node=1", *overrides)


@pytest.fixture(scope="module")
def started() -> Iterator[Sampling]:
    with single_rank("nccl"):
        before, began_s = global_state(), time.monotonic()
        sampling = Sampling(gpu_config())
        print(f"engine start {time.monotonic() - began_s:.1f} s")
        assert global_state() == before
        yield sampling
        sampling.engine.close()


@pytest.fixture
def sampling(started: Sampling) -> Sampling:
    started.sync(gpu_config())
    return started


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.6, 1.0), (0.7, 0.8)])
def test_trainer_and_engine_agree_up_to_bfloat16(
    temperature: float, top_p: float, sampling: Sampling
) -> None:
    sampling.sync(gpu_config(f"rollout.temperature={temperature}", f"rollout.top_p={top_p}"))
    error = sampling.error(sampling.generate())
    print(f"T {temperature}, top_p {top_p}: token_mult_prob_error {float(error.exp().mean()):.4f}")
    assert float(error.exp().mean()) < SUSPICIOUS


def test_at_temperature_zero_it_mostly_decodes_what_the_torch_engine_decodes(sampling: Sampling) -> None:
    embedded = TorchEngine(gpu_config().rollout, sampling.backend, TEXT)
    found = tokens(sampling.generate(temperature=0.0))
    expected = tokens(embedded.generate(PROMPTS, draws(), temperature=0.0))
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=False)]
    same = sum(one == other for one, other in pairs) / len(pairs)
    print(f"greedy tokens alike: {same:.3f}")
    assert same > 0.5  # after one near tie a row goes its own way


def test_what_is_sampled_is_of_the_newest_weights(sampling: Sampling) -> None:
    before = tokens(sampling.generate())
    assert tokens(sampling.generate()) == before
    sampling.sync(gpu_config(), seed=3)
    after = sampling.generate()
    assert tokens(after) != before and float(sampling.error(after).exp().mean()) < SUSPICIOUS
    sampling.backend = backend_of(gpu_config(), seed=2)
    assert float(sampling.error(after).exp().mean()) > SUSPICIOUS  # stale weights are seen


def test_asleep_it_gives_its_memory_to_the_trainer(sampling: Sampling) -> None:
    before = tokens(sampling.generate())
    needed = cache_bytes(gpu_config(), 1, preset_config(gpu_config().model))
    free = torch.cuda.mem_get_info()[0]
    began_s = time.monotonic()
    away = sampling.engine.sleep()
    slept_s = time.monotonic() - began_s
    freed = torch.cuda.mem_get_info()[0] - free
    counted = torch.cuda.memory_allocated()
    began_s = time.monotonic()
    assert sampling.engine.wake()  # its weights are gone
    sampling.engine.sync(sampling.backend.gather_weights())
    woken_s = time.monotonic() - began_s
    print(f"sleep {slept_s:.2f} s frees {freed / 2**30:.1f} GiB; wake and sync {woken_s:.2f} s")
    assert needed and needed < freed < needed + 2**30
    assert away == pytest.approx(freed, abs=2**26) and counted > 0.98 * away  # torch counts it on
    assert tokens(sampling.generate()) == before


def test_with_float32_heads_they_agree(started: Sampling) -> None:
    """In a process of its own, for an engine has one head dtype."""
    started.sync(gpu_config())
    plain = float(started.error(started.generate()).exp().mean())
    ended = subprocess.run(
        [sys.executable, "-m", "tests.trainer.rollout.test_vllm_gpu", "policy.logprobs.head_dtype=float32"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    dtype, head = ended.stdout.splitlines()[-1].split()
    print(f"token_mult_prob_error {plain:.5f}, with float32 heads {head}")
    assert dtype == "torch.float32" and float(head) < SUSPICIOUS


DTENSOR, MEGATRON = "policy.backend={type: dtensor}", "policy.backend={type: megatron}"
TENSOR_PARALLEL = "policy.backend={tensor_parallel: 2}"
MEGATRON_TENSOR_PARALLEL = "policy.backend={type: megatron, tensor_parallel: 2}"
EXPERTS = ("steps=6", "model.preset=qwen3-moe-tiny-128")
REAL_SHAPE = (
    "steps=4",
    "model.preset=qwen2.5-1.5b",
    "algorithm={prompts_per_step: 8, group_size: 8}",
    "policy.micro_batch_size=8",
    "policy.activation_checkpointing=true",
    "policy.optimizer.learning_rate=1.0e-6",
    "rollout.max_new_tokens=512",
    "rollout.gpu_memory_utilization=0.4",
)
# GPUs that train, all GPUs, overrides
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "dtensor": (1, 1, ("steps=8", DTENSOR, "validation={every: 4, num_prompts: 16}")),
    "megatron": (1, 1, ("steps=8", MEGATRON, "validation={every: 4, num_prompts: 16}")),
    "two GPUs": (2, 2, ("steps=4", DTENSOR)),
    "two GPUs, tensor-parallel": (2, 2, ("steps=4", TENSOR_PARALLEL)),
    "two GPUs, megatron": (2, 2, ("steps=4", MEGATRON_TENSOR_PARALLEL)),
    "one engine": (2, 2, ("steps=4", DTENSOR, "rollout.tensor_parallel=2")),
    "one engine, tensor-parallel": (2, 2, ("steps=4", TENSOR_PARALLEL, "rollout.tensor_parallel=2")),
    "one engine, megatron": (2, 2, ("steps=4", MEGATRON_TENSOR_PARALLEL, "rollout.tensor_parallel=2")),
    "a GPU of its own": (1, 2, ("steps=8", DTENSOR, "rollout.devices=1")),
    "a GPU of its own, megatron": (1, 2, ("steps=8", MEGATRON, "rollout.devices=1")),
    "experts": (1, 1, EXPERTS),
    "experts, one engine": (2, 2, (*EXPERTS, "rollout.tensor_parallel=2")),
    "experts, a GPU of its own": (1, 2, (*EXPERTS, "rollout.devices=1")),
    "real shape, one engine": (2, 2, (*REAL_SHAPE, "rollout.tensor_parallel=2")),
    "real shape, a GPU of its own": (1, 2, (*REAL_SHAPE, "rollout.devices=1")),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_samples_what_it_trains(name: str, tmp_path: Path) -> None:
    training, gpus, overrides = RUNS[name]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    rows = trained(tmp_path / "run", *overrides, gpus=training)
    rows.pop(0, None)
    show(name, rows)
    errors = [row["train/token_mult_prob_error"] for row in rows.values()]
    limit = 2 * SUSPICIOUS - 1 if "experts" in name or "shape" in name else SUSPICIOUS
    assert f"steps={len(errors)}" == overrides[0] and max(errors) < limit


@needs_two_gpus
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGSTOP, "was silent for"), (signal.SIGKILL, "killed by SIGKILL")]
)
def test_an_engine_that_hangs_or_dies_in_a_sync_leaves_the_trainers_gpu_usable(
    number: int, expected: str, started: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent weights over NCCL, which would wait for ever."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)
    with to_break(gpu_config("rollout.devices=1")) as apart:
        for seed in (2, 3):
            began_s = time.monotonic()
            apart.sync(gpu_config(), seed)
            synced_s = time.monotonic() - began_s
            error = float(apart.error(apart.generate()).exp().mean())
            print(f"sync {synced_s:.2f} s, token_mult_prob_error {error:.4f}")
            assert error < SUSPICIOUS
        began_s = time.monotonic()
        with pytest.raises(LaunchError, match=f"policy's weights: {expected}") as raised:
            apart.engine.sync(stopping(apart.backend.gather_weights(), apart.pids[0], number))
        print(f"{raised.value}, after {time.monotonic() - began_s:.1f} s")
        assert time.monotonic() - began_s < 4 * PATIENCE_S
    began_s = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - began_s < PATIENCE_S


def show(title: str, rows: dict[int, dict[str, float]]) -> None:
    """Seconds, tokens a second and the error of each step."""
    for step, row in rows.items():
        seconds = {
            name: row[f"timing/train/{name}_s"] for name in ("generation", "weight_sync", "policy_training")
        }
        tokens = row["train/mean_gen_tokens_per_sample"] * row["train/num_valid_samples"]
        shown = {name: round(value, 3) for name, value in seconds.items()}
        error = row["train/token_mult_prob_error"]
        print(
            f"{title}, step {step}: {tokens / seconds['generation']:.0f} tokens/s, {shown}, error {error:.4f}"
        )


def trained(directory: Path, *overrides: str, gpus: int = 1) -> dict[int, dict[str, float]]:
    config = run_config(
        "model.preset=qwen2-wide-vocab",
        "rollout={engine: vllm, max_new_tokens: 32, gpu_memory_utilization: 0.2}",
        "task=" + verifier(directory.parent),
        "policy.dtype=bfloat16",
        "policy.logprobs.impl=chunked",
        "policy.optimizer={learning_rate: 3.0e-3, warmup_steps: 0}",
        f"cluster.gpus_per_node={gpus}",
        *overrides,
    )
    make_run(directory, config)
    if gpus == 1:
        trainer = Trainer(directory)
        assert trainer.wait(280) == 0, trainer.stderr
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command = [sys.executable, *launch, "-m", "abrun.trainer", str(directory)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert ended.returncode == 0, ended.stderr[-4000:]
    return metrics_by_step(directory)


if __name__ == "__main__":
    with single_rank("nccl"):
        alone = Sampling(gpu_config(*sys.argv[1:]))
        alone.sync(gpu_config(*sys.argv[1:]))
        error = float(alone.error(alone.generate()).exp().mean())
        print(alone.engine._vllm._llm.llm_engine.model_config.head_dtype, f"{error:.5f}", flush=True)
