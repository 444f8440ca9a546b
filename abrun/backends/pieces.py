"""Which parts of whole tensors a rank holds, so that what one layout or backend saved another can take.

Whole tensors have the names `weights/NAME` and `optimizer/KEY/NAME`, of Hugging Face's parameters.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

METADATA = "pieces"  # of a rank's file


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor's elements; it can be empty."""

    shape: tuple[int, ...]  # of the whole
    slices: tuple[slice, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> "Piece":
        """The whole tensor."""
        return cls(tuple(shape), tuple(slice(0, size) for size in shape))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a tensor of a rank is made of: pieces of whole tensors one below the other, or some of that.

    `width`, of a head: the pieces are queries, keys and values, and a group's queries stand before its key
    and its value (megatron-core's order). `span`: it has these of the flattened elements alone. `rounded`: it
    may be a copy in less precision, from which nothing is read. What the pieces do not fill is 0.
    """

    pieces: tuple[tuple[str, Piece], ...]  # by the whole tensor's name
    shape: tuple[int, ...]  # of all pieces together
    width: int | None = None
    span: tuple[int, int] | None = None
    rounded: bool = False

    @classmethod
    def one(cls, name: str, piece: Piece) -> "Held":
        """A piece as it is."""
        return cls(pieces=((name, piece),), shape=piece.size)

    def under(self, prefix: str) -> "Held":
        """Of whole tensors with a prefix before their names."""
        return replace(self, pieces=tuple((f"{prefix}{name}", piece) for name, piece in self.pieces))

    @property
    def is_piece(self) -> bool:
        """Whether it is a piece as it is, and can be read in part."""
        return len(self.pieces) == 1 and self.span is None and self.shape == self.pieces[0][1].size

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor, from its pieces."""
        if self.width is not None:
            groups = len(parts[-1]) // self.width
            of_groups = [part.unflatten(0, (groups, -1)) for part in parts]
            whole = torch.cat(of_groups, dim=1).flatten(0, 1)
        elif not self.shape:
            whole = parts[0]
        else:
            whole = torch.cat([part.reshape(-1, *self.shape[1:]) for part in parts])
            missing = self.shape[0] - len(whole)
            whole = torch.cat([whole, whole.new_zeros(missing, *self.shape[1:])]) if missing else whole
        assert whole.shape == self.shape, f"{self.pieces[0][0]}: {list(whole.shape)}, not {list(self.shape)}"
        return whole if self.span is None else whole.flatten()[slice(*self.span)]

    def split(self, whole: Tensor) -> list[Tensor]:
        """Its pieces, from all of the tensor: the other way round."""
        if not self.shape:
            return [whole for _ in self.pieces]
        sizes = [piece.size for _, piece in self.pieces]
        if self.width is not None:
            groups = sizes[-1][0] // self.width
            rows = [size[0] // groups for size in sizes]
            return [part.flatten(0, 1) for part in whole.unflatten(0, (groups, -1)).split(rows, dim=1)]
        parts, start = [], 0
        for size in sizes:
            stop = start + math.prod(size) // math.prod(self.shape[1:])
            parts.append(whole[start:stop].reshape(size))
            start = stop
        return parts


def as_metadata(held: Mapping[str, Held], names: Collection[str]) -> dict[str, str]:
    """What a rank's file says of those of its tensors that are made of pieces of whole ones."""
    content = {
        name: {
            "pieces": [
                [whole, piece.shape, [[part.start, part.stop] for part in piece.slices]]
                for whole, piece in of.pieces
            ],
            "shape": of.shape,
            "width": of.width,
            "span": of.span,
        }
        for name, of in held.items()
        if name in names and not of.rounded
    }
    return {METADATA: json.dumps(content)}


def held_in(metadata: Mapping[str, str] | None) -> dict[str, Held]:
    """The other way round. Raises ValueError where it does not say, or not as this version does."""
    if not metadata or METADATA not in metadata:
        raise ValueError("its files do not say which part of each tensor they hold")
    try:
        return _parsed(metadata[METADATA])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "its files do not say which part of each tensor they hold as this version of abrun does"
        ) from error


def _parsed(content: str) -> dict[str, Held]:
    return {
        name: Held(
            pieces=tuple(
                (whole, Piece(tuple(shape), tuple(slice(*part) for part in parts)))
                for whole, shape, parts in of["pieces"]
            ),
            shape=tuple(of["shape"]),
            width=of["width"],
            span=tuple(of["span"]) if of["span"] else None,
        )
        for name, of in json.loads(content).items()
    }


def of_optimizer(held: Held) -> dict[str, Held]:
    """What AdamW keeps of a tensor, by key."""
    steps = tuple((name, Piece((), ())) for name, _ in held.pieces)
    return {"step": Held(pieces=steps, shape=()), "exp_avg": held, "exp_avg_sq": held}
