"""Description of the random draws of a step; each engine derives its random numbers from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from abrun.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The random draws for some sequences in the global batch of a step.

    Draws belong to a sequence, not to the rank that samples it. Rollouts therefore do not depend on the
    number of ranks, and a resumed run needs no sampler state.
    """

    seed: int  # of the run
    stream: str  # "sampling" or "validation"
    step: int
    fetch: int = 0  # each fetch of a step has its own draws
    rows: range  # row numbers in the batch of the fetch

    def uniforms(self, max_new_tokens: int) -> Tensor:
        """Return numbers in [0, 1), one for each token to draw: [rows, max_new_tokens] float64, on CPU."""
        names = (self.stream, self.step, self.fetch) if self.fetch else (self.stream, self.step)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *names))
        # Numbers are drawn in row order, so rows after these have no effect.
        shape = self.rows.stop, max_new_tokens
        return torch.rand(shape, dtype=torch.float64, generator=generator)[self.rows.start :]

    def seeds(self) -> list[int]:
        """Return a seed for each row, for engines with their own random generators."""
        return [derive_seed(self.seed, self.stream, self.step, self.fetch, row) for row in self.rows]
