"""Backends: how a policy is spread over ranks and trained. The loops know only the protocol below.

Letters: B sequences, S positions; entry t of a per-token tensor belongs to token t.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.rl.batch import Batch
from abrun.rl.metrics import MetricParts


class Objective(Protocol):
    """What a step minimises: the sum of a loss over all tokens of the global batch."""

    def losses(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Each token's share of the global loss [...], 0 where masked.

        All of `batch` is [...]: a microbatch [B, S], or some tokens of one [n], as a pass that never has all
        log-probs at once asks for them. A token's loss is the same in both.
        """
        ...

    def metrics(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> MetricParts:
        """A microbatch's contributions, from log-probs and entropies [B, S] without gradient."""
        ...


class ValueObjective(Protocol):
    """What a step's value model minimises: the sum of a loss over all tokens of the global batch."""

    def losses(self, batch: Batch, values: Tensor) -> Tensor:
        """Each token's share of the global loss [B, S], 0 where masked."""
        ...

    def metrics(self, batch: Batch, values: Tensor) -> MetricParts:
        """A microbatch's contributions, from values [B, S] without gradient."""
        ...


class Trained(Protocol):
    """What has weights and an optimizer on this process's device, spread over the ranks."""

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip, step, zero the gradients. Returns the L2 norm of the global gradient before clipping."""
        ...

    def local_state(self) -> dict[str, Tensor]:
        """This rank's shards of weights and optimizer state, in place: what its checkpoint holds."""
        ...

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `local_state` of the same rank of an equal layout gave."""
        ...

    def resident_tensors(self) -> Sequence[Tensor]:
        """What lives on the device between steps, for the memory tracker."""
        ...


class Backend(Trained, Protocol):
    """A policy, one of `data_parallel_size` that share the work.

    `group` spans the ranks that hold different samples: losses and metrics are reduced over it.
    """

    device: torch.device
    group: dist.ProcessGroup

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probs [B, S] of every token, without gradient."""
        ...

    def forward_backward(self, batch: Batch, objective: Objective) -> MetricParts:
        """Accumulate gradients of the global loss: the sum of losses over all microbatches of all ranks."""
        ...

    def full_weights(self) -> dict[str, Tensor]:
        """All weights under their Hugging Face names, on the CPU of rank 0 (elsewhere empty). Collective."""
        ...


class Critic(Trained, Protocol):
    """A value model beside a policy.

    A token's value is the one computed before it (right-shifted in its sequence), or after it where the
    recipe says `right_shift: false`.
    """

    def values(self, batch: Batch) -> Tensor:
        """Values [B, S] float32 of every token, without gradient."""
        ...

    def forward_backward(self, batch: Batch, objective: ValueObjective) -> MetricParts:
        """Accumulate gradients of the global loss, the policy's backbone included where it is shared."""
        ...
