"""Shard specs: the parts of full tensors that a rank holds, so that any layout or backend can load a
checkpoint.

Full tensors are named `weights/NAME` and `optimizer/KEY/NAME`, with Hugging Face's parameter names.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

METADATA = "pieces"  # key in the metadata of a rank's checkpoint file


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a full tensor's elements; may be empty."""

    # The one-ULP control seeds its signs with the repr of pieces (trainer/faults/setup.py): renaming this
    # class or a field of it would change them.
    shape: tuple[int, ...]  # of the full tensor
    slices: tuple[slice, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Piece":
        return cls(tuple(shape), tuple(slice(0, size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.slices)

    def intersect(self, other: "Piece") -> tuple[slice, ...] | None:
        """Return the slices of the elements that both pieces have, or None if there are none."""
        overlap = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(self.slices, other.slices, strict=True)
        ]
        return tuple(overlap) if all(s.start < s.stop for s in overlap) else None

    def relative_to(self, slices: tuple[slice, ...]) -> tuple[slice, ...]:
        """Convert slices of the full tensor to slices of the piece."""
        return tuple(
            slice(s.start - base.start, s.stop - base.start)
            for s, base in zip(slices, self.slices, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The contents of a rank's tensor: pieces of full tensors, concatenated along dimension 0, padded with 0.

    `head_dim`: the pieces are query, key and value projections, interleaved by group as in megatron-core: the
    queries of a group, then its key and its value. `flat_range`: the rank holds only this range of the
    flattened elements. `is_rounded_copy`: the tensor may be a lower-precision copy, which is never read.
    """

    pieces: tuple[tuple[str, Piece], ...]  # (full tensor's name, piece)
    shape: tuple[int, ...]  # of the concatenated pieces
    head_dim: int | None = None
    flat_range: tuple[int, int] | None = None
    is_rounded_copy: bool = False

    @classmethod
    def from_piece(cls, name: str, piece: Piece) -> "ShardSpec":
        """Return the spec of a tensor that is one piece, unchanged."""
        return cls(pieces=((name, piece),), shape=piece.local_shape)

    def with_prefix(self, prefix: str) -> "ShardSpec":
        """Return a copy with a prefix before the full tensors' names."""
        return replace(self, pieces=tuple((f"{prefix}{name}", piece) for name, piece in self.pieces))

    @property
    def is_single_piece(self) -> bool:
        """Return whether the tensor is one unchanged piece, of which slices can be read."""
        return (
            len(self.pieces) == 1 and self.flat_range is None and self.shape == self.pieces[0][1].local_shape
        )

    def assemble(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.head_dim is not None:
            num_groups = len(tensors[-1]) // self.head_dim
            grouped = [tensor.unflatten(0, (num_groups, -1)) for tensor in tensors]
            shard = torch.cat(grouped, dim=1).flatten(0, 1)
        elif not self.shape:
            shard = tensors[0]
        else:
            shard = torch.cat([tensor.reshape(-1, *self.shape[1:]) for tensor in tensors])
            num_missing_rows = self.shape[0] - len(shard)
            shard = (
                torch.cat([shard, shard.new_zeros(num_missing_rows, *self.shape[1:])])
                if num_missing_rows
                else shard
            )
        assert shard.shape == self.shape, f"{self.pieces[0][0]}: {list(shard.shape)}, not {list(self.shape)}"
        return shard if self.flat_range is None else shard.flatten()[slice(*self.flat_range)]

    def split(self, shard: Tensor) -> list[Tensor]:
        """Split the tensor, without `flat_range`, into its pieces: the inverse of `assemble`."""
        if not self.shape:
            return [shard for _ in self.pieces]
        shapes = [piece.local_shape for _, piece in self.pieces]
        if self.head_dim is not None:
            num_groups = shapes[-1][0] // self.head_dim
            rows = [shape[0] // num_groups for shape in shapes]
            return [
                tensor.flatten(0, 1) for tensor in shard.unflatten(0, (num_groups, -1)).split(rows, dim=1)
            ]
        tensors, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape) // math.prod(self.shape[1:])
            tensors.append(shard[start:stop].reshape(shape))
            start = stop
        return tensors


def specs_to_metadata(specs: Mapping[str, ShardSpec], names: Collection[str]) -> dict[str, str]:
    """Return the metadata of a rank's checkpoint file: the specs of the tensors in it."""
    content = {
        name: {
            "pieces": [
                [full_name, piece.shape, [[s.start, s.stop] for s in piece.slices]]
                for full_name, piece in spec.pieces
            ],
            "shape": spec.shape,
            "width": spec.head_dim,
            "span": spec.flat_range,
        }
        for name, spec in specs.items()
        if name in names and not spec.is_rounded_copy
    }
    return {METADATA: json.dumps(content)}


def specs_from_metadata(metadata: Mapping[str, str] | None) -> dict[str, ShardSpec]:
    """Parse the metadata of a rank's checkpoint file.

    Raises ValueError if it has no specs, or specs of another version of abrun.
    """
    if not metadata or METADATA not in metadata:
        raise ValueError("its files have no metadata about shards")
    try:
        return {
            name: ShardSpec(
                pieces=tuple(
                    (full_name, Piece(tuple(shape), tuple(slice(*pair) for pair in bounds)))
                    for full_name, shape, bounds in spec["pieces"]
                ),
                shape=tuple(spec["shape"]),
                head_dim=spec["width"],
                flat_range=tuple(spec["span"]) if spec["span"] else None,
            )
            for name, spec in json.loads(metadata[METADATA]).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "its files have metadata about shards that this version of abrun cannot read"
        ) from error


def optimizer_specs(spec: ShardSpec) -> dict[str, ShardSpec]:
    """Return the specs of a parameter's AdamW state, by state key."""
    step_pieces = tuple((name, Piece((), ())) for name, _ in spec.pieces)
    return {"step": ShardSpec(pieces=step_pieces, shape=()), "exp_avg": spec, "exp_avg_sq": spec}
