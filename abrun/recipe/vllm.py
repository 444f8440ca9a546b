"""Whether vLLM is here as the engine needs it, and can cut a model; found without importing it."""

from collections.abc import Mapping
from typing import Any

from abrun.extras import installed_packages
from abrun.reasons import Code, Reason
from abrun.recipe.dtensor import heads_misfit
from abrun.recipe.vllm_versions import CPU_BUILD, VLLM_VERSIONS, installed_vllm, release_of

BESIDE_THE_TRAINER = 0.6  # the share that it takes of a GPU, unless a step needs little
MOST_OF_A_CACHE = BESIDE_THE_TRAINER / 2  # what is little: the other half is for weights and activations
INSTALL = "pip install 'abrun[vllm]'"
INSTALL_FOR_CPU = (
    f"pip install --extra-index-url https://download.pytorch.org/whl/cpu '{CPU_BUILD}{VLLM_VERSIONS}'"
)


def vllm_refusal(packages: Mapping[str, str] | None = None, *, on_gpu: bool) -> Reason | None:
    """Return why `rollout: {engine: vllm}` cannot run with these packages, or this environment's."""
    field, instead = "rollout.engine", "engine: torch"
    package, install = ("vllm", INSTALL) if on_gpu else (CPU_BUILD, INSTALL_FOR_CPU)
    installed = installed_vllm(installed_packages() if packages is None else packages)
    if not installed:
        return Code.SETTING_NEEDS_PACKAGE(
            field=field, got="vllm", package=package, install=install, instead=instead
        )
    for_processors = any(name == CPU_BUILD or "cpu" in version for name, version in installed.items())
    if for_processors == on_gpu:
        name, version = next(iter(installed.items()))
        return Code.VLLM_OF_OTHER_DEVICE(package=name, version=version, on_gpu=on_gpu, install=install)
    for name, version in installed.items():
        if release_of(version) is None:
            return Code.PACKAGE_VERSION_UNSUPPORTED(
                field=field,
                got="vllm",
                package=name,
                version=version,
                supported=VLLM_VERSIONS,
                install=install,
                instead=instead,
            )
    return None


def vllm_misfit(model: Mapping[str, Any], size: int) -> Reason | None:
    """Return why vLLM cannot cut a model over `rollout.tensor_parallel` ranks; None where nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    field = "rollout.tensor_parallel"
    wrong = heads_misfit(model.get("num_attention_heads"), model.get("num_key_value_heads"), size, field)
    if wrong:
        return wrong
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = model.get(name)
        if isinstance(width, int) and width % size:
            return Code.WIDTH_CUT_UNEVENLY(field=field, got=size, dimension=name, size=width)
    return None
