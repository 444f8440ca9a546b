"""An engine in processes of its own samples what it would here; what goes wrong with one is a line."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from abrun.errors import LaunchError
from abrun.processes import progress
from abrun.trainer.rollout.vllm import transfer
from tests.trainer.loop.runs import single_rank
from tests.trainer.rollout.vllm_sampling import (
    PARITY,
    PATIENCE_S,
    Sampling,
    SamplingApart,
    backend_of,
    config_of,
    needs_vllm,
    stopping,
    to_break,
    tokens,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module", autouse=True)
def rank() -> Iterator[None]:
    with single_rank():
        yield


@pytest.fixture(scope="module")
def started() -> Iterator[SamplingApart]:
    sampling = SamplingApart(config_of("rollout.devices=1"))
    yield sampling
    sampling.engine.close()


@pytest.fixture
def sampling(started: SamplingApart) -> SamplingApart:
    started.sync(config_of())
    return started


def test_it_samples_what_an_engine_in_this_process_samples(sampling: SamplingApart) -> None:
    here = Sampling(config_of())
    here.sync(config_of())
    for temperature in (None, 0.0):
        completions = sampling.generate(temperature=temperature)
        assert tokens(completions) == tokens(here.generate(temperature=temperature))
    here.engine.close()


def test_after_each_sync_the_weights_are_the_newest(
    sampling: SamplingApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent in one chunk or in many."""
    for seed, chunk_bytes in ((3, transfer.CHUNK_BYTES), (4, 1), (5, 100_000)):
        monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk_bytes)
        sampling.sync(config_of(), seed)
        error = sampling.error(sampling.generate())
        assert float(error.max()) <= PARITY and float(error.exp().mean()) <= 1.00001
    sampling.backend = backend_of(config_of(), seed=2)
    assert float(sampling.error(sampling.generate()).exp().mean()) > 1.05  # stale weights are seen


# --- faults ---


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGSTOP, r"was silent for \d+ s after the request to take the policy's weights"),
        (signal.SIGKILL, r"policy's weights: killed by SIGKILL; .* log: \S"),
    ],
)
def test_a_process_that_hangs_or_dies_in_a_sync_is_one_line(
    number: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)
    with to_break(config_of("rollout.devices=1")) as sampling:
        began_s = time.monotonic()
        with pytest.raises(LaunchError, match=expected) as raised:
            sampling.engine.sync(stopping(sampling.backend.gather_weights(), sampling.pids[0], number))
        assert time.monotonic() - began_s < 5 * PATIENCE_S
        print(raised.value)
        assert "\n" not in str(raised.value) and "engine-0.log" in str(raised.value)


def test_a_process_that_dies_as_it_samples_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with to_break(config_of("rollout.devices=1")) as sampling:
        sampling.sync(config_of())
        # Called as it is heard, which is in its first step.
        monkeypatch.setattr(progress, "report", lambda *doing: os.kill(sampling.pids[0], signal.SIGKILL))
        began_s = time.monotonic()
        with pytest.raises(LaunchError, match=r"failed to generate: killed by SIGKILL; .* log: \S"):
            sampling.generate()
        assert time.monotonic() - began_s < PATIENCE_S


def test_one_of_two_processes_of_an_engine_that_dies_is_one_line() -> None:
    with to_break(config_of("rollout.devices=2", "rollout.tensor_parallel=2")) as sampling:
        sampling.sync(config_of())
        os.kill(sampling.pids[1], signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"vllm's process 1 .* killed by SIGKILL|failed to generate"):
            sampling.generate()


def test_weights_that_it_lacks_are_one_line_however_quiet_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    with to_break(config_of("rollout.devices=1")) as sampling:
        weights = [
            weight for weight in sampling.backend.gather_weights() if "layers.1.mlp.down" not in weight[0]
        ]
        with pytest.raises(LaunchError, match=r"policy's weights: .*mlp\.down_proj"):
            sampling.engine.sync(iter(weights))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.gpu_memory_utilization=0.0001", r"failed to start: \w+: .*memory"),
        ("model.preset=qwen2-tiny", r"failed to generate: .*head_dim=24"),
    ],
)
def test_what_vllm_cannot_do_is_one_line(override: str, expected: str) -> None:
    with (
        pytest.raises(LaunchError, match=expected) as raised,
        to_break(config_of("rollout.devices=1", override)) as sampling,
    ):
        sampling.engine.sync(sampling.backend.gather_weights())
        sampling.generate()
    assert "\n" not in str(raised.value)
