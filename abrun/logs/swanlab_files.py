"""Reader for SwanLab's local files: `run-<id>.swanlab`, and `backup.swanlab` of versions before 0.8.

Both are logs in LevelDB's format, like wandb's. Their records are protobuf messages or JSON objects
(SwanHubX/SwanLab 0.10, `sdk/internal/core_python/store` and `protos`; 0.6, `data/porter`). The
configuration lies next to them as YAML.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from abrun.errors import StoreError
from abrun.logs.log import NOTHING_RECORDED, Log, LogStatus, printable, replaced_notes, wrap_read_errors
from abrun.logs.rows import parse_json
from abrun.logs.wandb_files import FILE_HEADER, NO_EXIT_NOTE, iterate_records, parse_environment
from abrun.recipe.reading import dotted
from abrun.regular_files import read_regular
from abrun.stats.series import build_series, split_series

SUFFIX = ".swanlab"
IDENT = b":SWL\xd6\xe1"  # the format's version follows in the seventh byte
JSON_VERSION, PROTOBUF_VERSION = 1, 2
STATES: dict[int, LogStatus] = {0: "running", 1: "finished", 2: "failed", 3: "failed"}
FINISHED, CRASHED = 1, 2
SYSTEM_PREFIX = "__swanlab__"  # of metrics of the hardware


@dataclass(slots=True)
class Contents:
    """Accumulated content of the records in a file."""

    start: dict[str, str] = field(default_factory=dict)  # project, name, group, job_type, id
    state: int = 0
    error: str = ""
    points: dict[str, tuple[list[int], list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )

    def add_point(self, key: str, step: int, value: float) -> None:
        if not key.startswith(SYSTEM_PREFIX):
            steps, values = self.points[key]
            steps.append(step)
            values.append(value)


def read_swanlab_file(path: Path, name: str) -> Log:
    """Return the run in a .swanlab file, named `<project>/<run>`. Raises StoreError for any other file."""
    place = printable(str(path))
    with wrap_read_errors(path):
        content = read_regular(path)
    contents, end = Contents(), min(FILE_HEADER, len(content))
    version = _read_version(content, place)
    for body, record_end in iterate_records(content):
        add_record = _add_json if version == JSON_VERSION else _add_message
        if not add_record(contents, body):
            break
        end = record_end
    metrics, replaced = split_series(
        {metric: build_series(*points) for metric, points in contents.points.items()}
    )
    notes = replaced_notes(replaced)
    if end < len(content):
        notes.append(f"{len(content) - end} bytes, from byte {end} on, are torn or damaged and were left out")
    start, has_started = contents.start, bool(contents.start)
    status: LogStatus = STATES.get(contents.state, "unknown") if has_started else "unknown"
    notes += [NO_EXIT_NOTE] * (status == "running") + [NOTHING_RECORDED] * (not has_started)
    return Log(
        name="/".join(filter(None, [start.get("project"), start.get("name") or name])),
        place=place,
        metrics=metrics,
        status=status,
        failure=(contents.error or "it crashed or was aborted") if status == "failed" else "",
        config=_read_config(path.parent / "files" / "config.yaml"),
        environment=_read_environment(path.parent / "files") or None,
        group=start.get("group") or None,
        job_type=start.get("job_type") or None,
        run_id=start.get("id") or None,
        notes=tuple(notes),
    )


def _read_version(content: bytes, place: str) -> int:
    header = content[:FILE_HEADER]
    if header[: len(IDENT)] != IDENT[: len(header)]:
        raise StoreError(f"{place}: not a SwanLab file; remove or rename it")
    version = header[-1] if len(header) == FILE_HEADER else PROTOBUF_VERSION
    if version not in (JSON_VERSION, PROTOBUF_VERSION):
        raise StoreError(
            f"{place}: version {version} of SwanLab's format; abrun reads {JSON_VERSION} and "
            f"{PROTOBUF_VERSION}: upload it with `swanlab sync` and export its charts as CSV"
        )
    return version


def _add_message(contents: Contents, body: bytes) -> bool:
    """Add a protobuf record; return False if it is damaged."""
    from google.protobuf.message import DecodeError

    from abrun.logs.protobuf import message_class

    try:
        record = message_class("SwanLabRecord").FromString(body)
    except DecodeError:
        return False
    match record.WhichOneof("record_type"):
        case "start":
            keys = ("project", "name", "group", "job_type", "id")
            contents.start = {key: getattr(record.start, key) for key in keys}
        case "finish":
            contents.state, contents.error = record.finish.state, record.finish.error
        case "scalar":
            contents.add_point(record.scalar.key, record.scalar.step, record.scalar.value.number)
    return True


def _add_json(contents: Contents, body: bytes) -> bool:
    """Add a record of the older format; return False if it is damaged."""
    record = parse_json(body)
    data = record.get("data") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(data, dict):
        return False
    match record.get("model_type"):
        case "Project":
            contents.start["project"] = str(data.get("name") or "")
        case "Experiment":
            contents.start |= {key: str(data.get(key) or "") for key in ("name", "id")}
        case "Footer":
            contents.state = FINISHED if data.get("success") else CRASHED
        case "Scalar":
            point = data.get("metric")
            value = point.get("data") if isinstance(point, dict) else None
            step = data.get("step")
            if isinstance(step, int) and isinstance(value, int | float | str):
                contents.add_point(str(data.get("key")), step, _parse_value(value))
    return True


def _parse_value(value: float | str) -> float:
    """Return a scalar, whose NaN and infinities are texts."""
    try:
        return float(value)
    except ValueError:
        return float("nan")


def _read_config(path: Path) -> dict[str, Any] | None:
    """Return the configuration: each key has a description, an order and a value."""
    try:
        content = yaml.safe_load(read_regular(path))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    if not isinstance(content, dict):
        return None
    values = {
        str(key): entry["value"] if isinstance(entry, Mapping) and "value" in entry else entry
        for key, entry in content.items()
    }
    return dotted(values) or None


def _read_environment(files: Path) -> dict[str, Any]:
    texts = {}
    for name in ("swanlab-metadata.json", "requirements.txt"):
        try:
            texts[name] = read_regular(files / name).decode(errors="replace")
        except OSError:
            texts[name] = ""
    metadata = parse_json(texts["swanlab-metadata.json"])
    runtime = metadata.get("runtime") if isinstance(metadata, dict) else None
    runtime = runtime if isinstance(runtime, dict) else {}
    known = {"python": runtime.get("python_version"), "host": runtime.get("hostname")}
    return parse_environment(known, texts["requirements.txt"])
