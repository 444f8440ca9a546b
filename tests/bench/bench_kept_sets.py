"""Measure the cost of vLLM's sets of kept tokens: to collect, send through a socket, and score them.

    python tests/bench/bench_kept_sets.py

Seconds are those of the processor, so that other work on the machine counts little. The arrays are those that
vLLM's sampler hands over in each step of its engine. With vLLM installed, its own way from there to numbers,
which abrun does not go, is measured too.
"""

import importlib
import importlib.util
import inspect
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from abrun.recipe.policy import Filters
from abrun.rl.sampling import filtered_logprobs, packed
from abrun.rollout import Completion
from abrun.rollout.vllm.kept import KeptSets

VOCABULARIES = (32_768, 151_936)
SEQUENCES, TOKENS, SCORED, SENT = 256, 16, 32, 16
NUM_KEPT = (1, 500, 5_000)
COMPACT = 2_048  # numbers of a row that vLLM copies from the GPU; it unpacks longer rows
REPEATS = 3


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Return the least seconds of the processor of some calls."""
    took_s = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        call()
        took_s.append(time.process_time() - began_s)
    return min(took_s)


def rows_of(size: int, num_kept: int) -> np.ndarray:  # [SEQUENCES, W]
    """Return the bits of a step: each sequence keeps the first token and others by chance."""
    flags = torch.zeros(SEQUENCES, size, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for row in flags:
        row[torch.randperm(size, generator=generator)[:num_kept]] = True
    flags[:, 0] = True
    return packed(flags).numpy()


def collected(bits: np.ndarray, size: int) -> list[Completion]:
    """Return completions with the sets of TOKENS steps of an engine."""
    llm: Any = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    llm.llm_engine = llm
    llm.model_config = SimpleNamespace(get_vocab_size=lambda: size)
    sets = KeptSets(llm)
    for _ in range(TOKENS):
        llm.output_processor.request_states = {
            row: SimpleNamespace(
                external_req_id=str(row), sampling_mask_chunks=[SimpleNamespace(token_ids=bits[row])]
            )
            for row in range(SEQUENCES)
        }
        sets.collect()
    output = SimpleNamespace(token_ids=[0] * TOKENS, sampling_mask=None)
    return [
        Completion(token_ids=[0] * TOKENS, logprobs=[-1.0] * TOKENS, support=support, truncated=True)
        for support in (sets.take(str(row), output) for row in range(SEQUENCES))
    ]


def numbers_of(bits: np.ndarray, size: int, num_kept: int) -> Callable[[], Any]:
    """Return the call by which vLLM makes numbers of a step's bits."""
    library: Any = importlib.import_module("vllm.v1.worker.gpu.sample.output")
    ids = np.zeros((SEQUENCES, min(COMPACT, size)), dtype=np.int32)
    fields = {
        "token_ids": torch.from_numpy(ids),
        "packed_mask": torch.from_numpy(bits),
        "counts": torch.full((SEQUENCES,), num_kept, dtype=torch.int32),
        "vocab_size": size,
        "rows_per_request": 1,
    }
    tensors = library.SamplingMaskTensors(
        **{name: fields[name] for name in library.SamplingMaskTensors._fields}
    )
    takes_counts = inspect.signature(tensors.tolists).parameters
    return lambda: tensors.tolists(*[np.ones(SEQUENCES, dtype=np.int64)] * len(takes_counts))


def send(completions: list[Completion]) -> int:
    """Pickle completions at one end of a socket and unpickle them at the other; return the bytes."""
    ours, theirs = Pipe()
    data = pickle.dumps(completions)
    sender = threading.Thread(target=theirs.send, args=(data,))
    sender.start()
    pickle.loads(ours.recv())
    sender.join()
    return len(data)


def score(size: int, support: torch.Tensor | None) -> float:
    """Return the seconds of the log-probs of SCORED tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SCORED, size, generator=generator) * 3
    target = torch.randint(size, (SCORED,), generator=generator)
    filters = Filters(top_p=0.9)
    return cpu_seconds(
        lambda: filtered_logprobs(logits, target, filters=filters, ignore_index=-1, support=support)
    )


def main() -> None:
    torch.set_num_threads(1)
    for size in VOCABULARIES:
        print(f"a vocabulary of {size}; a step draws a token of {SEQUENCES} sequences")
        bits = rows_of(size, NUM_KEPT[-1])
        took_s = cpu_seconds(lambda bits=bits, size=size: collected(bits, size))
        print(f"collecting: {took_s / TOKENS * 1e3:.2f} ms a step")
        if importlib.util.find_spec("vllm"):
            for num_kept in NUM_KEPT:
                took_s = cpu_seconds(numbers_of(rows_of(size, num_kept), size, num_kept))
                print(f"numbers by vLLM, {num_kept} kept: {took_s * 1e3:.2f} ms a step")
        completions = collected(bits, size)[:SENT]
        took_s = cpu_seconds(lambda completions=completions: send(completions)) / (SENT * TOKENS)
        print(f"socket: {send(completions) / (SENT * TOKENS):.0f} bytes, {took_s * 1e6:.0f} us a token")
        support = torch.randint(256, (SCORED, -(-size // 8)), dtype=torch.uint8)
        for name, sets in (("without", None), ("with", support)):
            print(f"log-probs {name} sets: {score(size, sets) / SCORED * 1e3:.2f} ms a token")


if __name__ == "__main__":
    main()
