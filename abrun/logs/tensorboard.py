"""Runs in TensorBoard's event files, read without TensorFlow and without leaving out a point.

An event file is TFRecords: length (8 bytes), CRC of the length (4), an Event message, CRC of it (4). The
package's own readers import TensorFlow wherever it is installed, or keep a sample of the points: only its
messages are used here.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.errors import StoreError
from abrun.logs.log import EMPTY, Log, left_out, needs_package, printable, readable
from abrun.series import Series, by_step

EVENTS = "events.out.tfevents"
HEADER, FOOTER = 12, 4  # bytes
LARGEST_CHECKED = 4096  # bytes: longer events hold images or texts, which are not read
POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
TIMESTAMP = re.compile(rf"{re.escape(EVENTS)}\.(\d+)")


def event_files(folder: Path) -> list[Path]:
    """The event files in a folder, in the order in which they were begun."""
    with readable(folder):
        files = [path for path in folder.iterdir() if EVENTS in path.name and path.is_file()]
    return sorted(files, key=begun)


def read_event_files(files: Sequence[Path], name: str, place: Path) -> Log:
    """One run of all its event files; where a step comes twice, the last counts."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    config: dict[str, Any] = {}
    notes: list[str] = []
    for path in files:
        for event in _events(path, notes):
            for value in event.summary.value:
                number = _scalar(value)
                if number is None:
                    config.update(_hparams(value))
                else:
                    steps, values = points.setdefault(value.tag, ([], []))
                    steps.append(event.step)
                    values.append(number)
    merged = {tag: by_step(*one) for tag, one in points.items()}
    metrics: dict[str, Series] = {tag: series for tag, (series, _) in merged.items()}
    notes = left_out(sum(replaced for _, replaced in merged.values())) + notes
    return Log(
        name=name,
        place=printable(str(place)),
        metrics=metrics,
        config=config or None,
        notes=tuple(notes if metrics or notes else [EMPTY]),
    )


def begun(path: Path) -> tuple[int, str]:
    """Sorts event files by the time in their names."""
    found = TIMESTAMP.search(path.name)
    return int(found[1]) if found else 0, path.name


def _events(path: Path, notes: list[str]) -> Iterator[Any]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto import event_pb2
    except ImportError:
        raise needs_package(path, "tensorboard", "'abrun[tensorboard]'") from None
    event: Any = event_pb2.Event  # type: ignore[attr-defined]
    with readable(path):
        content = path.read_bytes()
    records, end = _records(content)
    if not records and len(content) >= HEADER and not _crc_holds(content[:8], content[8:12]):
        raise StoreError(f"{printable(str(path))}: not an event file of TensorBoard; remove or rename it")
    for start, stop in records:
        try:
            yield event.FromString(content[start:stop])
        except DecodeError:
            end = start
            break
    if end < len(content):
        notes.append(
            f"{printable(path.name)}: {len(content) - end} bytes at its end are torn or damaged "
            "and were left out"
        )


def _scalar(value: Any) -> float | None:
    """The number of a summary value, in TensorFlow 1's field or 2's tensor; None: it is no scalar."""
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util import tensor_util

    try:
        array = tensor_util.make_ndarray(value.tensor)
    except (TypeError, ValueError):
        return None
    return float(array.reshape(())) if array.dtype.kind in "fiu" and array.size == 1 else None


def _hparams(value: Any) -> dict[str, Any]:
    if value.metadata.plugin_data.plugin_name != "hparams":
        return {}
    from google.protobuf.message import DecodeError
    from tensorboard.plugins.hparams import plugin_data_pb2

    message: Any = plugin_data_pb2.HParamsPluginData  # type: ignore[attr-defined]
    try:
        data = message.FromString(value.metadata.plugin_data.content)
    except DecodeError:
        return {}
    hparams = data.session_start_info.hparams
    return {
        printable(name).replace("/", "."): getattr(
            hparams[name], hparams[name].WhichOneof("kind") or "", None
        )
        for name in hparams
    }


# --- records ---


def _records(content: bytes) -> tuple[list[tuple[int, int]], int]:
    """Where the whole and undamaged events lie, and where the last of them ends."""
    spans, position = [], 0
    while position + HEADER <= len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        start = position + HEADER
        position = start + length + FOOTER
        if position > len(content):
            break
        spans.append((start, start + length))
    first_bad = _first_damaged(content, spans)
    spans = spans[:first_bad]
    return spans, spans[-1][1] + FOOTER if spans else 0


def _first_damaged(content: bytes, spans: Sequence[tuple[int, int]]) -> int:
    """The index of the first event whose checksums do not hold; their number where all do."""
    lengths = [(start - HEADER, start - FOOTER) for start, _ in spans]
    payloads = [(start, stop) for start, stop in spans if stop - start <= LARGEST_CHECKED]
    damaged = {start + HEADER for start in _damaged(content, lengths)} | _damaged(content, payloads)
    return next((index for index, (start, _) in enumerate(spans) if start in damaged), len(spans))


def _damaged(content: bytes, spans: Iterable[tuple[int, int]]) -> set[int]:
    """The starts of those spans of bytes that the 4 bytes behind them are not the masked CRC-32C of.

    Spans of one length are checked together, a byte of all of them at a time.
    """
    by_length: dict[int, list[int]] = {}
    for start, stop in spans:
        by_length.setdefault(stop - start, []).append(start)
    everything = np.frombuffer(content, np.uint8)
    damaged: set[int] = set()
    for length, begins in by_length.items():
        starts = np.array(begins)
        stored = everything[(starts + length)[:, None] + np.arange(FOOTER)].astype(np.uint32)
        expected = (stored << np.array([0, 8, 16, 24], np.uint32)).sum(axis=1, dtype=np.uint32)
        crc = np.full(len(starts), 0xFFFFFFFF, np.uint32)
        for offset in range(length):
            crc = CRC_TABLE[(crc ^ everything[starts + offset]) & 0xFF] ^ (crc >> np.uint32(8))
        crc = ~crc
        masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
        damaged |= set(starts[masked != expected].tolist())
    return damaged


def _crc_holds(data: bytes, crc: bytes) -> bool:
    return not _damaged(data + crc, [(0, len(data))])


def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(POLYNOMIAL), table >> np.uint32(1))
    return table


CRC_TABLE = _crc_table()
