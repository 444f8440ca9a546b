"""Where the batches of a step come from: sampled (`rollouts.Rollouts`), or made up for a measurement."""

from typing import Protocol

import torch

from abrun.rl.batch import RolloutBatch


class BatchSource(Protocol):
    """Gives a step its completions with their rewards."""

    def collect(self, step: int) -> tuple[RolloutBatch, dict[str, float]]:
        """This rank's sequences of a step, and metrics of how they came about. Collective."""
        ...


class RandomBatches:
    """Random tokens and rewards, each sequence of the same length: what a measurement of memory trains on."""

    def __init__(
        self,
        num_sequences: int,
        length: int,
        vocab_size: int,
        device: torch.device,
        *,
        rows_together: int = 1,
    ) -> None:
        self._shape, self._vocab_size, self._device = (num_sequences, length), vocab_size, device
        self._rows_together = rows_together

    def collect(self, step: int) -> tuple[RolloutBatch, dict[str, float]]:
        """The same at every step: one token of prompt, and completions up to the end."""
        generator = torch.Generator().manual_seed(self._shape[1])
        token_mask = torch.ones(self._shape, dtype=torch.bool)
        token_mask[:, 0] = False
        batch = RolloutBatch(
            token_ids=torch.randint(self._vocab_size, self._shape, generator=generator),
            token_mask=token_mask,
            inference_logprobs=torch.full(self._shape, -1.0),
            rewards=torch.randn(self._shape[0], generator=generator),
            rows_together=self._rows_together,
        )
        return batch.to(self._device), {}
