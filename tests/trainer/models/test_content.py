"""The number that stands for weights: against a plain loop, and for what must and must not change it."""

import hashlib
import struct

import pytest
import torch
from torch import Tensor

from abrun.trainer.models import weights as content
from abrun.trainer.models.weights import content_of, sketch_of

WEIGHT = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


def plain_start(name: str, weight: Tensor) -> int:
    digest = hashlib.sha256(f"{name} {list(weight.shape)}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def wrapped(number: int) -> int:
    """A number as a signed one of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def plainly_mixed(number: int) -> int:
    mixed = wrapped(number * content.FIRST)
    return wrapped((mixed ^ (mixed >> 31)) * content.SECOND)


def plainly(name: str, weight: Tensor) -> int:
    start, total = plain_start(name, weight), 0
    for place, value in enumerate(weight.flatten().tolist(), start=1):
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        total += plainly_mixed(bits + place * content.STEP + start)
    return total % 2**64


@pytest.mark.parametrize("chunk", [4, 2**22])
def test_a_number_by_hand(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "CHUNK", chunk)
    assert content_of("a", WEIGHT) == plainly("a", WEIGHT)
    assert content_of("a", WEIGHT.T) == plainly("a", WEIGHT.T)  # a view counts as what it shows
    assert content_of("a", WEIGHT.bfloat16()) == plainly("a", WEIGHT.bfloat16())


def test_what_changes_it() -> None:
    swapped, nudged = WEIGHT.clone(), WEIGHT.clone()
    swapped[0, 0], swapped[4, 6] = WEIGHT[4, 6], WEIGHT[0, 0]
    nudged[3, 3] = torch.nextafter(WEIGHT[3, 3], torch.tensor(9.0))
    named = [("a", WEIGHT), ("b", WEIGHT), ("a", WEIGHT.view(7, 5)), ("a", swapped), ("a", nudged)]
    assert len({content_of(name, weight) for name, weight in named}) == len(named)


def estimate(left: Tensor, right: Tensor, name: str = "a") -> float:
    """||right - left|| by sketches, relative to the truth."""
    squares = (sketch_of(name, right) - sketch_of(name, left)).square().sum()
    return float(squares.sqrt() / (right.double() - left.double()).norm())


def plain_sketch(name: str, weight: Tensor, first: int = 0) -> Tensor:
    start, total = plain_start(name, weight), [0.0] * 256
    for place, value in enumerate(weight.flatten().tolist(), start=first):
        sign = -1 if plainly_mixed((place + 1) * content.STEP + start) < 0 else 1
        shift = plainly_mixed(place // 256 * content.STEP + (start ^ content.FIRST)) >> 40 & 255
        total[place % 256 ^ shift] += sign * value
    return torch.tensor(total, dtype=torch.float64)


def test_a_sketch_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed sums, for each element by Python's integers; the same in chunks, and of any layout in memory."""
    weight = torch.randn(37, 41, generator=torch.Generator().manual_seed(2))
    whole = sketch_of("a", weight)
    assert whole.dtype == torch.float64 and torch.allclose(whole, plain_sketch("a", weight))
    assert torch.equal(whole, sketch_of("a", weight.T.contiguous().T))
    monkeypatch.setattr(content, "CHUNK", 512)
    assert torch.allclose(whole, sketch_of("a", weight), rtol=1e-12)
    assert not torch.allclose(whole, sketch_of("b", weight))
    small = weight[:5, :7]
    assert torch.equal(sketch_of("a", small), small.flatten().double())  # a small tensor whole


@pytest.mark.parametrize("kind", ["rows", "column", "random", "constant"])
def test_a_sketch_estimates_a_difference_wherever_it_lies(kind: str) -> None:
    """20 of 2048 rows, one column, all elements by as little as rounding, a shift."""
    generator, estimates = torch.Generator().manual_seed(3), []
    before = torch.randn(2048, 64, generator=generator)
    noise = torch.randn(2048, 64, generator=generator)
    change = torch.zeros_like(before)
    rows = torch.randperm(2048, generator=generator)[:20]
    at = {"rows": (rows, slice(None)), "column": (slice(None), 5)}
    if kind in at:
        change[at[kind]] = noise[at[kind]]
    elif kind == "constant":
        change += 0.5
    else:
        change += noise * 1e-6
    estimates = [estimate(before, before + change, name=str(seed)) for seed in range(30)]
    within = sum(abs(one - 1) < 0.08 for one in estimates)
    assert within >= 24 and abs(sum(estimates) / 30 - 1) < 0.03, (within, min(estimates), max(estimates))
    assert max(abs(one - 1) for one in estimates) < 0.16


def test_indices_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a tensor of 5e9 elements, whose indices pass 2^32 and whose products wrap around 2^64."""
    first, part = 5 * 10**9 // 256 * 256, torch.randn(1024, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(content, "_chunks", lambda weight: [(weight.flatten(), first)])
    assert torch.allclose(sketch_of("a", part), plain_sketch("a", part, first))
