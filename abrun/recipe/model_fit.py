"""Why a backend or an engine cannot spread a model over ranks, as far as its configuration says.

Found without torch. `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
"""

from collections.abc import Mapping
from typing import Any

from abrun.reasons import Code, Reason
from abrun.recipe.families import attention_obstacle
from abrun.recipe.policy import Dtensor, Megatron

# Of one structure: an embedding; layers of norms, self_attn (q_proj ... o_proj) and mlp (gate_proj, up_proj,
# down_proj, or experts); a norm and a head; and no buffer but the rotation's. Tensor parallelism takes these,
# and megatron-core's GPTModel computes what they do, apart from what is seen when they are loaded.
PLAIN_DECODERS = ("llama", "qwen2", "qwen3", "qwen3_moe")
MEGATRON_DIVISIONS = (  # ranks, and what has to be a multiple of them
    ("tensor_parallel", "num_attention_heads"),
    ("tensor_parallel", "num_key_value_heads"),
    ("tensor_parallel", "intermediate_size"),
    ("pipeline_parallel", "num_hidden_layers"),
    ("expert_parallel", "num_experts"),
    ("expert_parallel", "num_local_experts"),  # as transformers 5 writes it
)


def dtensor_misfit(model: Mapping[str, Any], settings: Dtensor) -> Reason | None:
    """Return why the dtensor backend cannot spread a model so; None if nothing says so."""
    size, experts = settings.tensor_parallel, settings.expert_parallel
    family = model.get("model_type")
    if size > 1 and family is not None and family not in PLAIN_DECODERS:
        return Code.FAMILY_WITHOUT_TENSOR_PARALLEL_PLAN(got=size, family=family, allowed=PLAIN_DECODERS)
    if misfit := heads_misfit(model, size):
        return misfit
    number = model.get("num_experts") or model.get("num_local_experts")  # the latter as transformers 5 has it
    if isinstance(number, int) and number % experts:
        return Code.EXPERTS_CUT_UNEVENLY(got=experts, experts=number)
    return None


def vllm_misfit(model: Mapping[str, Any], size: int) -> Reason | None:
    """Return why vLLM cannot spread a model over `rollout.tensor_parallel` ranks; None if nothing says so."""
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
    """Return why a model's attention heads cannot be spread over `size` ranks."""
    heads, shared = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return None
    if heads % size or (shared % size and size % shared):
        return Code.HEADS_CUT_UNEVENLY(field=field, got=size, heads=heads, key_value_heads=shared)
    return None


def megatron_misfit(model: Mapping[str, Any], settings: Megatron) -> Reason | None:
    """Return why megatron-core cannot build and spread a model so; None if nothing says so."""
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
