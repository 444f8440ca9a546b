"""The number that stands for weights: against a plain loop, and for what must and must not change it."""

import hashlib
import struct

import pytest
import torch
from torch import Tensor

from abrun.models import content, content_of, sample_of, weights_hash

WEIGHT = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))


def plainly(name: str, weight: Tensor) -> int:
    digest = hashlib.sha256(f"{name} {list(weight.shape)}".encode()).digest()
    start, total = int.from_bytes(digest[:8], "little", signed=True), 0
    for place, value in enumerate(weight.flatten().tolist(), start=1):
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        mixed = ((bits + place * content.STEP + start) * content.FIRST) % 2**64
        mixed -= 2**64 if mixed >= 2**63 else 0
        total += (mixed ^ (mixed >> 31)) * content.SECOND
    return total % 2**64


@pytest.mark.parametrize("chunk", [4, 2**22])
def test_a_number_by_hand(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "CHUNK", chunk)
    assert content_of("a", WEIGHT) == plainly("a", WEIGHT)
    assert content_of("a", WEIGHT.T) == plainly("a", WEIGHT.T), "a view counts as what it shows"
    assert content_of("a", WEIGHT.bfloat16()) == plainly("a", WEIGHT.bfloat16())


def test_what_changes_it() -> None:
    swapped, nudged = WEIGHT.clone(), WEIGHT.clone()
    swapped[0, 0], swapped[4, 6] = WEIGHT[4, 6], WEIGHT[0, 0]
    nudged[3, 3] = torch.nextafter(WEIGHT[3, 3], torch.tensor(9.0))
    named = [("a", WEIGHT), ("b", WEIGHT), ("a", WEIGHT.view(7, 5)), ("a", swapped), ("a", nudged)]
    assert len({content_of(name, weight) for name, weight in named}) == len(named)


def test_the_order_and_the_rank_of_a_tensor_do_not() -> None:
    a, b, c = (content_of(name, WEIGHT) for name in "abc")
    whole = weights_hash([a, b, c])
    assert len(whole) == 16 and whole == weights_hash([(a + c) % 2**64, b]) != weights_hash([a, b])


def test_a_sample_has_what_the_tensor_has_wherever_it_lies() -> None:
    large = torch.randn(200, 300, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample_of("a", WEIGHT), WEIGHT.flatten()), "a small tensor whole"
    sample, again = sample_of("a", large), sample_of("a", large.T.contiguous().T)
    assert len(sample) == content.SAMPLED and torch.equal(sample, again)
    changed = large.clone()
    changed.view(-1)[::2] += 1
    moved = sample_of("a", changed) - sample
    assert 90 < int(moved.round().sum()) < 166, "places are spread: about half of them are even"
    assert len({int((large.flatten() == value).nonzero()[0]) // 300 for value in sample}) > 100
    assert not torch.equal(sample_of("b", large), sample)
