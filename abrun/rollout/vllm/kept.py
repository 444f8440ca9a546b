"""The sets of tokens that vLLM's filters kept, from its `return_sampling_mask`.

vLLM filters by min_p, top_k and top_p in this order, after the temperature. Its sampler packs a bit a token
of the vocabulary, as abrun.rl.sampling does, and vLLM unpacks the bits into numbers on the CPU: 23 ms a step
of 256 sequences that keep 5,000 of 32,768 tokens. abrun takes the bits as they are. Letters: R rows, one for
each request of an engine's step; T tokens of a completion; V tokens of the vocabulary; W = ceil(V / 8).
"""

import importlib
from collections import defaultdict
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
        """Take what the last step of the engine added to requests that still run."""
        if not self._is_on:
            return
        for state in self._llm.llm_engine.output_processor.request_states.values():
            if chunks := state.sampling_mask_chunks:
                # copies: a step's rows are one array, in pinned memory if they come from a GPU
                self._rows[state.external_req_id].extend(chunk.token_ids.copy() for chunk in chunks)
                chunks.clear()

    def take(self, name: str, completion: Any) -> Tensor | None:  # [T, W] uint8
        """Return the sets of a request that has finished; None if the engine reports none.

        Raises RuntimeError unless there is a set for each token, with the token in it.
        """
        if not self._is_on:
            return None
        rows, last = self._rows.pop(name, []), completion.sampling_mask
        of_last_step = last.token_ids if last else ()
        rows.extend(np.array(row, dtype=np.uint8) for row in of_last_step)
        return torch.from_numpy(checked(rows, completion.token_ids, self.vocab_size))


def checked(rows: list[np.ndarray], token_ids: list[int], size: int) -> np.ndarray:  # [T, W] uint8
    """Join the sets of a completion; raises RuntimeError unless each fits the vocabulary and its token."""
    if len(rows) != len(token_ids):
        raise RuntimeError(f"sets of kept tokens for {len(rows)} of {len(token_ids)} tokens")
    width = -(-size // 8)
    wrong = next((len(row) for row in rows if len(row) != width), width)
    if wrong != width:
        raise RuntimeError(f"a set of kept tokens of {wrong} bytes, and a vocabulary of {size} takes {width}")
    sets, tokens = np.stack(rows), np.array(token_ids)
    if size % 8 and (sets[:, -1] >> size % 8).any():
        raise RuntimeError(f"a set of kept tokens with a token beyond a vocabulary of {size}")
    has_token = sets[np.arange(len(tokens)), tokens >> 3] >> (tokens & 7) & 1
    if not has_token.all():
        place = int(has_token.argmin())
        raise RuntimeError(f"token {tokens[place]}, drawn at {place}, is not in the set of kept tokens")
    return sets


def report_bits() -> None:
    """Let vLLM report its sampler's bits, W bytes a row, in place of the numbers that it makes of them."""
    library: Any = importlib.import_module("vllm.v1.worker.gpu.sample.output")
    library.SamplingMaskTensors.tolists = _bits
    library.MAX_COMPACT_SUPPORT = 1  # numbers that it copies from the GPU besides; 2,048 a row otherwise


def _bits(tensors: Any, num_sampled: Any = None) -> Any:
    """Return what the scheduler cuts into requests; rows that drew nothing yet are never asked for."""
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    bits = tensors.packed_mask.cpu().numpy()  # [R, W]
    return outputs.SamplingMaskLists(bits.reshape(-1), np.arange(len(bits) + 1) * bits.shape[1])


def _switch_sampler(worker: Any, on: bool) -> None:
    worker.model_runner.sampler.return_sampling_mask = on
