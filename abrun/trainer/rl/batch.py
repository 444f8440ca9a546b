"""One rank's batch at each stage of a step: RolloutBatch -> ScoredBatch -> TrainBatch.

Dimensions: B sequences, S positions. Sequences are right-padded; entry t of a per-token tensor belongs to
token t of the sequence.
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
    """Prompts and completions. Every tensor has B rows, so a batch can be sliced by rows."""

    token_ids: Tensor  # [B, S] int64
    # [B, S] bool: True on completion tokens, including the end token; never on the first token of a sequence
    token_mask: Tensor
    rows_per_sample: int = 1  # 2 for preference pairs; `split` never separates the rows of a sample
    # [B, S, L * K] uint8 or int16: 1 + the index of the expert for a token; 0 if the router is free
    routes: Tensor | None = None
    # [B, S, W] uint8: the tokens that a filtered sampler could draw from, as a bit set; see rl.sampling
    support: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> Self:
        return self.mapped(lambda tensor: tensor.to(device))

    def split(self, size: int | Sequence[int] | None) -> Iterator[Self]:
        """Yield microbatches of at most `size` sequences, each trimmed to its longest sequence.

        A sequence of sizes gives the size of each microbatch. None yields the whole batch.
        """
        if not isinstance(size, Sequence):
            microbatch_size = size or len(self)
            size = [microbatch_size] * math.ceil(len(self) / microbatch_size)
        assert all(count % self.rows_per_sample == 0 for count in size), "a sample would be split"
        lengths = sequence_lengths(self.token_mask).tolist()
        for start, stop in pairwise([0, *accumulate(size)]):
            microbatch, length = self[start:stop], max(lengths[start:stop])
            yield microbatch.mapped(
                lambda tensor, length=length: tensor[:, :length] if tensor.ndim > 1 else tensor
            )

    def predicted_tokens(self) -> Self:
        """Drop the first token of each sequence, routes and support; flatten the rest to [B * (S - 1)]."""
        return replace(self, routes=None, support=None).mapped(lambda tensor: tensor[:, 1:].flatten(0, 1))

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return self.mapped(lambda tensor: tensor[rows])

    def with_fields(self, stage: type[Stage], **new_fields: Any) -> Stage:
        """Return the batch as another stage: the fields that both classes have, plus `new_fields`."""
        shared = {field.name for field in fields(self)} & {field.name for field in fields(stage)}
        return stage(**{name: getattr(self, name) for name in shared} | new_fields)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy of the batch with `function` applied to every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{name: function(value) for name, value in values.items() if isinstance(value, Tensor)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch(Sequences):
    """The completions of a step and their rewards."""

    inference_logprobs: Tensor  # [B, S] float32, as reported by the rollout engine
    rewards: Tensor  # [B] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch(RolloutBatch):
    """A rollout batch with log-probs from the policy and the reference before the first update."""

    # [B, S] float32, from the policy at the start of the step; None: the forward pass of the update sets them
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None  # [B, S] float32; None: the recipe has no reference
    importance_weights: Tensor | None  # [B, S] float32, trainer over engine; None: no correction
    loss_weights: Tensor  # [B, S] float64: weight of each token in the global loss of its update


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(Sequences):
    """The input of policy-gradient updates. Every tensor except masks and ids is [B, S]."""

    inference_logprobs: Tensor  # float32
    old_logprobs: Tensor | None  # float32
    reference_logprobs: Tensor | None  # float32
    importance_weights: Tensor | None  # float32
    loss_weights: Tensor  # float64
    advantages: Tensor  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticBatch(TrainBatch):
    """The input of policy-gradient updates with a value model."""

    old_values: Tensor  # [B, S] float32, from the value model at the start of the step
    returns: Tensor  # [B, S] float32: regression targets of the values


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Sequences):
    """Preference pairs: rows alternate between chosen and rejected completions."""

    reference_logprobs: Tensor  # [B, S] float32
    rows_per_sample: int = 2


def sequence_lengths(token_mask: Tensor) -> Tensor:  # [B, S] bool -> [B] int64
    """Return the number of tokens up to the last completion token; at least 2, so one can be predicted."""
    ends = torch.arange(1, token_mask.shape[1] + 1, device=token_mask.device)
    return (token_mask * ends).amax(dim=1).clamp(min=2)


def collate(prompts: list[list[int]], completions: list[list[int]], *, pad_id: int) -> Sequences:
    """Return prompts and completions as one right-padded batch on the CPU."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    starts, stops = (
        torch.tensor([len(token_ids) for token_ids in sequences])[:, None] for sequences in (prompts, rows)
    )
    positions = torch.arange(max(map(len, rows)))
    padding = torch.full((len(rows), len(positions)), pad_id, dtype=torch.int64)
    flat = torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64))
    return Sequences(
        token_ids=padding.masked_scatter(positions < stops, flat),
        token_mask=(starts <= positions) & (positions < stops),
    )


def scatter_to_completions(
    values: Sequence[Sequence[float]], token_mask: Tensor
) -> Tensor:  # [B, S] bool -> [B, S]
    """Place the values of each completion at its tokens; float32, 0 elsewhere."""
    flat = torch.from_numpy(np.fromiter(chain.from_iterable(values), np.float32))
    return torch.zeros(token_mask.shape).masked_scatter(token_mask, flat)


def scatter_support(supports: Sequence[Tensor], token_mask: Tensor) -> Tensor:  # [B, S] -> [B, S, W]
    """Place the supports [T, W] of each completion at its T tokens; 0 elsewhere."""
    support = torch.zeros(*token_mask.shape, supports[0].shape[1], dtype=torch.uint8)
    support[token_mask] = torch.cat(list(supports))
    return support
