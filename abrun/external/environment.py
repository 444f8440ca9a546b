"""Environment of a foreign run: its interpreter, packages and devices."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from abrun.experiment.preflight.machine import cpu_name

VERSION_SCRIPT = """
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


def describe_environment(
    argv: Sequence[str], python: str | None, packages: Sequence[str], env: Mapping[str, str], num_cores: int
) -> dict[str, Any]:
    """Return the content of environment.json. Unknown values are None, never guessed.

    `python`: the command's interpreter, if it is not the first word of `argv`.
    """
    interpreter = argv[0] if re.fullmatch(r"python[\d.]*", Path(argv[0]).name) else None
    answer = _query_interpreter(python or interpreter, packages, env)
    return {
        "python": answer.get("python"),
        "versions": {name: answer.get("versions", {}).get(name) for name in packages},
        "devices": _list_gpus(env) or [cpu_name()] * num_cores,
        "hosts": [socket.gethostname()],
        "dtype": None,
        "prompts_sha256": None,
    }


def _query_interpreter(python: str | None, packages: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the command's own interpreter reports about itself, or {} if there is none to ask."""
    program = python and shutil.which(python, path=env.get("PATH"))
    if not program:
        return {}
    try:
        output = subprocess.run(
            [program, "-c", VERSION_SCRIPT, *packages],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        answer = json.loads(output.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _list_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that the command may use."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    query = ["nvidia-smi", *(["-i", visible] if visible else []), "--query-gpu=name", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]
