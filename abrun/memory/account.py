"""The bytes that an allocator would count on a device, by kind, and their peak."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

BLOCK = 512  # bytes: the allocator's unit
ACTIVATIONS = "activations"


class Successor(NamedTuple):
    """A storage that takes the place of another one, if that is freed before the next storage is seen."""

    predecessor: int  # its key
    storage: weakref.ref[UntypedStorage]
    kind: str
    alive: Mapping[str, int]  # bytes by kind when it was made, without it


class Account:
    """Storages from their first sight to their end, each under one kind.

    A storage counts under the kind that is `now` when it is first seen, unless it is filed under another.
    """

    def __init__(self, always: Mapping[str, int]) -> None:
        self.now = ACTIVATIONS
        self._alive: Counter[str] = Counter(always)
        self.peak_bytes = sum(always.values())
        self.peak: Mapping[str, int] = dict(always)  # bytes by kind, at the peak
        self._entries: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}
        self._successor: Successor | None = None

    @contextlib.contextmanager
    def kind(self, name: str) -> Iterator[None]:
        """Count what is made inside as this kind."""
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before

    def see(self, storage: UntypedStorage, *, beside: int = 0) -> None:
        """Count a storage that may be new, or resized; `beside`: bytes that its maker held meanwhile."""
        self.settle()
        self._see(storage, beside)

    def see_overwriting(self, predecessor: UntypedStorage, storage: UntypedStorage) -> None:
        """Count a new storage in the place of `predecessor`; see phases.find_overwritten_storage."""
        self.settle()
        self._successor = Successor(predecessor._cdata, weakref.ref(storage), self.now, dict(self._alive))

    def settle(self) -> None:
        """Count a storage that may have taken another one's place."""
        successor, self._successor = self._successor, None
        storage = successor.storage() if successor else None
        if successor is None or storage is None:
            return
        with self.kind(successor.kind):
            num_bytes = self._see(storage)
        self._note_peak(successor.alive, successor.kind, num_bytes)

    def _see(self, storage: UntypedStorage, beside: int = 0) -> int:
        """Count a storage; return by how many bytes it has grown."""
        key, num_bytes = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        entry = self._entries.get(key)
        reference, counted, kind = entry or (weakref.ref(storage, lambda _: self._forget(key)), 0, self.now)
        if num_bytes == counted and entry:
            return 0
        self._entries[key] = reference, num_bytes, kind
        self._add(kind, num_bytes - counted)
        self._note_peak(self._alive, self.now, beside)
        return num_bytes - counted

    def _note_peak(self, alive: Mapping[str, int], kind: str, more: int) -> None:
        """Make the live bytes, with `more` of `kind`, the peak if they are the most so far."""
        if (live_bytes := sum(alive.values()) + more) > self.peak_bytes:
            self.peak_bytes, self.peak = live_bytes, {**alive, kind: alive.get(kind, 0) + more}

    def file(self, tensors: Iterable[Any], kind: str) -> None:
        """Count these tensors' storages under another kind from now on."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            self.see(storage)
            reference, num_bytes, before = self._entries[storage._cdata]
            self._entries[storage._cdata] = reference, num_bytes, kind
            self._add(before, -num_bytes)
            self._add(kind, num_bytes)

    def start(self) -> None:
        """Begin a new peak, from the bytes alive now."""
        self.settle()
        self.peak_bytes, self.peak = sum(self._alive.values()), dict(self._alive)

    def _forget(self, key: int) -> None:
        _, num_bytes, kind = self._entries.pop(key)
        self._add(kind, -num_bytes)
        if self._successor is not None and self._successor.predecessor == key:  # which was overwritten
            self._successor = self._successor._replace(alive=dict(self._alive))
            self.settle()

    def _add(self, kind: str, num_bytes: int) -> None:
        self._alive[kind] += num_bytes


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
