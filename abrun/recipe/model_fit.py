"""Checks whether a backend or engine can shard a model, from its configuration alone; needs no torch.

`model`: fields of a Hugging Face configuration; missing fields are not checked.
"""

from collections.abc import Mapping
from typing import Any

from abrun.messages.codes import Code, Reason
from abrun.recipe.families import attention_obstacle
from abrun.recipe.policy import Dtensor, Megatron

# Families with the same structure: an embedding; layers of norms, self_attn (q_proj ... o_proj) and mlp
# (gate_proj, up_proj, down_proj, or experts); a norm and a head; no buffers but the rotary embedding's.
# Tensor parallelism supports these, and megatron-core's GPTModel computes the same; remaining differences are
# checked at loading.
PLAIN_DECODERS = ("llama", "qwen2", "qwen3", "qwen3_moe")
MEGATRON_DIVISIONS = (  # number of ranks, and the model dimension that must be its multiple
    ("tensor_parallel", "num_attention_heads"),
    ("tensor_parallel", "num_key_value_heads"),
    ("tensor_parallel", "intermediate_size"),
    ("pipeline_parallel", "num_hidden_layers"),
    ("expert_parallel", "num_experts"),
    ("expert_parallel", "num_local_experts"),  # name in transformers 5
)


def dtensor_misfit(model: Mapping[str, Any], settings: Dtensor) -> Reason | None:
    """Return why the dtensor backend cannot shard a model so; None if nothing prevents it."""
    size, experts = settings.tensor_parallel, settings.expert_parallel
    family = model.get("model_type")
    if size > 1 and family is not None and family not in PLAIN_DECODERS:
        return Code.FAMILY_WITHOUT_TENSOR_PARALLEL_PLAN(got=size, family=family, allowed=PLAIN_DECODERS)
    if misfit := heads_misfit(model, size):
        return misfit
    number = model.get("num_experts") or model.get("num_local_experts")  # the latter in transformers 5
    if isinstance(number, int) and number % experts:
        return Code.EXPERTS_CUT_UNEVENLY(got=experts, experts=number)
    return None


def vllm_misfit(model: Mapping[str, Any], size: int) -> Reason | None:
    """Return why vLLM cannot shard a model over `size` ranks; None if nothing prevents it."""
    field = "rollout.tensor_parallel"
    if misfit := heads_misfit(model, size, field):
        return misfit
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = model.get(name)
        if isinstance(width, int) and width % size:
            return Code.WIDTH_CUT_UNEVENLY(field=field, got=size, dimension=name, size=width)
    return None


def heads_misfit(
    model: Mapping[str, Any], size: int, field: str = "policy.backend.tensor_parallel"
) -> Reason | None:
    """Return why a model's attention heads cannot be sharded over `size` ranks; None if they can."""
    heads, shared = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return None
    if heads % size or (shared % size and size % shared):
        return Code.HEADS_CUT_UNEVENLY(field=field, got=size, heads=heads, key_value_heads=shared)
    return None


def megatron_misfit(model: Mapping[str, Any], settings: Megatron) -> Reason | None:
    """Return why megatron-core cannot build and shard a model so; None if nothing prevents it."""
    family, experts = model.get("model_type"), settings.expert_parallel
    if family is not None and family not in PLAIN_DECODERS:
        return Code.BACKEND_LACKS_FAMILY(backend="megatron", family=family, allowed=PLAIN_DECODERS)
    if (obstacle := attention_obstacle(model)) is not None:
        return Code.BACKEND_NEEDS_FULL_ATTENTION(backend="megatron", family=family, obstacle=obstacle)
    if family == "qwen3_moe" and settings.tensor_parallel > 1 and experts == 1:
        return Code.EXPERTS_STAY_WHOLE(tensor_parallel=settings.tensor_parallel)
    if family not in (None, "qwen3_moe") and experts > 1:
        return Code.MODEL_HAS_NO_EXPERTS(got=experts, family=family)
    for field, dimension in MEGATRON_DIVISIONS:
        ranks, size = getattr(settings, field), model.get(dimension)
        if isinstance(size, int) and size % ranks:
            return Code.MODEL_CUT_UNEVENLY(
                field=f"policy.backend.{field}", got=ranks, size=size, dimension=dimension
            )
    return None
