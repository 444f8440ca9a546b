"""The sets of tokens that vLLM's filters kept, from its `return_sampling_mask`.

vLLM filters by min_p, top_k and top_p in this order, after the temperature, and reports the ids that are
left. They are packed after every step of the engine: a set of a whole vocabulary of 150,000 takes 19 kB so,
and 5 MB as vLLM's list of numbers. Letters: T tokens of a completion, V of the vocabulary, W = ceil(V / 8).
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# What an engine is started with, and the runner that alone can do it: no default for every model of 0.28
ARGUMENTS = {"return_sampling_mask": True}
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


class KeptSets:
    """The sets of the requests that run, by name, in the bits of abrun.rl.sampling."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.vocab_size: int = llm.llm_engine.model_config.get_vocab_size()
        self._is_on = True
        self._rows: dict[str, list[np.ndarray]] = defaultdict(list)

    def switch(self, on: bool) -> None:
        """Let the engine report sets, or not: with sets it would refuse temperature 0."""
        self._rows.clear()
        if on == self._is_on:
            return
        self._llm.llm_engine.model_config.return_sampling_mask = on  # by which requests are checked
        self._llm.collective_rpc(_switch_sampler, args=(on,))
        self._is_on = on

    def collect(self) -> None:
        """Pack what the last step of the engine added to requests that still run."""
        if not self._is_on:
            return
        for state in self._llm.llm_engine.output_processor.request_states.values():
            for chunk in state.sampling_mask_chunks:
                self._add(state.external_req_id, _sets_of(chunk))
            state.sampling_mask_chunks.clear()

    def take(self, name: str, completion: Any) -> Tensor | None:  # [T, W] uint8
        """Return the sets of a request that has finished; None if the engine reports none.

        Raises RuntimeError unless there is a set for each token, with the token in it.
        """
        if not self._is_on:
            return None
        last = completion.sampling_mask
        self._add(name, last.token_ids if last else [])  # of its last step
        rows, token_ids = self._rows.pop(name), completion.token_ids
        if len(rows) != len(token_ids):
            raise RuntimeError(f"sets of kept tokens for {len(rows)} of {len(token_ids)} tokens")
        for place, (row, token) in enumerate(zip(rows, token_ids, strict=True)):
            if not row[token >> 3] >> (token & 7) & 1:
                raise RuntimeError(f"token {token}, drawn at {place}, is not in the set of kept tokens")
        return torch.from_numpy(np.stack(rows))

    def _add(self, name: str, sets: Sequence[Sequence[int] | np.ndarray]) -> None:
        self._rows[name].extend(packed_ids(ids, self.vocab_size) for ids in sets)


def _sets_of(chunk: Any) -> list[np.ndarray]:
    """Return the ids of each token that a step drew; `offsets` may be None for a single token."""
    if chunk.offsets is None:
        return [chunk.token_ids]
    return [chunk.token_ids[start:end] for start, end in itertools.pairwise(chunk.offsets)]


def packed_ids(ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:  # [n] -> [W] uint8
    """Pack a set of token ids as abrun.rl.sampling.packed does; raises RuntimeError beyond the vocabulary."""
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not 0 <= array.min() <= array.max() < size:
        raise RuntimeError(f"a set of kept tokens with token {array.max()}, of a vocabulary of {size}")
    flags = np.zeros(size, dtype=bool)
    flags[array] = True
    return np.packbits(flags, bitorder="little")


def _switch_sampler(worker: Any, on: bool) -> None:
    worker.model_runner.sampler.return_sampling_mask = on
