"""Answers of probes about memory, kept in the user's cache for later launches.

A key covers all that an answer depends on: the run's configuration apart from settings without effect on
memory, the files that it names, abrun's own code, the installed packages by name and version, and for
measurements the GPUs. An answer that is damaged or cannot be stored is found again.
"""

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.recipe.reading import dotted, nested
from abrun.recipe.run import NO_EFFECT_KEYS, OwnRunConfig
from abrun.runs.files import write_json

MAX_ANSWERS = 2000
MAX_ANSWER_BYTES = 2**20
# Settings that change neither the shapes of a step nor the lifetime of a tensor
NO_MEMORY_KEYS = (
    *(key for key in NO_EFFECT_KEYS if not key.startswith("cluster.")),
    "checkpoint.every",
    "policy.optimizer.learning_rate",
    "policy.optimizer.min_learning_rate",
    "policy.optimizer.schedule",
    "policy.optimizer.warmup_steps",
)
# Beginnings of the variables that torch, Triton, CUDA and the hub's cache read
VARIABLES = ("CUBLAS", "CUDA", "HF_HOME", "HF_HUB_CACHE", "NCCL", "PYTORCH", "TORCH", "TRITON")
PACKAGE = Path(__file__).parents[2]

Answer = Mapping[str, Any]


def cache_folder() -> Path:
    """Return the folder of all answers."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "abrun" / "memory"


def make_key(kind: str, config: OwnRunConfig, job: Mapping[str, Any], *surroundings: str) -> str:
    """Return the key of an answer.

    `kind`: the question. `job`: its other settings, such as sizes. `surroundings`: what else decides, such as
    the GPUs.
    """
    without_effect = tuple(f"{name}." for name in NO_MEMORY_KEYS)  # with what is in them
    settings = {
        key: value
        for key, value in dotted(config.model_dump(mode="json")).items()
        if not f"{key}.".startswith(without_effect)
    }
    content = {
        "kind": kind,
        "settings": settings,
        "job": dict(job),
        "files": [*_list_files(settings.values())],
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)},
        "surroundings": surroundings,
        "software": _hash_software(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_answer(key: str) -> tuple[Answer, str] | None:
    """Return an answer and the day on which it was found, or None."""
    path = cache_folder() / f"{key}.json"
    try:
        if path.stat().st_size > MAX_ANSWER_BYTES:
            return None
        content = json.loads(path.read_bytes())
        if content["digest"] != _digest(content["answer"], content["day"]):
            return None
        return content["answer"], content["day"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_answer(key: str, answer: Answer) -> None:
    """Keep an answer, and drop the oldest ones beyond MAX_ANSWERS."""
    day = time.strftime("%Y-%m-%d")
    content = {"answer": dict(answer), "day": day, "digest": _digest(answer, day)}
    folder = cache_folder()
    with contextlib.suppress(OSError, StoreError):  # a full disk or a read-only home only costs time
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{key}.json", content, durable=False)
        ages = {path: path.stat().st_mtime for path in folder.glob("*.json")}
        for path in sorted(ages, key=ages.__getitem__)[: max(len(ages) - MAX_ANSWERS, 0)]:
            path.unlink(missing_ok=True)


def without_section(config: OwnRunConfig, section: str) -> OwnRunConfig:
    """Return a configuration with the defaults of a section, for answers that do not depend on it."""
    tree = nested(dotted(config.model_dump()))
    return OwnRunConfig.model_validate({key: value for key, value in tree.items() if key != section})


def _digest(answer: Answer, day: str) -> str:
    return hashlib.sha256(json.dumps([dict(answer), day], sort_keys=True).encode()).hexdigest()


def _list_files(values: Any) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and time of change of each file that a setting names, or that is in a named folder.

    A name on the hub stands for the revisions of it in the hub's cache.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub = Path(os.environ.get("HF_HOME") or f"{home}/huggingface") / "hub"
    hub = Path(os.environ.get("HF_HUB_CACHE") or hub)
    for value in values:
        if not isinstance(value, str) or "\0" in value or len(value) > 4096:
            continue
        repository = value.replace("/", "--")
        for path in (
            Path(value),
            *(hub / f"{kind}--{repository}" / "refs" for kind in ("models", "datasets")),
        ):
            with contextlib.suppress(OSError, RuntimeError):  # no such file, no such user
                path = path.expanduser()
                for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                    status = file.stat()
                    yield str(file.absolute()), status.st_size, status.st_mtime_ns


@cache
def _hash_software() -> str:
    """Return a hash of abrun's code, of Python's version and of the names of all installed packages."""
    digest = hashlib.sha256(f"{sys.executable} {platform.platform()} {sys.version}".encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    for folder in sys.path:
        with contextlib.suppress(OSError):
            names = os.listdir(folder or ".")
            digest.update("\n".join(sorted(name for name in names if name.endswith("-info"))).encode())
    return digest.hexdigest()
