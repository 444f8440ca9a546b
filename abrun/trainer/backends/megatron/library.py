"""The supported versions of megatron-core, and the functions that this backend calls."""

import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from importlib.metadata import version

from abrun.errors import RecipeError
from abrun.recipe.extras import MEGATRON_VERSIONS, megatron_refusal

# Arguments passed by keyword, and functions that are replaced. A version without them is refused.
REQUIRED_ARGUMENTS = {
    "megatron.core.parallel_state:initialize_model_parallel": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "create_gloo_process_groups",
    ),
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec": (
        "num_experts",
        "qk_layernorm",
        "normalization",
    ),
    "megatron.core.models.gpt:GPTModel": (
        "vocab_size",
        "max_sequence_length",
        "pre_process",
        "post_process",
        "share_embeddings_and_output_weights",
        "position_embedding_type",
    ),
    "megatron.core.models.gpt:GPTModel.forward": (
        "input_ids",
        "position_ids",
        "attention_mask",
        "packed_seq_params",
    ),
    "megatron.core.models.gpt:GPTModel._postprocess": ("hidden_states", "labels", "runtime_gather_output"),
    "megatron.core.tensor_parallel:ColumnParallelLinear.forward": (
        "input_",
        "weight",
        "runtime_gather_output",
    ),
    "megatron.core.tensor_parallel:gather_from_sequence_parallel_region": ("tensor_parallel_output_grad",),
    "megatron.core.distributed:finalize_model_grads": ("model", "num_tokens"),
    "megatron.core.optimizer:get_megatron_optimizer": ("use_gloo_process_groups",),
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._get_model_param_range_map": ("param",),
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": (
        "forward_step_func",
        "num_microbatches",
        "forward_only",
    ),
    "megatron.core.transformer.moe.router:TopKRouter.routing": ("logits",),
    "megatron.core.models.common.embeddings:RotaryEmbedding.get_rotary_seq_len": ("packed_seq_params",),
}


def check_megatron() -> None:
    """Raise RecipeError if megatron-core is missing or its version is not supported."""
    refusal = megatron_refusal()
    if refusal:
        raise RecipeError(refusal)
    with suppress_warnings():
        for name, expected in REQUIRED_ARGUMENTS.items():
            missing = set(expected) - _parameter_names(name)
            if missing:
                raise RecipeError(
                    f"policy.backend.type: got 'megatron' with megatron-core {version('megatron-core')}, "
                    f"whose {name.partition(':')[2]} has no {', '.join(sorted(missing))}; "
                    f"pip install 'megatron-core{MEGATRON_VERSIONS}'"
                )
        _define_missing_gemm()


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress megatron-core's warnings about deprecated torch functions and missing optional packages."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _parameter_names(name: str) -> set[str]:
    module, _, path = name.partition(":")
    target = importlib.import_module(module)
    for attribute in path.split("."):
        target = getattr(target, attribute, None)
    return set(inspect.signature(target).parameters) if callable(target) else set()


def _define_missing_gemm() -> None:
    """Define a name that 0.16 reads in a router's forward but only defines with Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
