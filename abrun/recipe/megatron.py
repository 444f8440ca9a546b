"""Whether the installed megatron-core is one that the megatron backend was built for; found without torch."""

import importlib.metadata
import importlib.util
import re

OLDEST, BELOW = (0, 16, 1), (0, 20, 0)
IMPORTS_TRITON = (0, 18, 0)  # without asking whether it is there
MEGATRON_VERSIONS = f">={'.'.join(map(str, OLDEST))},<{BELOW[0]}.{BELOW[1]}"


def megatron_refusal() -> str | None:
    """Why this environment cannot run `policy.backend: {type: megatron}`, in a line; None where it can."""
    got, install = "policy.backend.type: got 'megatron'", "pip install 'abrun[megatron]'"
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return f"{got} without the package megatron-core; {install}, or use type: dtensor"
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not OLDEST <= numbers < BELOW:
        return f"{got} with megatron-core {found}, not one of {MEGATRON_VERSIONS}; {install}"
    if numbers >= IMPORTS_TRITON and importlib.util.find_spec("triton") is None:
        return f"{got} with megatron-core {found}, which imports the missing package triton; {install}"
    return None
