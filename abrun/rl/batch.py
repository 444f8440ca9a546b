"""The batch a policy trains on: one rank's sequences, right-padded, with everything known of their tokens.

Letters: B sequences, S positions. Entry t of a per-token tensor belongs to token t of the sequence.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of prompt and completion. Every tensor has B rows, so that a batch can be cut by rows."""

    token_ids: Tensor  # [B, S] int64
    token_mask: Tensor  # [B, S] bool, True on completion tokens (the end token included), never on a first
    rewards: Tensor | None = None  # [B, S] float32, the sequence's at each of its tokens
    advantages: Tensor | None = None  # [B, S] float32
    inference_logprobs: Tensor | None = None  # [B, S] float32, of the rollout engine
    old_logprobs: Tensor | None = None  # [B, S] float32, of the policy at the start of the step
    reference_logprobs: Tensor | None = None  # [B, S] float32
    importance_weights: Tensor | None = None  # [B, S] float32, of the trainer against the engine
    old_values: Tensor | None = None  # [B, S] float32, of the value model at the start of the step
    returns: Tensor | None = None  # [B, S] float32, what values are fitted to
    loss_weights: Tensor | None = None  # [B, S] float64, what each token counts in the global loss
    rows_together: int = 1  # so many consecutive rows are one sample (a pair), never cut apart

    def __len__(self) -> int:
        return len(self.token_ids)

    def having(self, **per_token: Tensor) -> "Batch":
        """The same sequences with more known of their tokens."""
        return replace(self, **per_token)

    def to(self, device: torch.device) -> "Batch":
        return self.mapped(lambda tensor: tensor.to(device))

    def split(self, size: int | Sequence[int] | None) -> Iterator["Batch"]:
        """Microbatches of at most `size` sequences, or of as many as each of `size` says; None: all at once.

        Each is cut to its own longest sequence.
        """
        if not isinstance(size, Sequence):
            each = size or len(self)
            size = [each] * math.ceil(len(self) / each)
        assert all(count % self.rows_together == 0 for count in size), "a sample would be cut apart"
        for start, stop in pairwise([0, *accumulate(size)]):
            part = self[start:stop]
            length = last_token(part.token_mask) + 1
            yield part.mapped(lambda tensor, length=length: tensor[:, :length])

    def predicted_tokens(self) -> "Batch":
        """All tokens but each sequence's first, flattened: every tensor is [B * (S - 1)], a token a row."""
        return self.mapped(lambda tensor: tensor[:, 1:].flatten())

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        return self.mapped(lambda tensor: tensor[rows])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with every tensor replaced by `function` of it."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{name: function(value) for name, value in known.items() if isinstance(value, Tensor)},
        )


def last_token(token_mask: Tensor) -> int:  # [B, S] bool
    """The last position that any sequence completes; at least 1, so that there is a token to predict."""
    return max(int(token_mask.any(dim=0).nonzero().max()) if bool(token_mask.any()) else 1, 1)


def collate(
    prompts: list[list[int]],
    completions: list[list[int]],
    *,
    pad_id: int,
    logprobs: list[list[float]] | None = None,
) -> Batch:
    """Prompts and completions as one right-padded batch on the CPU; `logprobs` of completion tokens go
    along."""
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    shape = (len(prompts), max(lengths))
    token_ids = torch.full(shape, pad_id, dtype=torch.int64)
    token_mask = torch.zeros(shape, dtype=torch.bool)
    inference_logprobs = torch.zeros(shape) if logprobs is not None else None
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        token_ids[row, : lengths[row]] = torch.tensor(prompt + completion)
        token_mask[row, len(prompt) : lengths[row]] = True
        if logprobs is not None and inference_logprobs is not None:
            inference_logprobs[row, len(prompt) : lengths[row]] = torch.tensor(logprobs[row])
    return Batch(token_ids=token_ids, token_mask=token_mask, inference_logprobs=inference_logprobs)
