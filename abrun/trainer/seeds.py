"""Random streams of a run, derived from its seed by name so that all arms draw the same numbers."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def derive_seed(seed: int, *names: str | int) -> int:
    """Return the seed of the stream called `names`, independent of the seed's other streams."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:7], "big")


# Description of the random draws of a step; each engine derives its random numbers from it.

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shifts and factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The random draws for some sequences of a step.

    Draws belong to a sequence and a token. Rollouts therefore do not depend on the number of ranks, fetches
    and engine batches, a longer maximum length only adds draws, and a resumed run needs no sampler state.
    """

    seed: int  # of the run
    stream: str  # "sampling" or "validation"
    step: int
    rows: range  # row numbers among all sequences of the step

    def uniforms(self, max_new_tokens: int) -> Tensor:
        """Return numbers in [0, 1), one for each token to draw: [rows, max_new_tokens] float64, on CPU.

        Each row is the SplitMix64 generator of its seed (Steele, Lea and Flood, OOPSLA 2014): a counter times
        an odd constant, mixed. All numbers are computed at once, and those before a number are not needed.
        """
        counts = np.arange(1, max_new_tokens + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
        bits = np.array(self.seeds(), dtype=np.uint64)[:, None] + counts  # [B, S], modulo 2**64
        for shift, factor in MIXING:
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits >>= np.uint64(11)  # float64 has 53 bits
        return torch.from_numpy(bits * 2.0**-53)

    def seeds(self) -> list[int]:
        """Return a seed for each row, for the generators of engines."""
        return [self.seed_of(row) for row in self.rows]

    def seed_of(self, row: int) -> int:
        return derive_seed(self.seed, self.stream, self.step, row)
