"""Every random stream of a run is derived from its seed by name, so that both arms draw the same numbers."""

import hashlib

import torch
from torch import Tensor


def derive(seed: int, *names: str | int) -> int:
    """A seed for the stream called `names`, independent of the seed's other streams."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def sampling_uniforms(
    seed: int,
    step: int,
    num_sequences: int,
    max_new_tokens: int,
    *,
    stream: str = "sampling",
    fetch: int = 0,
) -> Tensor:
    """The numbers in [0, 1) that decide a step's draws: [num_sequences, max_new_tokens] float64, on the CPU.

    A row belongs to a sequence of the global batch, whichever rank samples it: rollouts do not depend on how
    many ranks there are, and a resumed run needs no sampler state. A step that fetches rollouts several times
    has other numbers each time.
    """
    names = (stream, step, fetch) if fetch else (stream, step)
    generator = torch.Generator().manual_seed(derive(seed, *names))
    return torch.rand(num_sequences, max_new_tokens, dtype=torch.float64, generator=generator)
