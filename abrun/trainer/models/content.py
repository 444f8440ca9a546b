"""A hash that tells whether two sets of weights are equal, and sketches that estimate how far they differ.

Both describe whole tensors, independent of how they are sharded over ranks.

The hash is the sum modulo 2^64, over all elements, of a mix of the element's bits as float32, its tensor's
name and shape, and its position. Shards may therefore be added in any order, by any rank. It is not
cryptographic.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 2**22  # elements mixed at a time on a GPU: 32 MiB for each of a few temporary copies
CPU_CHUNK = 2**18  # these stay in the processor's cache, which is 5 to 10 times as fast
SKETCHED = 256  # numbers in a tensor's sketch
# SplitMix64's (Steele, Lea and Flood, 2014) without their top bit, to fit an int64.
STEP, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def content_of(name: str, weight: Tensor) -> int:
    """Return the hash of one whole tensor, below 2^64. Zeros of opposite signs differ."""
    start, total = _start(name, weight), 0
    for chunk, offset in _chunks(weight):
        position = torch.arange(offset + 1, offset + 1 + len(chunk), device=chunk.device)
        total += int(_mix(chunk.float().view(torch.int32) + position * STEP + start).sum())
    return total % 2**64


def sketch_of(name: str, weight: Tensor) -> Tensor:  # [at most 256] float64, on the CPU
    """Return the count sketch of one whole tensor, or the tensor itself if it is no larger.

    A sketch has signed sums over 256 buckets. An element's sign and bucket follow from the tensor's name and
    shape and the element's flat index. Sketches are linear: the sum of squares of a difference of two is an
    unbiased estimate of that of the tensors' difference; the norm's standard error is 4.4 % (sqrt(1 / 512)).
    """
    if weight.numel() <= SKETCHED:
        return weight.detach().flatten().double().cpu()
    start, device = _start(name, weight), weight.device
    total = torch.zeros(SKETCHED, dtype=torch.float64, device=device)
    column = torch.arange(SKETCHED, device=device)
    for chunk, offset in _chunks(weight):
        position = torch.arange(offset + 1, offset + 1 + len(chunk), device=device)
        values = chunk.double()
        signed = torch.where(_mix(position * STEP + start) < 0, -values, values)
        rows = torch.nn.functional.pad(signed, (0, -len(chunk) % SKETCHED)).view(-1, SKETCHED)
        # 256 neighbouring elements go to 256 different buckets, so that no addition needs to be atomic.
        number = torch.arange(offset // SKETCHED, offset // SKETCHED + len(rows), device=device)
        shift = (_mix(number * STEP + (start ^ FIRST)) >> 40) & (SKETCHED - 1)
        total += rows.gather(1, column ^ shift[:, None]).sum(0)
    return total.cpu()


def weights_hash(contents: Iterable[int]) -> str:
    """Return the hash of a network, from the hashes of its tensors."""
    return f"{sum(contents) % 2**64:016x}"


def _start(name: str, weight: Tensor) -> int:
    digest = hashlib.sha256(f"{name} {list(weight.shape)}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(number: Tensor) -> Tensor:  # int64, both
    mixed = number * FIRST
    return (mixed ^ (mixed >> 31)) * SECOND


def _chunks(weight: Tensor) -> Iterable[tuple[Tensor, int]]:
    flat = weight.detach().contiguous().flatten()
    size = CHUNK if flat.is_cuda else min(CHUNK, CPU_CHUNK)
    return ((flat[offset : offset + size], offset) for offset in range(0, len(flat), size))
