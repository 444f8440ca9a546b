"""The embedded engine on a GPU: a step as a CUDA graph against the same, launched operator by operator."""

import json
from typing import Any

import pytest
import torch

from abrun.recipe.policy import Model, Policy, Rollout
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.models.sources import character_tokenizer
from abrun.trainer.models.text import Text
from abrun.trainer.models.weights import open_network
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.seeds import Draws
from tests.trainer.loop.runs import single_rank

pytestmark = pytest.mark.gpu

TEXT = Text(tokenizer=character_tokenizer(), end_ids=frozenset(range(90, 95)), max_positions=None)
PROMPTS = TEXT.encode_prompts([*["1+1="] * 4, *["a longer prompt: 123+456="] * 4, *["x"] * 4])
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("qwen2-tiny", {}, {}),
    "bfloat16": ("qwen2-tiny", {"dtype": "bfloat16"}, {}),
    "packing": ("qwen2-tiny", {"dtype": "bfloat16", "packing": True}, {}),
    "filters": ("qwen2-tiny", {}, {"min_p": 0.01, "top_k": 40, "top_p": 0.9}),
    "small batches": ("qwen2-tiny", {}, {"batch_size": 5}),
    "experts": ("qwen3-moe-tiny", {}, {}),
    "experts in bfloat16": ("qwen3-moe-tiny", {"dtype": "bfloat16"}, {}),
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch of a graph."""
    seen: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (seen.append(1), replay(graph))[1])
    return seen


def make_backend(preset: str, policy: dict[str, Any]) -> DtensorBackend:
    def load() -> Any:
        network: Any = open_network(
            Model.model_validate({"preset": preset}), weights=None, seed=2, decodes=True
        )
        assert network.decodes_in_place
        with torch.no_grad():  # against flat distributions
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
        return network

    return DtensorBackend(load, Policy.model_validate(policy), make_ranks(torch.device("cuda", 0), {}))


def sampled(engine: TorchEngine, step: int = 1) -> list[Completion]:
    draws = Draws(seed=6, stream="sampling", step=step, rows=range(len(PROMPTS)))
    return engine.generate(PROMPTS, draws)


@pytest.mark.parametrize("case", CASES)
def test_a_graph_samples_what_single_operators_do_also_after_an_update(
    case: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, policy, rollout = CASES[case]
    monkeypatch.setattr(
        "abrun.trainer.rollout.torch_engine.INITIAL_SLOTS", 20
    )  # so that the cache grows, too
    with single_rank("nccl"):
        backend = make_backend(preset, policy)
        settings = Rollout(max_new_tokens=64, **rollout)
        graphs, single = (TorchEngine(settings, backend, TEXT) for _ in range(2))
        single._replayer = None
        for step in range(3):
            found = sampled(graphs, step)
            num_replays = len(replays)
            assert found == sampled(single, step)  # the same kernels: to the bit
            assert len(replays) == num_replays
            assert len({len(completion.token_ids) for completion in found}) > 2
            for parameter in backend.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            backend.optimizer_step(0.001)
        print(json.dumps({"case": case, "replays": len(replays)}))
        assert replays or "experts" in case  # no step was a graph


@pytest.mark.parametrize("preset", ["qwen2-tiny", "qwen3-moe-tiny"])
def test_a_cache_in_place_samples_what_one_that_grows_does(preset: str, replays: list[int]) -> None:
    with single_rank("nccl"):
        backend = make_backend(preset, {})
        engine = TorchEngine(Rollout(max_new_tokens=48), backend, TEXT)
        found = sampled(engine)
        backend.module.network.decodes_in_place = False
        for one, other in zip(found, sampled(engine), strict=True):
            assert (one.token_ids, one.truncated) == (other.token_ids, other.truncated)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_the_memory_of_cache_and_graphs_is_given_back(replays: list[int]) -> None:
    with single_rank("nccl"):
        backend = make_backend("qwen2-tiny", {"dtype": "bfloat16"})
        engine = TorchEngine(Rollout(max_new_tokens=64), backend, TEXT)
        seen = []
        for step in range(6):
            sampled(engine, step)
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        print(json.dumps({"allocated, reserved, each call": seen}))
        assert replays
        assert len(set(seen[2:])) == 1, seen
