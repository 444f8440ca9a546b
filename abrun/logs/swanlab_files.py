"""Reader for SwanLab's local files: `run-<id>.swanlab`, and `backup.swanlab` of versions before 0.8.

Both are logs in LevelDB's format, like wandb's. Their records are protobuf messages or JSON objects
(SwanHubX/SwanLab 0.10, `sdk/internal/core_python/store` and `protos`; 0.6, `data/porter`). The
configuration lies next to them as YAML.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.files import open_file, read_companion
from abrun.logs.foreign.values import (
    MAX_YAML_BYTES,
    Points,
    as_config,
    as_mapping,
    as_name,
    as_number,
    as_step,
    as_text,
    left_out_notes,
    parse_foreign_yaml,
    parse_json,
)
from abrun.logs.log import NOTHING_RECORDED, Log, LogStatus, collect_points
from abrun.logs.rows import check_number_of_metrics
from abrun.logs.wandb_files import (
    FILE_HEADER,
    NO_EXIT_NOTE,
    iterate_records,
    parse_environment,
    read_requirements,
    torn_notes,
)
from abrun.runs.redaction import printable

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
    points: dict[str, Points] = field(default_factory=lambda: defaultdict(Points))
    num_left_out: int = 0

    def add_point(self, key: Any, step: Any, value: Any) -> None:
        name, number, whole_step = as_name(key), as_number(value), as_step(step)
        if name is None or number is None or whole_step is None:
            self.num_left_out += 1
        elif not name.startswith(SYSTEM_PREFIX):
            self.points[name].add(whole_step, number)


def claims(path: Path, names: Collection[str]) -> bool:
    """Return True for a file of SwanLab's."""
    return not names and path.suffix == SUFFIX


def read(path: Path, name: str, step_column: str | None) -> list[Log]:
    """Return the run in a file, named `<project>/<run>`. Raises StoreError."""
    place = printable(str(path))
    contents = Contents()
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        version = _read_version(file.read(FILE_HEADER), place)
        add_record: Callable[..., bool] = _add_json if version == JSON_VERSION else _add_message
        end = min(FILE_HEADER, size)
        for body, record_end in iterate_records(file, size):
            if not add_record(contents, body):
                break
            end = record_end
            check_number_of_metrics(len(contents.points), place)
    metrics, notes = collect_points(contents.points)
    notes += torn_notes(end, size) + left_out_notes(contents.num_left_out)
    start, has_started = contents.start, bool(contents.start)
    status: LogStatus = STATES.get(contents.state, "unknown") if has_started else "unknown"
    notes += [NO_EXIT_NOTE] * (status == "running") + [NOTHING_RECORDED] * (not has_started)
    config = _read_config(path.parent, notes)
    metadata = read_companion(path.parent, "files", "swanlab-metadata.json", notes=notes)
    runtime = as_mapping(as_mapping(parse_json(metadata or b"")).get("runtime"))
    known = {"python": runtime.get("python_version"), "host": runtime.get("hostname")}
    environment = parse_environment(known, read_requirements(path.parent, notes))
    log = Log(
        name="/".join(filter(None, [start.get("project"), start.get("name") or name])),
        place=place,
        metrics=metrics,
        status=status,
        failure=(contents.error or "it crashed or was aborted") if status == "failed" else "",
        config=config or None,
        environment=environment or None,
        group=start.get("group") or None,
        job_type=start.get("job_type") or None,
        run_id=start.get("id") or None,
        notes=tuple(notes),
    )
    return [log]


def _read_version(header: bytes, place: str) -> int:
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
    from abrun.logs.foreign.protobuf import parse_message

    record = parse_message("SwanLabRecord", body)
    if record is None:
        return False
    match record.WhichOneof("record_type"):
        case "start":
            keys = ("project", "name", "group", "job_type", "id")
            contents.start = {key: as_name(getattr(record.start, key)) or "" for key in keys}
        case "finish":
            contents.state, contents.error = record.finish.state, as_text(record.finish.error) or ""
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
            contents.start["project"] = as_name(data.get("name")) or ""
        case "Experiment":
            contents.start |= {key: as_name(data.get(key)) or "" for key in ("name", "id")}
        case "Footer":
            contents.state = FINISHED if data.get("success") else CRASHED
        case "Scalar":
            value = as_number(as_mapping(data.get("metric")).get("data"))  # NaN and infinities are texts
            contents.add_point(data.get("key"), data.get("step"), value)
    return True


def _read_config(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Return the configuration: each key has a description, an order and a value."""
    names = ("files", "config.yaml")
    content = read_companion(folder, *names, notes=notes, max_bytes=MAX_YAML_BYTES)
    try:
        entries = {} if content is None else parse_foreign_yaml(content, "/".join(names))
    except StoreError as error:
        notes.append(f"its configuration was not read: {error}")
        return {}
    return as_config(
        {
            str(key): entry["value"] if isinstance(entry, Mapping) and "value" in entry else entry
            for key, entry in entries.items()
        }
    )
