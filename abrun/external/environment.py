"""What a foreign run depends on besides its configuration: its interpreter, packages and devices."""

import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUESTION = """
import sys
sys.path.sort(key=lambda folder: folder == "")  # a module of the working directory shadows none
import importlib.metadata, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = sys.argv[1:]
print(json.dumps({"python": platform.python_version(), "versions": {name: version(name) for name in names}}))
"""


def describe(
    argv: Sequence[str], python: str | None, packages: Sequence[str], env: Mapping[str, str], num_cores: int
) -> dict[str, Any]:
    """The content of environment.json. What cannot be found out is null, never guessed.

    `python`: the command's interpreter, where that is not its first word.
    """
    first = argv[0] if re.fullmatch(r"python[\d.]*", Path(argv[0]).name) else None
    answer = _ask(python or first, packages, env)
    return {
        "python": answer.get("python"),
        "versions": {name: answer.get("versions", {}).get(name) for name in packages},
        "devices": _gpus(env) or [_cpu_name()] * num_cores,
        "hosts": [socket.gethostname()],
        "dtype": None,
        "prompts_sha256": None,
    }


def _ask(python: str | None, packages: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """What the command's own interpreter says of itself; empty where there is none to ask."""
    program = python and shutil.which(python, path=env.get("PATH"))
    if not program:
        return {}
    try:
        said = subprocess.run(
            [program, "-c", QUESTION, *packages],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        answer = json.loads(said.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _gpus(env: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that the command may use."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    question = [
        "nvidia-smi",
        *(["-i", visible] if visible else []),
        "--query-gpu=name",
        "--format=csv,noheader",
    ]
    try:
        listed = subprocess.run(question, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
