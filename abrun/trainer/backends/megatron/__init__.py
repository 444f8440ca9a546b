"""The megatron backend: megatron-core's layers, pipeline and optimizer, without Transformer Engine.

Modules: `library` (supported versions), `cpu` (running without CUDA), `network` (process groups and
architecture), `parameters` (weights, gradients and optimizer), `routing` (experts) and `backend` (the policy
and its passes over microbatches).
"""

from typing import Any

from abrun.trainer.backends.megatron.library import check_megatron, suppress_warnings


def make_backend(*arguments: Any, **settings: Any) -> Any:
    """Make a MegatronBackend; raise RecipeError if megatron-core is missing or unknown."""
    check_megatron()
    with suppress_warnings():
        from abrun.trainer.backends.megatron.backend import MegatronBackend

    return MegatronBackend(*arguments, **settings)
