"""Which bytes are alive on a device, of what kind, and how many at most: what an allocator would count."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

BLOCK = 512  # bytes: the allocator's unit
ACTIVATIONS = "activations"


class Account:
    """Storages from their first sight to their end, each under one kind.

    A storage counts under the kind that is `now` when it is first seen, unless it is filed under another.
    """

    def __init__(self, always: Mapping[str, int]) -> None:
        self.now = ACTIVATIONS
        self._alive: Counter[str] = Counter(always)
        self._live_bytes = self.peak_bytes = sum(always.values())
        self.peak: Mapping[str, int] = dict(always)  # bytes by kind, at the peak
        self._entries: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}

    @contextlib.contextmanager
    def kind(self, name: str) -> Iterator[None]:
        """What is made inside is of this kind."""
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before

    def see(self, storage: UntypedStorage, *, beside: int = 0) -> None:
        """A storage that may be new, or of another size; `beside`: bytes that its maker held meanwhile."""
        key, num_bytes = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        entry = self._entries.get(key)
        reference, counted, kind = entry or (weakref.ref(storage, lambda _: self._forget(key)), 0, self.now)
        if num_bytes == counted and entry:
            return
        self._entries[key] = reference, num_bytes, kind
        self._add(kind, num_bytes - counted)
        if self._live_bytes + beside > self.peak_bytes:
            self.peak_bytes = self._live_bytes + beside
            self.peak = dict(self._alive)
            self.peak[self.now] = self.peak.get(self.now, 0) + beside  # pyright: ignore

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
        """Look for a new peak, from what is alive now."""
        self.peak_bytes, self.peak = self._live_bytes, dict(self._alive)

    def _forget(self, key: int) -> None:
        _, num_bytes, kind = self._entries.pop(key)
        self._add(kind, -num_bytes)

    def _add(self, kind: str, num_bytes: int) -> None:
        self._live_bytes += num_bytes
        self._alive[kind] += num_bytes


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
