"""Runs in TensorBoard's event files, read without TensorFlow and without leaving out a point.

An event file is TFRecords: length (8 bytes), CRC of the length (4), an Event message, CRC of it (4). The
package's own readers import TensorFlow wherever it is installed, or keep a sample of the points, and are not
needed here.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from abrun.errors import StoreError
from abrun.logs.log import EMPTY, Log, left_out, printable, readable
from abrun.logs.rows import check_number_of_metrics, check_step
from abrun.regular_files import is_file, read_regular
from abrun.stats.series import Series, build_series

EVENTS = "events.out.tfevents"
HEADER, FOOTER = 12, 4  # bytes
# DataType of tensor.proto -> what a tensor's bytes are, and the field of numbers where it has none. (Of
# bfloat16 and 8-bit floats nothing is read.)
TENSORS = {
    1: (np.dtype("<f4"), "float_val"),
    2: (np.dtype("<f8"), "double_val"),
    3: (np.dtype("<i4"), "int_val"),
    4: (np.dtype("u1"), "int_val"),
    5: (np.dtype("<i2"), "int_val"),
    6: (np.dtype("i1"), "int_val"),
    9: (np.dtype("<i8"), "int64_val"),
    17: (np.dtype("<u2"), "int_val"),
    19: (np.dtype("<f2"), "half_val"),
    22: (np.dtype("<u4"), "uint32_val"),
    23: (np.dtype("<u8"), "uint64_val"),
}
TIMESTAMP = re.compile(rf"{re.escape(EVENTS)}\.(\d+)")


def event_files(folder: Path) -> list[Path]:
    """The event files in a folder, in the order in which they were begun."""
    with readable(folder):
        files = [path for path in folder.iterdir() if EVENTS in path.name and is_file(path)]
    return sorted(files, key=begun)


def read_event_files(files: Sequence[Path], name: str, place: Path) -> Log:
    """One run of all its event files; where a step comes twice, the last counts."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    config: dict[str, Any] = {}
    notes: list[str] = []
    num_anew = 0  # files that do not go on where those before them were
    for path in files:
        first = {tag: min(steps) for tag, (steps, _) in points.items()}
        anew = False
        for event in _events(path, notes):
            for value in event.summary.value:
                number = _scalar(value)
                if number is None:
                    config.update(_hparams(value))
                else:
                    check_step(event.step, printable(str(path)), value.tag)
                    anew = anew or event.step <= first.get(value.tag, -1)
                    steps, values = points.setdefault(value.tag, ([], []))
                    steps.append(event.step)
                    values.append(number)
        num_anew += anew
    check_number_of_metrics(len(points), printable(str(place)))
    merged = {tag: build_series(*one) for tag, one in points.items()}
    metrics: dict[str, Series] = {tag: series for tag, (series, _) in merged.items()}
    notes = left_out(sum(replaced for _, replaced in merged.values())) + notes
    return Log(
        name=name,
        place=printable(str(place)),
        metrics=metrics,
        config=config or None,
        guesses=tuple(_begun_anew(printable(str(place)), len(files), num_anew)),
        notes=tuple(notes if metrics or notes else [EMPTY]),
    )


def _begun_anew(place: str, num_files: int, num_anew: int) -> Iterator[str]:
    """Two runs in one folder, and one that was started over, look alike."""
    if num_anew:
        yield (
            f"{place}: its {num_files} event files are one run, begun anew {num_anew} time(s), whose last "
            "values count; were they several runs, each needs a folder of its own"
        )


def begun(path: Path) -> tuple[int, str]:
    """Sorts event files by the time in their names."""
    found = TIMESTAMP.search(path.name)
    return int(found[1]) if found else 0, path.name


def _events(path: Path, notes: list[str]) -> Iterator[Any]:
    from google.protobuf.message import DecodeError

    from abrun.logs.messages import message

    event = message("Event")
    with readable(path):
        content = read_regular(path)
    records, end = _records(content)
    if not records and len(content) >= HEADER and not _is_sound(content, 0, HEADER - FOOTER):
        raise StoreError(f"{printable(str(path))}: not an event file of TensorBoard; remove or rename it")
    for start, stop in records:
        try:
            yield event.FromString(content[start:stop])
        except DecodeError:
            end = start - HEADER
            break
    if end < len(content):
        notes.append(
            f"{printable(path.name)}: {len(content) - end} bytes, from byte {end} on, are torn or damaged "
            "and were left out"
        )


def _scalar(value: Any) -> float | None:
    """The number of a summary value, in TensorFlow 1's field or 2's tensor; None: it is no scalar."""
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    content, values = TENSORS.get(value.tensor.dtype, (None, ""))
    if content is None:
        return None
    if value.tensor.tensor_content:
        numbers = value.tensor.tensor_content
        return float(np.frombuffer(numbers, content)[0]) if len(numbers) == content.itemsize else None
    written = getattr(value.tensor, values)
    if len(written) != 1:
        return None
    if values == "half_val":  # its bits
        return float(np.array(written, np.uint16).view(np.float16)[0])
    return float(written[0])


def _hparams(value: Any) -> dict[str, Any]:
    if value.metadata.plugin_data.plugin_name != "hparams":
        return {}
    from google.protobuf.message import DecodeError

    from abrun.logs.messages import message

    try:
        data = message("HParams").FromString(value.metadata.plugin_data.content)
    except DecodeError:
        return {}
    return {
        printable(one.key).replace("/", "."): getattr(one.value, one.value.WhichOneof("kind") or "", None)
        for one in data.session_start_info.hparams
    }


# --- records ---


def _records(content: bytes) -> tuple[list[tuple[int, int]], int]:
    """Where the whole and undamaged events lie, and where the last of them ends."""
    spans, position = [], 0
    while _is_sound(content, position, position + HEADER - FOOTER):
        (length,) = struct.unpack_from("<Q", content, position)
        start = position + HEADER
        if not _is_sound(content, start, start + length):
            break
        spans.append((start, start + length))
        position = start + length + FOOTER
    return spans, position


def _is_sound(content: bytes, start: int, stop: int) -> bool:
    """Whether all of the bytes are there, and the masked CRC-32C in the 4 bytes behind them is theirs."""
    if stop + FOOTER > len(content):
        return False
    crc = google_crc32c.value(content[start:stop])
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF  # as TFRecords mask it
    return masked == struct.unpack_from("<I", content, stop)[0]
