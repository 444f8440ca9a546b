"""The megatron backend: megatron-core's layers, pipeline and optimizer, without Transformer Engine.

A package of its own reasons to change: `library` (which megatron-core), `cpu` (where no CUDA is), `groups`,
`network` (architecture), `names` (weights), `sharded` (gradients and optimizer), `stages` (a pass over
microbatches), `decoding`, `backend` and `value_model`.
"""

from pathlib import Path
from typing import Any

from abrun.backends.megatron.library import check, quiet
from abrun.backends.ranks import Ranks
from abrun.recipe.run import OwnRunConfig


def make_backend(
    config: OwnRunConfig, ranks: Ranks, *, weights: Path | None, seed: int, trainable: bool = True
) -> Any:
    """See abrun.backends.make_backend. Raises RecipeError where megatron-core is missing or unknown."""
    check()
    with quiet():
        from abrun.backends.megatron import backend

    return backend.make_backend(config, ranks, weights=weights, seed=seed, trainable=trainable)
