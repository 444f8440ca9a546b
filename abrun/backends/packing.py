"""Sequence packing: the sequences of a microbatch as one stream of tokens without padding.

Letters: B sequences of at most S positions, T tokens in the stream. Only the model's forward pass sees the
stream: position ids start again with every sequence and attention stays inside it. What comes out is put back
into rows [B, S], so that losses, metrics and values know sequences alone, and no token ever has a neighbour
of another sequence. With context parallelism each rank computes on some of the stream's tokens, inside the
model only: see abrun.backends.context.

Sequences of one prompt can share it (arXiv:2506.05433): the first of them in the stream has it, the others
begin with its last token, which predicts a completion token of their own, and attend to what they would. A
sequence without a completion is two tokens of its own, wherever it stands.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.backends.context import ContextSplit, Span, Spans, context_split, ranges, spans_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the tokens of B right-padded sequences stand in their stream."""

    shape: torch.Size  # [B, S]
    index: Tensor  # [T] int64, of the stream's tokens in the flattened rows; what is shared, in the first
    position_ids: Tensor  # [1, T] int64, each token's place in its sequence
    shared: Tensor  # [2, shared tokens] int64: where in the flattened rows one stands, and where first
    starts: tuple[int, ...]  # of the sequences' own tokens in the stream, and T
    spans: Spans  # what this rank's tokens attend to
    split: ContextSplit | None = None  # which of the stream's tokens are this rank's; None: all

    @property
    def num_own(self) -> int:
        """Tokens that this rank computes on."""
        return self.starts[-1] if self.split is None else len(self.split.own)

    def pack(self, rows: Tensor) -> Tensor:  # [B, S, ...] -> [1, T, ...]
        return rows.flatten(0, 1)[self.index][None]

    def own(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [1, own tokens, ...]
        """What this rank computes on, where ranks share the stream."""
        return stream if self.split is None else self.split.cut(stream.movedim(1, -1)).movedim(-1, 1)

    def whole(self, own: Tensor) -> Tensor:  # [1, own tokens, ...] -> [1, T, ...]
        """The same on all ranks that share the stream."""
        if self.split is None:
            return own
        return self.split.whole(own.movedim(1, -1)).movedim(-1, 1)[:, : self.starts[-1]]

    def unpack(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        rows = stream.new_zeros(self.shape.numel(), *stream.shape[2:])
        return rows.index_copy(0, self.index, stream[0]).view(*self.shape, *stream.shape[2:])

    def unpack_prompts(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        """With what a shared prompt has in each of its rows: other microbatches have other rows together."""
        rows, (again, first) = self.unpack(stream).flatten(0, 1), self.shared
        return rows.index_copy(0, again, rows[first]).view(*self.shape, *stream.shape[2:])

    def counted(self, rows: Tensor) -> Tensor:  # [B, S] -> [B, S]
        """What counts each token, with a shared prompt's all at the one that stands in the stream."""
        flat, (again, first) = rows.flatten(), self.shared
        return flat.index_add(0, first, flat[again]).view(self.shape)


def packing_of(
    lengths: Sequence[int],  # of B sequences, each up to its last completion token
    width: int,  # S
    device: torch.device,
    context: dist.ProcessGroup | None = None,
    shared: Sequence[int] | None = None,  # of each, the leading tokens that it has from one before it
) -> Packing:
    """The stream of sequences of these lengths; what follows them in their rows is padding.

    `context`: the ranks that share the stream, whose sequences share nothing.
    """
    shared = shared or [0] * len(lengths)
    starts = (0, *accumulate(length - prefix for length, prefix in zip(lengths, shared, strict=True)))
    split = context and context_split(starts, context, device)
    whole, first, first_row = [], 0, 0
    of_first = []  # of each, where the row begins that has what it shares
    for row, ((start, stop), prefix) in enumerate(zip(pairwise(starts), shared, strict=True)):
        if not prefix and has_prompt(stop - start):
            first, first_row = start, row
        whole.append(Span(start, stop, start, stop, first, first + prefix))
        of_first.append(first_row * width)
    of_rows = range(0, len(lengths) * width, width)
    index = ranges(*(list(map(operator.add, of_rows, each)) for each in (shared, lengths)))
    again = [ranges(begins, list(map(operator.add, begins, shared))) for begins in (of_rows, of_first)]
    return Packing(
        shape=torch.Size((len(lengths), width)),
        index=index.to(device),
        position_ids=ranges(shared, lengths)[None].to(device),
        shared=torch.stack(again).to(device),
        starts=starts,
        spans=spans_of(split.spans if split else whole, device),
        split=split,
    )


def has_prompt(length: int) -> bool:
    """Whether a sequence has what others could share; what has no completion has two tokens."""
    return length > 2


def shared_prefixes(token_ids: Tensor, token_mask: Tensor) -> Tensor:  # [B, S], [B, S] bool -> [B] int64
    """Of each sequence, how many leading tokens it can have from the last one with a completion before it:
    where both have the same prompt, all of it but the last token; else 0, as where it has no completion."""
    prompts = token_mask.int().argmax(dim=1)  # 0 where there is no completion
    rows = torch.arange(len(prompts), device=token_ids.device)
    before = (rows * (prompts > 0)).cummax(dim=0).values[:-1]
    behind = torch.arange(token_ids.shape[1], device=token_ids.device) >= prompts[1:, None]
    alike = ((token_ids[1:] == token_ids[before]) | behind).all(dim=1) & (prompts[1:] == prompts[before])
    return torch.nn.functional.pad((prompts[1:] - 1).clamp(min=0) * alike, (1, 0))
