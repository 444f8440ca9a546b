"""Reader for TensorBoard's event files that does not need TensorFlow and keeps every point.

An event file consists of TFRecords: length (8 bytes), CRC of the length (4), an Event message, its CRC (4).
TensorBoard's own readers import TensorFlow if it is installed, or keep only a sample of the points.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from abrun.errors import StoreError
from abrun.logs.foreign.files import open_file
from abrun.logs.foreign.values import MAX_NAME_CHARACTERS, MAX_RECORD_BYTES, Points, as_config, parse_json
from abrun.logs.log import NOTHING_RECORDED, Log, collect_points
from abrun.logs.rows import check_number_of_metrics, check_step
from abrun.runs.redaction import printable

EVENT_FILE_PREFIX = "events.out.tfevents"
ARGUMENTS = "args/text_summary"  # of transformers' Trainer, as JSON
HEADER, FOOTER = 12, 4  # bytes
# DataType of tensor.proto -> dtype of a tensor's bytes, and the field of numbers used without bytes.
# (bfloat16 and 8-bit floats are not read.)
_TYPES = "1 <f4 float  2 <f8 double  3 <i4 int  4 u1 int  5 <i2 int  6 i1 int  9 <i8 int64  17 <u2 int"
_TYPES += "  19 <f2 half  22 <u4 uint32  23 <u8 uint64"
TENSOR_TYPES = {
    int(number): (np.dtype(content), f"{field}_val")
    for number, content, field in (kind.split() for kind in _TYPES.split("  "))
}
TIMESTAMP = re.compile(rf"{re.escape(EVENT_FILE_PREFIX)}\.(\d+)")


def read_event_files(files: Sequence[Path], name: str, place: Path) -> Log:
    """Return one run from all its event files; the last value of a repeated step counts."""
    points: dict[str, Points] = defaultdict(Points)
    config: dict[str, Any] = {}
    notes: list[str] = []
    place_text = printable(str(place))
    num_restarts = 0  # files that start again at an earlier step
    for path in files:
        first_steps = {tag: min(recorded.steps) for tag, recorded in points.items()}
        is_restart, file_text = False, printable(str(path))
        for event in _read_events(path, notes):
            check_number_of_metrics(max(len(points), len(event.summary.value)), place_text)
            for value in event.summary.value:
                number = _read_scalar(value) if len(value.tag) <= MAX_NAME_CHARACTERS else None
                if number is None:
                    if value.tag == ARGUMENTS and value.tensor.string_val:
                        config.update(as_config(parse_json(value.tensor.string_val[0])))
                    config.update(_read_hparams(value))
                else:
                    check_step(event.step, file_text, value.tag)
                    is_restart = is_restart or event.step <= first_steps.get(value.tag, -1)
                    points[value.tag].add(event.step, number)
        num_restarts += is_restart
    check_number_of_metrics(len(points), place_text)
    metrics, replaced_notes = collect_points(points)
    notes = replaced_notes + notes
    # Several runs in one folder look the same.
    restart_note = (
        f"{place_text}: its {len(files)} event files were read as one run, restarted "
        f"{num_restarts} time(s), and the last values count; if they are several runs, put each into its own "
        "folder"
    )
    return Log(
        name=name,
        place=place_text,
        metrics=metrics,
        config=config or None,
        guesses=(restart_note,) if num_restarts else (),
        notes=tuple(notes if metrics or notes else [NOTHING_RECORDED]),
    )


def start_key(path: Path) -> tuple[int, str]:
    """Return a key that sorts event files by the time in their names."""
    match = TIMESTAMP.search(path.name)
    return int(match[1]) if match else 0, path.name


def _read_events(path: Path, notes: list[str]) -> Iterator[Any]:
    """Yield the complete, undamaged events of a file."""
    from abrun.logs.foreign.protobuf import parse_message

    position, num_large = 0, 0
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        while position + HEADER + FOOTER <= size:
            header = file.read(HEADER)
            (length,) = struct.unpack_from("<Q", header)
            if not _has_valid_crc(header):
                if position == 0:
                    raise StoreError(
                        f"{printable(str(path))}: not a TensorBoard event file; remove or rename it"
                    )
                break
            end = position + HEADER + length + FOOTER
            if end > size:
                break
            if length > MAX_RECORD_BYTES:  # of images or a graph
                num_large += 1
                file.seek(end)
            else:
                record = file.read(length + FOOTER)
                event = parse_message("Event", record[:-FOOTER]) if _has_valid_crc(record) else None
                if event is None:
                    break
                yield event
            position = end
    if num_large:
        notes.append(
            f"{printable(path.name)}: {num_large} events of more than {MAX_RECORD_BYTES} bytes left out"
        )
    if position < size:
        notes.append(
            f"{printable(path.name)}: {size - position} bytes, from byte {position} on, are torn or damaged "
            "and were left out"
        )


def _read_scalar(value: Any) -> float | None:
    """Return the number of a summary value (TensorFlow 1 field or 2 tensor); None if it is not a scalar."""
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    content, values = TENSOR_TYPES.get(value.tensor.dtype, (None, ""))
    if content is None:
        return None
    if value.tensor.tensor_content:
        numbers = value.tensor.tensor_content
        return float(np.frombuffer(numbers, content)[0]) if len(numbers) == content.itemsize else None
    repeated = getattr(value.tensor, values)
    if len(repeated) != 1:
        return None
    if values == "half_val":  # bits of float16 values
        return float(np.array(repeated, np.uint16).view(np.float16)[0])
    return float(repeated[0])


def _read_hparams(value: Any) -> dict[str, Any]:
    if value.metadata.plugin_data.plugin_name != "hparams":
        return {}
    from abrun.logs.foreign.protobuf import parse_message

    data = parse_message("HParams", value.metadata.plugin_data.content)
    settings = {
        hparam.key.replace("/", "."): getattr(hparam.value, hparam.value.WhichOneof("kind") or "", None)
        for hparam in (data.session_start_info.hparams if data else ())
    }
    return {
        printable(key): setting
        for key, setting in settings.items()
        if len(key) <= MAX_NAME_CHARACTERS and isinstance(setting, str | float | bool | None)
    }


def _has_valid_crc(record: bytes) -> bool:
    crc = google_crc32c.value(record[:-FOOTER])
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF  # masked CRC of the TFRecord format
    return masked == struct.unpack_from("<I", record, len(record) - FOOTER)[0]
