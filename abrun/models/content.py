"""A number that says whether two sets of weights are the same, and a sample that says how far they are apart.

Both are of whole tensors, however they were spread over ranks.

The number is the sum modulo 2^64, over all elements, of a mix of the element's bits as float32, its tensor's
name and shape and its place: so parts may be added up in any order, by any rank. Not cryptographic.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 2**22  # elements mixed at once: 32 MiB for each of a few copies
# A sample has all elements of tensors up to so many, and so many of each larger one.
SAMPLED_WHOLE, SAMPLED = 4096, 256
# SplitMix64's (Steele, Lea and Flood, 2014) without their top bit, to fit an int64.
STEP, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def content_of(name: str, weight: Tensor) -> int:
    """The number of one whole tensor, below 2^64. Zeros of both signs are different."""
    start, total = _start(name, weight), 0
    for part, first in _chunks(weight):
        place = torch.arange(first + 1, first + 1 + len(part), device=part.device)
        total += int(_mixed(part.float().view(torch.int32) + place * STEP + start).sum())
    return total % 2**64


def sample_of(name: str, weight: Tensor) -> Tensor:  # [n] float32, on the CPU
    """Elements of one whole tensor, at places that its name and shape fix; some may be there twice."""
    flat = weight.detach().flatten()
    if len(flat) > SAMPLED_WHOLE:
        number = torch.arange(1, SAMPLED + 1, device=flat.device)
        flat = flat[_mixed(number * STEP + _start(name, weight)) % len(flat)]
    return flat.float().cpu()


def weights_hash(contents: Iterable[int]) -> str:
    """Of the tensors' numbers."""
    return f"{sum(contents) % 2**64:016x}"


def _start(name: str, weight: Tensor) -> int:
    digest = hashlib.sha256(f"{name} {list(weight.shape)}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mixed(number: Tensor) -> Tensor:  # int64, both
    mixed = number * FIRST
    return (mixed ^ (mixed >> 31)) * SECOND


def _chunks(weight: Tensor) -> Iterable[tuple[Tensor, int]]:
    flat = weight.detach().contiguous().flatten()
    return ((flat[first : first + CHUNK], first) for first in range(0, len(flat), CHUNK))
