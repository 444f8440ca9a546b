"""Measure the cost of vLLM's sets of kept tokens: to pack them, to send them through a socket, to score them.

    python tests/bench/bench_kept_sets.py

The arrays are those that vLLM reports after each step of its engine; vLLM itself is not needed.
"""

import pickle
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from abrun.recipe import Filters
from abrun.rl.sampling import filtered_logprobs
from abrun.rollout import Completion
from abrun.rollout.vllm.kept import KeptSets

VOCABULARY, SEQUENCES, TOKENS, SCORED = 151_936, 16, 64, 32
REPEATS = 3


def sampled(generator: np.random.Generator, num_kept: int) -> tuple[float, list[Completion]]:
    """Return the seconds of packing, and completions with their sets."""
    llm: Any = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))
    llm.llm_engine = llm
    llm.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    sets, took_s = KeptSets(llm), 0.0
    drawn: list[list[int]] = [[] for _ in range(SEQUENCES)]
    for _ in range(TOKENS):
        states = {}
        for row, tokens in enumerate(drawn):
            ids = np.sort(generator.choice(VOCABULARY, num_kept, replace=False)).astype(np.int32)
            tokens.append(int(ids[0]))
            chunk = SimpleNamespace(token_ids=ids, offsets=None)
            states[row] = SimpleNamespace(external_req_id=str(row), sampling_mask_chunks=[chunk])
        llm.output_processor.request_states = states
        began_s = time.perf_counter()
        sets.collect()
        took_s += time.perf_counter() - began_s
    began_s = time.perf_counter()
    outputs = [SimpleNamespace(token_ids=tokens, sampling_mask=None) for tokens in drawn]
    support = [sets.take(str(row), output) for row, output in enumerate(outputs)]
    took_s += time.perf_counter() - began_s
    return took_s, [
        Completion(token_ids=tokens, logprobs=[-1.0] * TOKENS, support=kept, truncated=True)
        for tokens, kept in zip(drawn, support, strict=True)
    ]


def sent(completions: list[Completion]) -> tuple[float, int]:
    """Return the seconds from pickling at one end of a socket to the completions at the other, and bytes."""
    ours, theirs = Pipe()
    began_s = time.perf_counter()
    data = pickle.dumps(completions)
    sender = threading.Thread(target=theirs.send, args=(data,))
    sender.start()
    pickle.loads(ours.recv())
    sender.join()
    return time.perf_counter() - began_s, len(data)


def scored(support: torch.Tensor | None) -> float:
    """Return the seconds of the log-probs of SCORED tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SCORED, VOCABULARY, generator=generator) * 3
    target = torch.randint(VOCABULARY, (SCORED,), generator=generator)
    began_s = time.perf_counter()
    filtered_logprobs(logits, target, filters=Filters(top_p=0.9), ignore_index=-1, support=support)
    return time.perf_counter() - began_s


def main() -> None:
    torch.set_num_threads(1)
    tokens = SEQUENCES * TOKENS
    for num_kept in (20, 1000, 20_000, VOCABULARY):
        runs = [sampled(np.random.default_rng(seed), num_kept) for seed in range(REPEATS)]
        packing_us = min(took_s for took_s, _ in runs) / tokens * 1e6
        seconds, num_bytes = min(sent(runs[0][1]) for _ in range(REPEATS))
        print(
            f"{num_kept} kept: packing {packing_us:.0f} us a token; socket {num_bytes / tokens:.0f} bytes "
            f"and {seconds / tokens * 1e6:.0f} us a token"
        )
    bare = [
        Completion(token_ids=[1] * TOKENS, logprobs=[-1.0] * TOKENS, truncated=True) for _ in range(SEQUENCES)
    ]
    seconds, num_bytes = min(sent(bare) for _ in range(REPEATS))
    print(f"without: socket {num_bytes / tokens:.0f} bytes and {seconds / tokens * 1e6:.0f} us a token")
    support = torch.randint(256, (SCORED, -(-VOCABULARY // 8)), dtype=torch.uint8)
    for name, sets in (("without", None), ("with", support)):
        seconds = min(scored(sets) for _ in range(REPEATS))
        print(f"{name}: log-probs {seconds / SCORED * 1e3:.2f} ms a token")


if __name__ == "__main__":
    main()
