"""Whether the dtensor backend can cut a model, as far as its configuration says; found without torch."""

from collections.abc import Mapping
from typing import Any

from abrun.recipe.policy import Dtensor

# Of one structure: an embedding; layers of norms, self_attn (q_proj ... o_proj) and mlp (gate_proj, up_proj,
# down_proj, or experts); a norm and a head; and no buffer but the rotation's.
PLAIN_DECODERS = ("llama", "qwen2", "qwen3", "qwen3_moe")


def dtensor_misfit(model: Mapping[str, Any], settings: Dtensor) -> str | None:
    """Why a model cannot be cut so, in a line; None where nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    size, experts = settings.tensor_parallel, settings.expert_parallel
    family = model.get("model_type")
    if size > 1 and family is not None and family not in PLAIN_DECODERS:
        return (
            f"policy.backend.tensor_parallel: got {size} with a {family} model, which there is no plan for; "
            f"use 1, or a model of {', '.join(PLAIN_DECODERS)}"
        )
    wrong = heads_misfit(model.get("num_attention_heads"), model.get("num_key_value_heads"), size)
    if wrong:
        return wrong
    number = model.get("num_experts") or model.get("num_local_experts")  # the latter as transformers 5 has it
    if isinstance(number, int) and number % experts:
        return (
            f"policy.backend.expert_parallel: got {experts} with a model whose layers have {number} experts; "
            f"use a divisor of {number}"
        )
    return None


def heads_misfit(
    heads: Any, shared: Any, size: int, field: str = "policy.backend.tensor_parallel"
) -> str | None:
    """Why so many attention heads and key-value heads cannot be cut over `size` ranks."""
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return None
    if heads % size or (shared % size and size % shared):
        return (
            f"{field}: got {size} with {heads} attention heads and {shared} key-value "
            f"heads; use a divisor of {heads} that divides {shared} or is a multiple of it"
        )
    return None
