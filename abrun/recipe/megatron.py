"""Whether the megatron backend can run here, and build and cut a model; found without torch."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from abrun.extras import without
from abrun.recipe.dtensor import PLAIN_DECODERS
from abrun.recipe.families import attention_obstacle
from abrun.recipe.policy import Megatron

OLDEST, BELOW = (0, 16, 1), (0, 20, 0)
IMPORTS_TRITON = (0, 18, 0)  # without asking whether it is there
MEGATRON_VERSIONS = f">={'.'.join(map(str, OLDEST))},<{BELOW[0]}.{BELOW[1]}"

# Families that are what megatron-core's GPTModel computes, apart from what is seen when they are loaded.
MEGATRON_FAMILIES = PLAIN_DECODERS
CUTS = (  # what has to be a multiple of which ranks
    ("tensor_parallel", "num_attention_heads", "attention heads"),
    ("tensor_parallel", "num_key_value_heads", "key and value heads"),
    ("tensor_parallel", "intermediate_size", "columns of its MLP"),
    ("pipeline_parallel", "num_hidden_layers", "layers"),
    ("expert_parallel", "num_experts", "experts"),
    ("expert_parallel", "num_local_experts", "experts"),  # as transformers 5 writes it
)


def megatron_refusal() -> str | None:
    """Why this environment cannot run `policy.backend: {type: megatron}`, in a line; None where it can."""
    got, install = "policy.backend.type: got 'megatron'", "pip install 'abrun[megatron]'"
    try:
        found = importlib.metadata.version("megatron-core") or "of no version"  # where its metadata are torn
    except importlib.metadata.PackageNotFoundError:
        return f"{got} {without('megatron-core', install)}, or use type: dtensor"
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not OLDEST <= numbers < BELOW:
        return f"{got} with megatron-core {found}, not one of {MEGATRON_VERSIONS}; {install}"
    if numbers >= IMPORTS_TRITON and importlib.util.find_spec("triton") is None:
        return f"{got} with megatron-core {found}, which imports the missing package triton; {install}"
    return None


def megatron_misfit(model: Mapping[str, Any], settings: Megatron) -> str | None:
    """Why a model cannot be built and cut so, in a line; None where nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    family, experts = model.get("model_type"), settings.expert_parallel
    if family is not None and family not in MEGATRON_FAMILIES:
        return (
            f"policy.backend.type: got 'megatron' with a {family} model, which it does not build; use type: "
            f"dtensor, or a model of {', '.join(MEGATRON_FAMILIES)}"
        )
    if (obstacle := attention_obstacle(model)) is not None:
        return (
            f"policy.backend.type: got 'megatron' with a {family} model, {obstacle}, and it builds full "
            "attention alone; use type: dtensor"
        )
    if family == "qwen3_moe" and settings.tensor_parallel > 1 and experts == 1:
        return (
            f"policy.backend.expert_parallel: got 1 with tensor_parallel {settings.tensor_parallel} and a "
            "model of experts, each of which stays whole on a rank; use 2 or more, or tensor_parallel: 1"
        )
    if family not in (None, "qwen3_moe") and experts > 1:
        got = f"policy.backend.expert_parallel: got {experts}"
        return f"{got} with a {family} model, which has no experts; use 1"
    for field, name, what in CUTS:
        ranks, size = getattr(settings, field), model.get(name)
        if isinstance(size, int) and size % ranks:
            return (
                f"policy.backend.{field}: got {ranks} with a model of {size} {what}; use a divisor of {size}"
            )
    return None
