"""Simulated allocator statistics of a device: live bytes by kind, and their peak."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

BLOCK_BYTES = 512  # torch's CUDA allocator rounds sizes up to this
ACTIVATIONS = "activations"


class PendingReplacement(NamedTuple):
    """A new storage that may have overwritten an old one.

    It has if the old storage is freed before the next storage is counted. Both then count once.
    """

    replaced_key: int  # key of the old storage
    storage: weakref.ref[UntypedStorage]
    kind: str
    live_by_kind: Mapping[str, int]  # bytes, without the new storage


class AllocationTracker:
    """Tracker of live storages: each counts under one kind until it is freed.

    The kind is `current_kind` when the storage is first counted; `assign_kind` changes it.
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
        """Count new storages under this kind while entered."""
        previous_kind, self.current_kind = self.current_kind, kind
        try:
            yield
        finally:
            self.current_kind = previous_kind

    def count_storage(self, storage: UntypedStorage, *, workspace_bytes: int = 0) -> None:
        """Count a storage that may be new or resized.

        `workspace_bytes`: what the operator that returned it held temporarily.
        """
        self.resolve_replacement()
        self._update_storage(storage, workspace_bytes)

    def count_replacement(self, replaced_storage: UntypedStorage, storage: UntypedStorage) -> None:
        """Hold back a new storage that may overwrite an old one (phases.find_overwritten_storage)."""
        self.resolve_replacement()
        self._pending = PendingReplacement(
            replaced_storage._cdata, weakref.ref(storage), self.current_kind, dict(self._live_by_kind)
        )

    def resolve_replacement(self) -> None:
        """Count the storage that was held back, if there is one."""
        replacement, self._pending = self._pending, None
        storage = replacement.storage() if replacement else None
        if replacement is None or storage is None:
            return
        with self.counting_as(replacement.kind):
            num_bytes = self._update_storage(storage)
        self._note_peak(replacement.live_by_kind, replacement.kind, num_bytes)

    def _update_storage(self, storage: UntypedStorage, workspace_bytes: int = 0) -> int:
        """Count a storage and return the number of bytes by which it has grown."""
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
        """Update the peak if the live bytes, plus `additional_bytes` of `kind`, exceed it."""
        if (live_bytes := sum(live_by_kind.values()) + additional_bytes) > self.peak_bytes:
            self.peak_bytes, self.peak_by_kind = (
                live_bytes,
                {**live_by_kind, kind: live_by_kind.get(kind, 0) + additional_bytes},
            )

    def assign_kind(self, tensors: Iterable[Any], kind: str) -> None:
        """Count the storages of these tensors under another kind from now on."""
        for tensor in tensors:
            storage = to_local_shard(tensor).untyped_storage()
            self.count_storage(storage)
            reference, num_bytes, previous_kind = self._records[storage._cdata]
            self._records[storage._cdata] = reference, num_bytes, kind
            self._add_bytes(previous_kind, -num_bytes)
            self._add_bytes(kind, num_bytes)

    def reset_peak(self) -> None:
        self.resolve_replacement()
        self.peak_bytes, self.peak_by_kind = sum(self._live_by_kind.values()), dict(self._live_by_kind)

    def _remove_storage(self, key: int) -> None:
        _, num_bytes, kind = self._records.pop(key)
        self._add_bytes(kind, -num_bytes)
        if self._pending is not None and self._pending.replaced_key == key:  # the old storage was overwritten
            self._pending = self._pending._replace(live_by_kind=dict(self._live_by_kind))
            self.resolve_replacement()

    def _add_bytes(self, kind: str, num_bytes: int) -> None:
        self._live_by_kind[kind] += num_bytes


def to_local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
