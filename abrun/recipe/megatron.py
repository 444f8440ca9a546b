"""Whether the megatron backend can run here, and build and cut a model; found without torch."""

import re
from collections.abc import Mapping
from typing import Any

from abrun.extras import installed_packages, without
from abrun.reasons import Code, Reason
from abrun.recipe.dtensor import PLAIN_DECODERS
from abrun.recipe.families import attention_obstacle
from abrun.recipe.policy import Megatron

OLDEST, BELOW = (0, 16, 1), (0, 20, 0)
IMPORTS_TRITON = (0, 18, 0)  # without asking whether it is there
MEGATRON_VERSIONS = f">={'.'.join(map(str, OLDEST))},<{BELOW[0]}.{BELOW[1]}"

# Families that are what megatron-core's GPTModel computes, apart from what is seen when they are loaded.
MEGATRON_FAMILIES = PLAIN_DECODERS
CUTS = (  # what has to be a multiple of which ranks
    ("tensor_parallel", "num_attention_heads"),
    ("tensor_parallel", "num_key_value_heads"),
    ("tensor_parallel", "intermediate_size"),
    ("pipeline_parallel", "num_hidden_layers"),
    ("expert_parallel", "num_experts"),
    ("expert_parallel", "num_local_experts"),  # as transformers 5 writes it
)


def megatron_refusal(packages: Mapping[str, str] | None = None) -> Reason | None:
    """Return why `policy.backend: {type: megatron}` cannot run with these packages, or this environment's."""
    packages = installed_packages() if packages is None else packages
    field, package, install = "policy.backend.type", "megatron-core", "pip install 'abrun[megatron]'"
    version = packages.get(package)
    if version is None:
        return without(field, "megatron", package, install, instead="type: dtensor")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < BELOW:
        return Code.PACKAGE_VERSION_UNSUPPORTED(
            field=field,
            got="megatron",
            package=package,
            version=version,
            supported=MEGATRON_VERSIONS,
            install=install,
            instead=None,
        )
    if numbers >= IMPORTS_TRITON and "triton" not in packages:
        return Code.PACKAGE_OF_PACKAGE_MISSING(
            field=field, got="megatron", package=package, version=version, missing="triton", install=install
        )
    return None


def megatron_misfit(model: Mapping[str, Any], settings: Megatron) -> Reason | None:
    """Return why a model cannot be built and cut so; None where nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    family, experts = model.get("model_type"), settings.expert_parallel
    if family is not None and family not in MEGATRON_FAMILIES:
        return Code.BACKEND_LACKS_FAMILY(backend="megatron", family=family, allowed=MEGATRON_FAMILIES)
    if (obstacle := attention_obstacle(model)) is not None:
        return Code.BACKEND_NEEDS_FULL_ATTENTION(backend="megatron", family=family, obstacle=obstacle)
    if family == "qwen3_moe" and settings.tensor_parallel > 1 and experts == 1:
        return Code.EXPERTS_STAY_WHOLE(tensor_parallel=settings.tensor_parallel)
    if family not in (None, "qwen3_moe") and experts > 1:
        return Code.MODEL_HAS_NO_EXPERTS(got=experts, family=family)
    for field, dimension in CUTS:
        ranks, size = getattr(settings, field), model.get(dimension)
        if isinstance(size, int) and size % ranks:
            return Code.MODEL_CUT_UNEVENLY(
                field=f"policy.backend.{field}", got=ranks, size=size, dimension=dimension
            )
    return None
