"""Settings of a run from files beside its log, as Lightning, Hydra, Ray and many scripts write them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.files import path_kind, read_companion
from abrun.logs.foreign.values import as_config, as_mapping, parse_foreign_yaml, parse_json
from abrun.logs.log import Log
from abrun.logs.mlflow_files import MAX_META_BYTES
from abrun.runs.layout import CONFIG

# In the run's folder or one above it, which holds no other run. The first that can be read counts.
FILES = (
    *(("hparams.yaml",), (".hydra", "config.yaml"), ("config.yaml",), (CONFIG,), ("params.json",)),
    *(("args.json",), ("hparams.json",), ("args.yaml",), ("training_args.json",)),
)
MODEL_KEYS = {"model_type", "architectures"}  # a config.json of a model, not of a run
MAX_FOLDERS = 4  # up from the log


def add_settings(logs: Sequence[Log], top: Path) -> list[Log]:
    """Return the logs of a source with the settings beside them; `top`: its folder or file.

    A run that recorded its settings keeps them.
    """
    if path_kind(top) != "folder":
        return [*logs]
    top = top.resolve()
    folders = [_folder_of(log) for log in logs]
    num_runs = Counter(above for folder in folders if folder for above in _up_from(folder, top))
    return [
        log if log.config or folder is None else replace(log, config=_find_settings(folder, num_runs, top))
        for log, folder in zip(logs, folders, strict=True)
    ]


def _folder_of(log: Log) -> Path | None:
    path = Path(log.place).resolve()
    kind = path_kind(path)
    return path if kind == "folder" else path.parent if kind == "file" else None


def _up_from(folder: Path, top: Path) -> list[Path]:
    """Return a folder and those above it, at most MAX_FOLDERS and up to `top`."""
    return [above for above in (folder, *folder.parents)[:MAX_FOLDERS] if above.is_relative_to(top)]


def _find_settings(folder: Path, num_runs: Mapping[Path, int], top: Path) -> Mapping[str, Any] | None:
    """Return the settings in a run's folder, or in one above that holds no other run."""
    for candidate in _up_from(folder, top):
        if num_runs[candidate] > 1:
            return None
        for names in FILES:
            content = read_companion(candidate, *names, notes=[], max_bytes=MAX_META_BYTES)
            if content is not None and (settings := _parse(content, names[-1])):
                return settings
    return None


def _parse(content: bytes, name: str) -> dict[str, Any]:
    """Return the settings in a file; empty if it holds none."""
    try:
        settings = (
            parse_foreign_yaml(content, name) if name.endswith(".yaml") else as_mapping(parse_json(content))
        )
    except StoreError:
        return {}
    return {} if MODEL_KEYS & settings.keys() else as_config(settings)
