"""The bytes that an allocator would count on a device, by kind, and their peak."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 512  # bytes: the allocator's unit
ACTIVATIONS = "activations"


class PendingReplacement(NamedTuple):
    """A storage that takes the place of another one, if that is freed before the next storage is seen."""

    replaced_key: int  # its key
    storage: weakref.ref[UntypedStorage]
    kind: str
    live_by_kind: Mapping[str, int]  # bytes by kind when it was made, without it


class AllocationTracker:
    """Storages from their first sight to their end, each under one kind.

    A storage counts under the kind that is `now` when it is first seen, unless it is filed under another.
    """

    def __init__(self, constant_bytes: Mapping[str, int]) -> None:
        self.current_kind = ACTIVATIONS
        self._live_by_kind: Counter[str] = Counter(constant_bytes)
        self.peak_bytes = sum(constant_bytes.values())
        self.peak_by_kind: Mapping[str, int] = dict(constant_bytes)  # bytes by kind, at the peak
        self._records: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}
        self._pending: PendingReplacement | None = None

    @contextlib.contextmanager
    def counting_as(self, kind: str) -> Iterator[None]:
        """Count what is made inside as this kind."""
        previous_kind, self.current_kind = self.current_kind, kind
        try:
            yield
        finally:
            self.current_kind = previous_kind

    def count_storage(self, storage: UntypedStorage, *, workspace_bytes: int = 0) -> None:
        """Count a storage that may be new, or resized; `beside`: bytes that its maker held meanwhile."""
        self.resolve_replacement()
        self._update_storage(storage, workspace_bytes)

    def count_replacement(self, replaced_storage: UntypedStorage, storage: UntypedStorage) -> None:
        """Count a new storage in the place of `replaced_key`; see phases.find_overwritten_storage."""
        self.resolve_replacement()
        self._pending = PendingReplacement(
            replaced_storage._cdata, weakref.ref(storage), self.current_kind, dict(self._live_by_kind)
        )

    def resolve_replacement(self) -> None:
        """Count a storage that may have taken another one's place."""
        replacement, self._pending = self._pending, None
        storage = replacement.storage() if replacement else None
        if replacement is None or storage is None:
            return
        with self.counting_as(replacement.kind):
            num_bytes = self._update_storage(storage)
        self._note_peak(replacement.live_by_kind, replacement.kind, num_bytes)

    def _update_storage(self, storage: UntypedStorage, workspace_bytes: int = 0) -> int:
        """Count a storage; return by how many bytes it has grown."""
        key, num_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        record = self._records.get(key)
        reference, counted_bytes, kind = record or (
            weakref.ref(storage, lambda _: self._remove_storage(key)),
            0,
            self.current_kind,
        )
        if num_bytes == counted_bytes and record:
            return 0
        self._records[key] = reference, num_bytes, kind
        self._add_bytes(kind, num_bytes - counted_bytes)
        self._note_peak(self._live_by_kind, self.current_kind, workspace_bytes)
        return num_bytes - counted_bytes

    def _note_peak(self, live_by_kind: Mapping[str, int], kind: str, additional_bytes: int) -> None:
        """Make the live bytes, with `more` of `kind`, the peak if they are the most so far."""
        if (live_bytes := sum(live_by_kind.values()) + additional_bytes) > self.peak_bytes:
            self.peak_bytes, self.peak_by_kind = (
                live_bytes,
                {**live_by_kind, kind: live_by_kind.get(kind, 0) + additional_bytes},
            )

    def assign_kind(self, tensors: Iterable[Any], kind: str) -> None:
        """Count these tensors' storages under another kind from now on."""
        for tensor in tensors:
            storage = to_local_shard(tensor).untyped_storage()
            self.count_storage(storage)
            reference, num_bytes, previous_kind = self._records[storage._cdata]
            self._records[storage._cdata] = reference, num_bytes, kind
            self._add_bytes(previous_kind, -num_bytes)
            self._add_bytes(kind, num_bytes)

    def reset_peak(self) -> None:
        """Begin a new peak, from the bytes alive now."""
        self.resolve_replacement()
        self.peak_bytes, self.peak_by_kind = sum(self._live_by_kind.values()), dict(self._live_by_kind)

    def _remove_storage(self, key: int) -> None:
        _, num_bytes, kind = self._records.pop(key)
        self._add_bytes(kind, -num_bytes)
        if self._pending is not None and self._pending.replaced_key == key:  # which was overwritten
            self._pending = self._pending._replace(live_by_kind=dict(self._live_by_kind))
            self.resolve_replacement()

    def _add_bytes(self, kind: str, num_bytes: int) -> None:
        self._live_by_kind[kind] += num_bytes


def to_local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
