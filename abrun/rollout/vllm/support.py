"""The support of vLLM's draws (the tokens that its filters kept), from `return_sampling_mask`.

vLLM filters by min_p, top_k and top_p, in this order, after the temperature. Its sampler packs one bit for
each token of the vocabulary, as abrun.rl.sampling does. vLLM then unpacks the bits into token ids on the CPU,
which takes 23 ms a step for 256 sequences that keep 5,000 of 32,768 tokens. abrun reads the packed bits
instead. Dimensions: R requests in an engine step, T tokens of a completion, V vocabulary, W = ceil(V / 8).
"""

import importlib
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Only the V2 model runner reports sampling masks, and vLLM 0.28 does not use it for every model by default.
ARGUMENTS = {"return_sampling_mask": True}
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


class SupportCollector:
    """Collects the supports of running requests, by request name, as packed bits (see abrun.rl.sampling)."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.vocab_size: int = llm.llm_engine.model_config.get_vocab_size()
        self._is_on = True
        self._rows: dict[str, list[np.ndarray]] = defaultdict(list)

    def switch(self, on: bool) -> None:
        """Turn reports of sampling masks on or off; vLLM rejects temperature 0 while they are on."""
        self._rows.clear()
        if on == self._is_on:
            return
        self._llm.llm_engine.model_config.return_sampling_mask = on  # the request validation reads this
        self._llm.collective_rpc(_switch_sampler, args=(on,))
        self._is_on = on

    def collect(self) -> None:
        """Collect the masks that the last engine step added to unfinished requests."""
        if not self._is_on:
            return
        for state in self._llm.llm_engine.output_processor.request_states.values():
            if chunks := state.sampling_mask_chunks:
                # Copied, because all rows of a step are views of one array, in pinned memory on a GPU
                self._rows[state.external_req_id].extend(chunk.token_ids.copy() for chunk in chunks)
                chunks.clear()

    def take(self, name: str, completion: Any) -> Tensor | None:  # [T, W] uint8
        """Return the support of each token of a finished request; None if masks are turned off.

        Raises RuntimeError if a token has no mask, or is not in its mask.
        """
        if not self._is_on:
            return None
        rows, last_mask = self._rows.pop(name, []), completion.sampling_mask
        last_rows = last_mask.token_ids if last_mask else ()
        rows.extend(np.array(row, dtype=np.uint8) for row in last_rows)
        return torch.from_numpy(join_rows(rows, completion.token_ids, self.vocab_size))


def join_rows(rows: list[np.ndarray], token_ids: list[int], vocab_size: int) -> np.ndarray:  # [T, W] uint8
    """Stack the masks of a completion. Raises RuntimeError if one does not fit token or vocabulary."""
    if len(rows) != len(token_ids):
        raise RuntimeError(f"sampling masks for {len(rows)} of {len(token_ids)} tokens")
    width = -(-vocab_size // 8)
    other_width = next((len(row) for row in rows if len(row) != width), width)
    if other_width != width:
        raise RuntimeError(
            f"a sampling mask of {other_width} bytes for a vocabulary of {vocab_size}, which needs {width}"
        )
    support, tokens = np.stack(rows), np.array(token_ids)
    if vocab_size % 8 and (support[:, -1] >> vocab_size % 8).any():
        raise RuntimeError(f"a sampling mask contains a token beyond the vocabulary of {vocab_size}")
    has_token = support[np.arange(len(tokens)), tokens >> 3] >> (tokens & 7) & 1
    if not has_token.all():
        index = int(has_token.argmin())
        raise RuntimeError(f"token {tokens[index]}, drawn at {index}, is not in its sampling mask")
    return support


def patch_sampler_output() -> None:
    """Patch vLLM to report the packed bits of its sampler, W bytes a row, instead of token ids."""
    library: Any = importlib.import_module("vllm.v1.worker.gpu.sample.output")
    library.SamplingMaskTensors.tolists = _packed_rows
    library.MAX_COMPACT_SUPPORT = 1  # token ids that it also copies from the GPU; the default is 2,048 a row


def _packed_rows(tensors: Any, num_sampled: Any = None) -> Any:
    """Return the packed masks of a step in the format that the scheduler splits into requests.

    The scheduler does not read rows without a draw.
    """
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    bits = tensors.packed_mask.cpu().numpy()  # [R, W]
    return outputs.SamplingMaskLists(bits.reshape(-1), np.arange(len(bits) + 1) * bits.shape[1])


def _switch_sampler(worker: Any, on: bool) -> None:
    worker.model_runner.sampler.return_sampling_mask = on
