"""Sequence packing: the sequences of a microbatch as one stream of tokens without padding.

Letters: B sequences of at most S positions, T tokens in the stream. Only the model's forward pass sees the
stream. Position ids restart with every sequence, and attention stays within it. The outputs are unpacked into
rows [B, S], so losses, metrics and values never see neighbouring sequences. With context parallelism each
rank computes on some of the stream's tokens, inside the model only: see abrun.trainer.backends.context.

Sequences of one prompt can share it (arXiv:2506.05433). The first of them in the stream contains the prompt.
The others start at its last token, which predicts their first completion token, and attend to the shared
prompt. A sequence without a completion is two tokens long and shares nothing.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.trainer.backends.context import (
    ContextSplit,
    Span,
    Spans,
    concatenate_ranges,
    make_context_split,
    make_spans,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The mapping between B right-padded sequences and their packed stream."""

    shape: torch.Size  # [B, S]
    index: Tensor  # [T] int64: the stream's tokens in the flattened rows; a shared prompt's in its first row
    position_ids: Tensor  # [1, T] int64: each token's position in its sequence
    shared_index: Tensor  # [2, shared tokens] int64: a shared token in the flattened rows, and its first copy
    starts: tuple[int, ...]  # stream positions where the sequences start, then T
    spans: Spans  # the keys that this rank's tokens attend to
    split: ContextSplit | None = None  # the assignment of tokens to ranks; None: this rank has all

    @property
    def num_local_tokens(self) -> int:
        """Return the number of tokens that this rank computes on."""
        return self.starts[-1] if self.split is None else len(self.split.local_positions)

    def pack(self, rows: Tensor) -> Tensor:  # [B, S, ...] -> [1, T, ...]
        return rows.flatten(0, 1)[self.index][None]

    def to_local(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [1, local tokens, ...]
        """Return this rank's tokens if ranks share the stream, else all of them."""
        return stream if self.split is None else self.split.to_local(stream.movedim(1, -1)).movedim(-1, 1)

    def to_full(self, local: Tensor) -> Tensor:  # [1, local tokens, ...] -> [1, T, ...]
        """Gather the tokens of all ranks that share the stream."""
        if self.split is None:
            return local
        return self.split.to_full(local.movedim(1, -1)).movedim(-1, 1)[:, : self.starts[-1]]

    def unpack(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        rows = stream.new_zeros(self.shape.numel(), *stream.shape[2:])
        return rows.index_copy(0, self.index, stream[0]).view(*self.shape, *stream.shape[2:])

    def unpack_with_prompts(self, stream: Tensor) -> Tensor:  # [1, T, ...] -> [B, S, ...], 0 on padding
        """Unpack, and copy a shared prompt's values to each of its rows.

        Another microbatch split may keep these rows apart.
        """
        rows, (repeat_index, first_index) = self.unpack(stream).flatten(0, 1), self.shared_index
        return rows.index_copy(0, repeat_index, rows[first_index]).view(*self.shape, *stream.shape[2:])

    def merge_counts(self, rows: Tensor) -> Tensor:  # [B, S] -> [B, S]
        """Add the counts of a shared prompt's copies to the copy that the stream contains."""
        flat, (repeat_index, first_index) = rows.flatten(), self.shared_index
        return flat.index_add(0, first_index, flat[repeat_index]).view(self.shape)


def make_packing(
    lengths: Sequence[int],  # [B], each up to the last completion token
    width: int,  # S
    device: torch.device,
    context: dist.ProcessGroup | None = None,
    shared: Sequence[int] | None = None,  # [B], leading tokens taken from an earlier sequence
) -> Packing:
    """Pack sequences of these lengths into a stream; the rest of their rows is padding.

    `context` is the group of ranks that share the stream. Its sequences cannot share prompts.
    """
    shared = shared or [0] * len(lengths)
    starts = (0, *accumulate(length - prefix for length, prefix in zip(lengths, shared, strict=True)))
    split = context and make_context_split(starts, context, device)
    sequence_spans, prompt_start, prompt_row = [], 0, 0
    prompt_offsets = []  # [B], offset of the row that contains the sequence's prompt
    for row, ((start, stop), prefix) in enumerate(zip(pairwise(starts), shared, strict=True)):
        if not prefix and has_shareable_prompt(stop - start):
            prompt_start, prompt_row = start, row
        sequence_spans.append(Span(start, stop, start, stop, prompt_start, prompt_start + prefix))
        prompt_offsets.append(prompt_row * width)
    row_offsets = range(0, len(lengths) * width, width)
    index = concatenate_ranges(
        *(list(map(operator.add, row_offsets, counts)) for counts in (shared, lengths))
    )
    shared_index = [
        concatenate_ranges(offsets, list(map(operator.add, offsets, shared)))
        for offsets in (row_offsets, prompt_offsets)
    ]
    return Packing(
        shape=torch.Size((len(lengths), width)),
        index=index.to(device),
        position_ids=concatenate_ranges(shared, lengths)[None].to(device),
        shared_index=torch.stack(shared_index).to(device),
        starts=starts,
        spans=make_spans(split.spans if split else sequence_spans, device),
        split=split,
    )


def has_shareable_prompt(length: int) -> bool:
    """Return whether other sequences could share this one's prompt: not if it is two tokens long.

    A sequence without a completion has that length.
    """
    return length > 2


def shared_prefix_lengths(
    token_ids: Tensor, token_mask: Tensor
) -> Tensor:  # [B, S], [B, S] bool -> [B] int64
    """Return how many leading tokens each sequence can share with the last earlier one with a completion.

    If both have the same prompt, that is the prompt without its last token, else 0. A sequence without a
    completion shares nothing.
    """
    prompts = token_mask.int().argmax(dim=1)  # 0 where there is no completion
    rows = torch.arange(len(prompts), device=token_ids.device)
    previous = (rows * (prompts > 0)).cummax(dim=0).values[:-1]
    is_after_prompt = torch.arange(token_ids.shape[1], device=token_ids.device) >= prompts[1:, None]
    is_same_prompt = ((token_ids[1:] == token_ids[previous]) | is_after_prompt).all(dim=1) & (
        prompts[1:] == prompts[previous]
    )
    return torch.nn.functional.pad((prompts[1:] - 1).clamp(min=0) * is_same_prompt, (1, 0))
