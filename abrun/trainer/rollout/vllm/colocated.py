"""vLLM in the process of each rank, on the training devices; `tensor_parallel` ranks share an engine.

The engine has its own copy of the weights, which every sync replaces. During training on a GPU it sleeps: its
cache and its weights are freed.
"""

from collections.abc import Iterator

from torch import Tensor

from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend
from abrun.trainer.backends.ranks import all_gather_lists
from abrun.trainer.models import Text
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.vllm.instance import VllmInstance
from abrun.trainer.seeds import Draws


class ColocatedEngine:
    """Colocated engine; see rollout.RolloutEngine. Each rank samples a share of its replica's rows."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._ranks = backend.ranks
        self._vllm = VllmInstance(config, backend.ranks.device, backend.ranks.size, text.end_ids)

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        local_rows = self._ranks.replica_slice(len(prompts))
        requests = list(zip(prompts[local_rows], draws.seeds()[local_rows], strict=True))
        return self._ranks.all_gather_replica(self._sample(requests, temperature))

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._vllm.load(weights)

    def sleep(self) -> int:
        return self._vllm.sleep()

    def wake(self) -> bool:
        return self._vllm.wake()

    def close(self, *, finished: bool = False) -> None:
        self._vllm.close()

    def _sample(self, requests: list[tuple[list[int], int]], temperature: float | None) -> list[Completion]:
        """Sample the requests; ranks that share an engine submit the requests of all of them in one order."""
        group = self._vllm.group
        if group is None:
            return self._vllm.generate(requests, temperature)
        requests_by_rank = all_gather_lists([requests], group)
        completions = self._vllm.generate(
            [request for rank_requests in requests_by_rank for request in rank_requests], temperature
        )
        start = sum(map(len, requests_by_rank[: group.rank()]))
        return completions[start : start + len(requests)]
