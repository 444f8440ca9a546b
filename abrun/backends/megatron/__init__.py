"""The megatron backend: megatron-core's layers, pipeline and optimizer, without Transformer Engine.

A package of its own reasons to change: `library` (which megatron-core), `cpu` (where no CUDA is), `groups`,
`network` (architecture), `names` (weights), `sharded` (gradients and optimizer), `stages` (a pass over
microbatches), `decoding`, `backend` and `value_model`.
"""

from typing import Any

from abrun.backends.megatron.library import check, suppress_warnings


def make_backend(*arguments: Any, **settings: Any) -> Any:
    """Make a MegatronBackend; raise RecipeError if megatron-core is missing or unknown."""
    check()
    with suppress_warnings():
        from abrun.backends.megatron.backend import MegatronBackend

    return MegatronBackend(*arguments, **settings)
