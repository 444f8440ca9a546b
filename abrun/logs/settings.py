"""Settings of a run from files beside its log, as Lightning, Hydra, Ray and many scripts write them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product, takewhile
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
    folders = [_folders_of(Path(log.place).resolve(), top.resolve()) for log in logs]
    num_runs = Counter(folder for log_folders in folders for folder in log_folders)
    return [
        log
        if log.config
        else replace(log, config=_find_settings([*takewhile(lambda f: num_runs[f] == 1, log_folders)]))
        for log, log_folders in zip(logs, folders, strict=True)
    ]


def _folders_of(place: Path, top: Path) -> list[Path]:
    """Return the folder of a run and those above it, at most MAX_FOLDERS and up to `top`."""
    kind = path_kind(place)
    folders = [place, *place.parents] if kind == "folder" else [*place.parents] if kind == "file" else []
    return [folder for folder in folders[:MAX_FOLDERS] if folder.is_relative_to(top)]


def _find_settings(folders: Sequence[Path]) -> Mapping[str, Any] | None:
    for folder, names in product(folders, FILES):
        content = read_companion(folder, *names, notes=[], max_bytes=MAX_META_BYTES)
        if content is not None and (settings := _parse(content, names[-1])):
            return settings
    return None


def _parse(content: bytes, name: str) -> dict[str, Any]:
    try:
        settings = (
            parse_foreign_yaml(content, name) if name.endswith(".yaml") else as_mapping(parse_json(content))
        )
    except StoreError:
        return {}
    return {} if MODEL_KEYS & settings.keys() else as_config(settings)
