"""One rank's batch at each stage of a step: RolloutBatch -> ScoredBatch -> TrainBatch.

Letters: B sequences, S positions. Sequences are right-padded; entry t of a per-token tensor belongs to token
t of the sequence.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

Stage = TypeVar("Stage", bound="Sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Prompts and completions. Every tensor has B rows, so that a batch can be cut by rows."""

    token_ids: Tensor  # [B, S] int64
    token_mask: Tensor  # [B, S] bool, True on completion tokens (the end token included), never on a first
    rows_together: int = 1  # so many consecutive rows are one sample (a pair), never cut apart
    # [B, S, layers * k] uint8 or int16: 1 + the expert that a token goes to, 0 where its router is free
    routes: Tensor | None = None
    # [B, S, W] uint8: which tokens a filtered sampler kept, of which it drew this one; see abrun.rl.sampling
    support: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> Self:
        return self.mapped(lambda tensor: tensor.to(device))

    def split(self, size: int | Sequence[int] | None) -> Iterator[Self]:
        """Microbatches of at most `size` sequences, or of as many as each of `size` says; None: all at once.

        Each is cut to its own longest sequence.
        """
        if not isinstance(size, Sequence):
            each = size or len(self)
            size = [each] * math.ceil(len(self) / each)
        assert all(count % self.rows_together == 0 for count in size), "a sample would be cut apart"
        lengths = sequence_lengths(self.token_mask).tolist()
        for start, stop in pairwise([0, *accumulate(size)]):
            part, length = self[start:stop], max(lengths[start:stop])
            yield part.mapped(lambda tensor, length=length: tensor[:, :length] if tensor.ndim > 1 else tensor)

    def predicted_tokens(self) -> Self:
        """All tokens but each sequence's first, flattened to [B * (S - 1)], without routes and support."""
        return replace(self, routes=None, support=None).mapped(lambda tensor: tensor[:, 1:].flatten(0, 1))

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return self.mapped(lambda tensor: tensor[rows])

    def with_fields(self, stage: type[Stage], **more: Any) -> Stage:
        """Return the sequences at another stage: the fields that both have, and `more`."""
        shared = {field.name for field in fields(self)} & {field.name for field in fields(stage)}
        return stage(**{name: getattr(self, name) for name in shared} | more)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The batch with every tensor replaced by `function` of it."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{name: function(value) for name, value in known.items() if isinstance(value, Tensor)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch(Sequences):
    """A step's completions, with their rewards."""

    inference_logprobs: Tensor  # [B, S] float32, of the rollout engine
    rewards: Tensor  # [B] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch(RolloutBatch):
    """And what policy and reference say of each token before the first update."""

    # [B, S] float32, of the policy at the start of the step; None: the update's own pass tells them
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None  # [B, S] float32; None: the recipe has no reference
    importance_weights: Tensor | None  # [B, S] float32, trainer against engine; None: no correction
    loss_weights: Tensor  # [B, S] float64, what each token counts in the global loss of its update


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(Sequences):
    """What the updates of a policy gradient need. Every tensor but the masks and ids is [B, S]."""

    inference_logprobs: Tensor  # float32
    old_logprobs: Tensor | None  # float32
    reference_logprobs: Tensor | None  # float32
    importance_weights: Tensor | None  # float32
    loss_weights: Tensor  # float64
    advantages: Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticBatch(TrainBatch):
    """And those of a value model beside it."""

    old_values: Tensor  # [B, S] float32, of the value model at the start of the step
    returns: Tensor  # [B, S] float32, what values are fitted to


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Sequences):
    """Chosen and rejected completions in turn."""

    reference_logprobs: Tensor  # [B, S] float32
    rows_together: int = 2


def sequence_lengths(token_mask: Tensor) -> Tensor:  # [B, S] bool -> [B] int64
    """Tokens up to the last completion token; at least 2, so that there is a token to predict."""
    ends = torch.arange(1, token_mask.shape[1] + 1, device=token_mask.device)
    return (token_mask * ends).amax(dim=1).clamp(min=2)


def collate(prompts: list[list[int]], completions: list[list[int]], *, pad_id: int) -> Sequences:
    """Prompts and completions as one right-padded batch on the CPU."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    starts, stops = (torch.tensor([len(one) for one in each])[:, None] for each in (prompts, rows))
    positions = torch.arange(max(map(len, rows)))
    padding = torch.full((len(rows), len(positions)), pad_id, dtype=torch.int64)
    flat = torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64))
    return Sequences(
        token_ids=padding.masked_scatter(positions < stops, flat),
        token_mask=(starts <= positions) & (positions < stops),
    )


def random_rollouts(
    num_sequences: int, length: int, vocab_size: int, device: torch.device, *, rows_together: int = 1
) -> RolloutBatch:
    """Make up sequences of one length, always the same: a token of prompt, then a completion to the end."""
    shape = (num_sequences, length)
    generator = torch.Generator().manual_seed(length)
    token_mask = torch.ones(shape, dtype=torch.bool)
    token_mask[:, 0] = False
    batch = RolloutBatch(
        token_ids=torch.randint(vocab_size, shape, generator=generator),
        token_mask=token_mask,
        inference_logprobs=torch.full(shape, -1.0),
        rewards=torch.randn(num_sequences, generator=generator),
        rows_together=rows_together,
    )
    return batch.to(device)


def on_completions(values: Sequence[Sequence[float]], token_mask: Tensor) -> Tensor:  # [B, S] bool -> [B, S]
    """Numbers of completion tokens, sequence by sequence, at those tokens: float32, 0 elsewhere."""
    flat = torch.from_numpy(np.fromiter(chain.from_iterable(values), np.float32))
    return torch.zeros(token_mask.shape).masked_scatter(token_mask, flat)


def support_on_completions(kept: Sequence[Tensor], token_mask: Tensor) -> Tensor:  # [B, S] -> [B, S, W]
    """Kept sets [T, W] of completions of T tokens, at those tokens: 0 elsewhere."""
    support = torch.zeros(*token_mask.shape, kept[0].shape[1], dtype=torch.uint8)
    support[token_mask] = torch.cat(list(kept))
    return support
