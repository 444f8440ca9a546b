"""vLLM in the process of every rank, on the device that trains; `tensor_parallel` ranks share an engine.

It holds a second copy of the weights, which every sync replaces. While the trainer works on a GPU, vLLM
sleeps: its cache and its weights are given away.
"""

from collections.abc import Iterator

from torch import Tensor

from abrun.backends import Backend
from abrun.backends.ranks import all_gather_lists
from abrun.models import Text
from abrun.recipe.run import OwnRunConfig
from abrun.rollout import Completion
from abrun.rollout.draws import Draws
from abrun.rollout.vllm.instance import Instance


class Colocated:
    """See abrun.rollout.RolloutEngine. Every rank of a replica has its part of the replica's rows sampled."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._ranks = backend.ranks
        self._vllm = Instance(config, backend.ranks.device, backend.ranks.size, text.end_ids)

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        own = self._ranks.replica_slice(len(prompts))
        requests = list(zip(prompts[own], draws.seeds()[own], strict=True))
        return self._ranks.all_gather_replica(self._sample(requests, temperature))

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._vllm.load(weights)

    def sleep(self) -> int:
        return self._vllm.sleep()

    def wake(self) -> bool:
        return self._vllm.wake()

    def close(self) -> None:
        self._vllm.close()

    def _sample(self, requests: list[tuple[list[int], int]], temperature: float | None) -> list[Completion]:
        """Those of the ranks that share an engine go to each of them, all in one order."""
        group = self._vllm.group
        if group is None:
            return self._vllm.generate(requests, temperature)
        of_ranks = all_gather_lists([requests], group)
        completions = self._vllm.generate([one for of_rank in of_ranks for one in of_rank], temperature)
        first = sum(map(len, of_ranks[: group.rank()]))
        return completions[first : first + len(requests)]
