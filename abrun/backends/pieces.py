"""Which part of a whole tensor a rank holds, so that what one layout saved another can take."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

METADATA = "pieces"  # of a rank's file


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor's elements; it can be empty."""

    shape: tuple[int, ...]  # of the whole
    slices: tuple[slice, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the piece itself."""
        return tuple(part.stop - part.start for part in self.slices)

    def common(self, other: "Piece") -> tuple[slice, ...] | None:
        """The elements that both have; None: there are none."""
        both = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(self.slices, other.slices, strict=True)
        ]
        return tuple(both) if all(part.start < part.stop for part in both) else None

    def inside(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where some of its elements lie in the piece itself."""
        return tuple(
            slice(of.start - own.start, of.stop - own.start)
            for of, own in zip(part, self.slices, strict=True)
        )


def as_metadata(pieces: Mapping[str, Piece], names: Collection[str]) -> dict[str, str]:
    """What a rank's file says of those of its tensors that are pieces of whole ones."""
    content = {
        name: [piece.shape, [[part.start, part.stop] for part in piece.slices]]
        for name, piece in pieces.items()
        if name in names
    }
    return {METADATA: json.dumps(content)}


def pieces_in(metadata: Mapping[str, str] | None) -> dict[str, Piece]:
    """The other way round. Raises ValueError where it does not say."""
    if not metadata or METADATA not in metadata:
        raise ValueError("its files do not say which part of each tensor they hold (megatron's never do)")
    return {
        name: Piece(tuple(shape), tuple(slice(start, stop) for start, stop in slices))
        for name, (shape, slices) in json.loads(metadata[METADATA]).items()
    }
