"""Stands in for vLLM: completions that depend on prompt, seed, temperature and weights, from no model.

`python -m tests.trainer.rollout.standin host FD RUN_DIR` is an engine host with it, and
`python -m tests.trainer.rollout.standin RUN_DIR` a rank that makes it where it would make vLLM.
STAND_IN_S in the environment: seconds a completion.
"""

import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from abrun.processes import progress
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.rollout import Completion


class StandIn:
    group = None

    def __init__(
        self, config: OwnRunConfig, device: torch.device, num_ranks: int, end_ids: frozenset[int]
    ) -> None:
        print(f"stand-in started by {os.getpid()}", flush=True)
        self._rollout, self.device, self._weights = config.rollout, device, b""
        self.begin_run(end_ids)

    def begin_run(self, end_ids: frozenset[int], beat: Callable[[], None] = progress.report) -> None:
        self._end_ids, self._beat = sorted(end_ids), beat

    def end_run(self) -> None:
        self._weights = b""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        digest = hashlib.sha256()
        for name, tensor in weights:
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        self._weights = digest.digest()

    def generate(
        self, requests: list[tuple[list[int], int]], temperature: float | None = None
    ) -> list[Completion]:
        assert self._weights
        completions = []
        for prompt, seed in requests:
            self._beat()
            time.sleep(float(os.environ.get("STAND_IN_S", "0")))
            draws = random.Random(f"{prompt} {seed if temperature != 0 else ''} {self._weights.hex()}")
            length = draws.randint(2, self._rollout.max_new_tokens)
            token_ids = [draws.randrange(3, 40) for _ in range(length)]
            truncated = length == self._rollout.max_new_tokens
            if not truncated:
                token_ids[-1] = self._end_ids[0]
            logprobs = [-draws.random() for _ in token_ids]
            completions.append(Completion(token_ids=token_ids, logprobs=logprobs, truncated=truncated))
        return completions

    def sleep(self) -> int:
        return 0

    def wake(self) -> bool:
        return False

    def memory_bytes(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass


def main() -> None:
    module: Any
    if sys.argv[1] == "host":
        from abrun.trainer.rollout.vllm import host as module
        from abrun.trainer.rollout.vllm import server

        server.VllmInstance = StandIn  # pyright: ignore
        del sys.argv[1]
    else:
        from abrun.trainer import __main__ as module
        from abrun.trainer.rollout.vllm import engines as colocated

        colocated.VllmInstance = StandIn  # pyright: ignore
    sys.exit(module.main())


if __name__ == "__main__":
    main()
