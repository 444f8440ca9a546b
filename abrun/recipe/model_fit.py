"""Checks whether a backend or engine can shard a model, from its configuration alone; needs no torch.

`model`: fields of a Hugging Face configuration; missing fields are not checked.
"""

from collections.abc import Mapping
from typing import Any

from abrun.messages.texts import listed
from abrun.recipe.families import attention_obstacle
from abrun.recipe.policy import Dtensor, Megatron

# Families with the same structure: an embedding; layers of norms, self_attn (q_proj ... o_proj) and mlp
# (gate_proj, up_proj, down_proj, or experts); a norm and a head; no buffers but the rotary embedding's.
# Tensor parallelism supports these, and megatron-core's GPTModel computes the same; remaining differences are
# checked at loading.
PLAIN_DECODERS = ("llama", "qwen2", "qwen3", "qwen3_moe")
MEGATRON_DIVISIONS = (  # number of ranks, the model dimension that must be its multiple, what it counts
    ("tensor_parallel", "num_attention_heads", "attention heads"),
    ("tensor_parallel", "num_key_value_heads", "key and value heads"),
    ("tensor_parallel", "intermediate_size", "columns of its MLP"),
    ("pipeline_parallel", "num_hidden_layers", "layers"),
    ("expert_parallel", "num_experts", "experts"),
    ("expert_parallel", "num_local_experts", "experts"),  # name in transformers 5
)


def dtensor_misfit(model: Mapping[str, Any], settings: Dtensor) -> str | None:
    """Return why the dtensor backend cannot shard a model so; None if nothing prevents it."""
    size, experts = settings.tensor_parallel, settings.expert_parallel
    family = model.get("model_type")
    if size > 1 and family is not None and family not in PLAIN_DECODERS:
        return (
            f"policy.backend.tensor_parallel: got {size} with a {family} model, which has no tensor-parallel "
            f"plan; use 1, or a model of {listed(PLAIN_DECODERS)}"
        )
    if misfit := heads_misfit(model, size):
        return misfit
    number = model.get("num_experts") or model.get("num_local_experts")  # the latter in transformers 5
    if isinstance(number, int) and number % experts:
        return (
            f"policy.backend.expert_parallel: got {experts} with a model whose layers have {number} experts; "
            f"use a divisor of {number}"
        )
    return None


def vllm_misfit(model: Mapping[str, Any], size: int) -> str | None:
    """Return why vLLM cannot shard a model over `size` ranks; None if nothing prevents it."""
    field = "rollout.tensor_parallel"
    if misfit := heads_misfit(model, size, field):
        return misfit
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = model.get(name)
        if isinstance(width, int) and width % size:
            return f"{field}: got {size} with {name} {width}; use a divisor of {width}"
    return None


def heads_misfit(
    model: Mapping[str, Any], size: int, field: str = "policy.backend.tensor_parallel"
) -> str | None:
    """Return why a model's attention heads cannot be sharded over `size` ranks; None if they can."""
    heads, shared = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return None
    if heads % size or (shared % size and size % shared):
        return (
            f"{field}: got {size} with {heads} attention heads and {shared} key-value heads; use a divisor "
            f"of {heads} that divides {shared} or is a multiple of it"
        )
    return None


def megatron_misfit(model: Mapping[str, Any], settings: Megatron) -> str | None:
    """Return why megatron-core cannot build and shard a model so; None if nothing prevents it."""
    family, experts = model.get("model_type"), settings.expert_parallel
    if family is not None and family not in PLAIN_DECODERS:
        return (
            f"policy.backend.type: got 'megatron' with a {family} model, which it does not support; use "
            f"type: dtensor, or a model of {listed(PLAIN_DECODERS)}"
        )
    if (obstacle := attention_obstacle(model)) is not None:
        return (
            f"policy.backend.type: got 'megatron' with a {family} model, {obstacle}, but it only supports "
            "full attention; use type: dtensor"
        )
    if family == "qwen3_moe" and settings.tensor_parallel > 1 and experts == 1:
        return (
            f"policy.backend.expert_parallel: got 1 with tensor_parallel {settings.tensor_parallel}, but "
            "experts are not sharded by tensor parallelism; use 2 or more, or tensor_parallel: 1"
        )
    if family not in (None, "qwen3_moe") and experts > 1:
        return (
            f"policy.backend.expert_parallel: got {experts} with a {family} model, which has no experts; use "
            "1"
        )
    for name, dimension, units in MEGATRON_DIVISIONS:
        ranks, size = getattr(settings, name), model.get(dimension)
        if isinstance(size, int) and size % ranks:
            field = f"policy.backend.{name}"
            return f"{field}: got {ranks} with a model of {size} {units}; use a divisor of {size}"
    return None
