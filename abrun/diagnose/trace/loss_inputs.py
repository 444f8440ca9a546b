"""The inputs of the loss as the baseline computed them, on which every other capture evaluates its loss.

A loss clips and masks: where log-probs of two arms differ by rounding, a token may fall on the other side of
a bound. A replica that does so differs as much as an arm with a faulty loss. On the same inputs a loss
differs by the rounding of its own arithmetic alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from abrun.backends.ranks import Ranks
from abrun.diagnose.trace.perturb import one_ulp_away

FILE = "loss-inputs.safetensors"
Key = tuple[int, int, str]  # optimizer step, row of the global batch, name


class LossInputs:
    """Values of the kept rows by optimizer step, row and name: each [s], from a sequence's first token."""

    def __init__(self, rows: Mapping[Key, Tensor]) -> None:
        self._rows = rows

    @classmethod
    def gather(
        cls,
        tokens: Mapping[int, Sequence[Tensor]],  # [n, 2] of each micro-batch, row and position
        values: Mapping[tuple[int, str], Sequence[Tensor]],  # [n, 1] of each, by optimizer step and name
        ranks: Ranks,
    ) -> "LossInputs":
        """Return the values that all ranks have seen. Collective."""
        local: dict[Key, Tensor] = {}
        for (update, name), seen in values.items():
            rows, column = torch.cat([*tokens[update]])[:, 0], torch.cat([*seen])[:, 0]
            local |= {(update, row, name): column[rows == row] for row in rows.unique().tolist()}
        gathered = ranks.all_gather_world(local)
        return cls({key: row for rank_rows in gathered for key, row in rank_rows.items()})

    def write(self, folder: Path) -> None:
        save_file({"/".join(map(str, key)): row for key, row in self._rows.items()}, folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> "LossInputs":
        rows = {}
        for key, row in load_file(folder / FILE).items():
            update, number, name = key.split("/", 2)
            rows[int(update), int(number), name] = row
        return cls(rows)

    def replace_rows(
        self,
        values: Tensor,  # [b, s]
        update: int,
        name: str,
        rows: Sequence[int],
        perturbation: tuple[int, int] | None,
    ) -> Tensor:
        """Return `values` of the global batch's `rows` with the baseline's instead, as far as it has them.

        `perturbation`, a seed and the number of a replica, moves them by one ULP.
        """
        replaced = values.detach().clone()
        for index, row in enumerate(rows):
            recorded = self._rows.get((update, row, name))
            if recorded is None or len(recorded) > values.shape[1]:
                continue
            if perturbation is not None:
                seed, replica = perturbation
                names = "inputs", str(replica), str(update), str(row), name
                recorded = one_ulp_away(recorded, "float32", seed, *names)
            replaced[index, : len(recorded)] = recorded.to(values)
        return replaced
