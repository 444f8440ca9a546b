"""What decides a step's samples: a description, which every engine turns into random numbers its own way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from abrun.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The randomness of some sequences of a step's global batch.

    It belongs to a sequence, whichever rank samples it: rollouts do not depend on how many ranks there are,
    and a resumed run needs no sampler state.
    """

    seed: int  # of the run
    stream: str  # sampling, or validation
    step: int
    fetch: int = 0  # a step that fetches rollouts several times has other draws each time
    rows: range  # of the step's (and fetch's) sequences

    def uniforms(self, max_new_tokens: int) -> Tensor:
        """Numbers in [0, 1), one for each token to draw: [rows, max_new_tokens] float64, on the CPU."""
        names = (self.stream, self.step, self.fetch) if self.fetch else (self.stream, self.step)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *names))
        shape = self.rows.stop, max_new_tokens  # drawn in order: the rows after these change nothing
        return torch.rand(shape, dtype=torch.float64, generator=generator)[self.rows.start :]

    def seeds(self) -> list[int]:
        """A number for each row, from which an engine with generators of its own derives its draws."""
        return [derive_seed(self.seed, self.stream, self.step, self.fetch, row) for row in self.rows]
