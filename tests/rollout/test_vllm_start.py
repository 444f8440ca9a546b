"""vLLM starts in the trainer's process and leaves its state alone, or says in a line why it does not."""

import os
import random
import re
import signal
from typing import Any

import numpy as np
import pytest
import torch

from abrun.errors import LaunchError
from tests.rollout.vllm_sampling import Sampling, config_of, needs_vllm
from tests.train.runs import single_rank

pytestmark = needs_vllm


def global_state() -> dict[str, Any]:
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


def test_the_trainers_state_is_as_before() -> None:
    with single_rank():
        before = global_state()
        sampling = Sampling(config_of())
        assert global_state() == before
        sampling.sync(config_of())
        sampling.generate()
        sampling.engine.close()
        assert global_state() == before


def test_too_little_memory_is_one_line_with_the_last_of_its_log() -> None:
    with single_rank(), pytest.raises(LaunchError) as raised:
        Sampling(config_of("rollout.gpu_memory_utilization=0.0001"))
    line = str(raised.value)
    assert re.match(r"rollout\.engine: vllm failed to start: \w+: .+; last in its log: .+", line), line
    assert "memory" in line and "\n" not in line


def test_heads_that_it_has_no_attention_for_are_one_line() -> None:
    config = config_of("model.preset=qwen2-tiny")  # of 24
    with single_rank():
        sampling = Sampling(config)
        sampling.engine.sync(sampling.backend.weights())
        with pytest.raises(LaunchError, match=r"vllm failed to generate: .*head_dim=24"):
            sampling.generate()
        sampling.engine.close()
