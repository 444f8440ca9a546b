"""Mixtures of experts in vLLM: their weights arrive, all of them, or it is said."""

from collections.abc import Iterator

import pytest

from abrun.errors import LaunchError
from tests.trainer.loop.runs import single_rank
from tests.trainer.rollout.vllm_sampling import PARITY, Sampling, config_of, needs_vllm, tokens

pytestmark = needs_vllm
CONFIG = config_of("model.preset=qwen3-moe-tiny-128")


@pytest.fixture(scope="module")
def started() -> Iterator[Sampling]:
    with single_rank():
        sampling = Sampling(CONFIG)
        yield sampling
        sampling.engine.close()


def test_after_each_sync_the_experts_are_the_newest(started: Sampling) -> None:
    before = None
    for seed in range(2, 7):
        started.sync(CONFIG, seed)
        completions = started.generate()
        error = started.error(completions)
        print(f"largest difference {float(error.max()):.2e}")
        assert float(error.max()) <= PARITY and float(error.exp().mean()) <= 1.00001
        assert tokens(completions) != before
        before = tokens(completions)


def test_experts_that_are_not_packed_anew_are_seen(
    started: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.sync(CONFIG)
    monkeypatch.setattr("abrun.trainer.rollout.vllm.instance._repack", lambda model: None)
    started.sync(CONFIG, seed=3)
    assert float(started.error(started.generate()).max()) > 0.1


@pytest.mark.parametrize("lost", ["layers.1.mlp.experts.3.down_proj", "layers.1.mlp.experts"])
def test_experts_that_do_not_arrive_are_an_error(lost: str, started: Sampling) -> None:
    weights = [weight for weight in started.backend.gather_weights() if lost not in weight[0]]
    with pytest.raises(LaunchError, match=r"policy's weights: .*([Ee]xperts: )"):
        started.engine.sync(iter(weights))
    started.engine._vllm._tail.missing_weights = ""
