"""Whether the dtensor backend can cut a model, as far as its configuration says; found without torch."""

from collections.abc import Mapping
from typing import Any

from abrun.reasons import Code, Reason
from abrun.recipe.policy import Dtensor

# Of one structure: an embedding; layers of norms, self_attn (q_proj ... o_proj) and mlp (gate_proj, up_proj,
# down_proj, or experts); a norm and a head; and no buffer but the rotation's.
PLAIN_DECODERS = ("llama", "qwen2", "qwen3", "qwen3_moe")


def dtensor_misfit(model: Mapping[str, Any], settings: Dtensor) -> Reason | None:
    """Return why a model cannot be cut so; None where nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    size, experts = settings.tensor_parallel, settings.expert_parallel
    family = model.get("model_type")
    if size > 1 and family is not None and family not in PLAIN_DECODERS:
        return Code.FAMILY_WITHOUT_TENSOR_PARALLEL_PLAN(got=size, family=family, allowed=PLAIN_DECODERS)
    wrong = heads_misfit(model.get("num_attention_heads"), model.get("num_key_value_heads"), size)
    if wrong:
        return wrong
    number = model.get("num_experts") or model.get("num_local_experts")  # the latter as transformers 5 has it
    if isinstance(number, int) and number % experts:
        return Code.EXPERTS_CUT_UNEVENLY(got=experts, experts=number)
    return None


def heads_misfit(
    heads: Any, shared: Any, size: int, field: str = "policy.backend.tensor_parallel"
) -> Reason | None:
    """Return why so many attention heads and key-value heads cannot be cut over `size` ranks."""
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return None
    if heads % size or (shared % size and size % shared):
        return Code.HEADS_CUT_UNEVENLY(field=field, got=size, heads=heads, key_value_heads=shared)
    return None
