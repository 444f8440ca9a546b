"""vLLM starts in the trainer's process and leaves its state alone, or says in a line why it does not."""

import re
from typing import Any

import pytest
import torch

from abrun.errors import LaunchError
from tests.rollout import vllm_sampling
from tests.rollout.vllm_sampling import Sampling, config_of, global_state, needs_vllm
from tests.train.runs import single_rank

pytestmark = needs_vllm


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
    assert re.match(r"rollout\.engine: vllm .* start: \w+: .+; last .* log: .+", line), line
    assert "memory" in line and "\n" not in line


def test_heads_that_it_has_no_attention_for_are_one_line() -> None:
    config = config_of("model.preset=qwen2-tiny")  # of 24
    with single_rank():
        sampling = Sampling(config)
        sampling.engine.sync(sampling.backend.weights())
        with pytest.raises(LaunchError, match=r"failed to generate: .*head_dim=24"):
            sampling.generate()
        sampling.engine.close()


def test_with_float32_heads_they_agree_better_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vllm_sampling.network

    def far_from_zero(*arguments: Any) -> Any:
        # as trained models have them, and so coarsely rounded
        network = plain(*arguments)
        with torch.no_grad():
            network.get_output_embeddings().weight[:, 0] += 3.0
        return network

    monkeypatch.setattr(vllm_sampling, "network", far_from_zero)
    excess = {}
    for head_dtype in ("null", "float32"):
        config = config_of("policy.dtype=bfloat16", f"policy.logprobs.head_dtype={head_dtype}")
        with single_rank():
            sampling = Sampling(config)
            sampling.sync(config)
            excess[head_dtype] = float(sampling.error(sampling.generate()).exp().mean()) - 1
            sampling.engine.close()
    print(excess)
    assert excess["float32"] < excess["null"] / 2
