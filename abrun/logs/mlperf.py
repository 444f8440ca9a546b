"""Reader for MLPerf logs (MLLOG): lines `:::MLLOG {...}` among other output, one file per run.

Each line is an event with key, value, time and metadata (mlcommons/logging, mlperf_logging/mllog). Metadata
place a value on an axis: `samples_count`, `step_num` or `epoch_num`. Benchmarks differ in the one they use.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from abrun.errors import StoreError
from abrun.logs.log import NOTHING_RECORDED, Log, printable, replaced_notes, wrap_read_errors
from abrun.logs.rows import STEP_LIMIT, parse_json
from abrun.metric_names import ELAPSED_TIME, SAMPLES_SEEN
from abrun.regular_files import iter_lines, open_regular
from abrun.stats.series import series_from_rows

TOKEN = b":::MLLOG "
SUFFIXES = (".txt", ".log", ".out")  # of files that are searched for events
SNIFFED_BYTES = 1 << 20  # from the start of a file; containers print banners before the first event
EVALUATIONS = ("eval_accuracy", "eval_error")
AXES = ("samples_count", "step_num", "epoch_num")  # the first that all evaluations have is the step
INTERVALS = ("_start", "_stop")  # events that mark an interval; their values repeat the axis
FRACTION = 1000  # a step is a thousandth of an epoch if epochs are fractions
# Of the submission, not of the run
NOT_CONFIGURED = {
    "cache_clear",
    *(f"submission_{name}" for name in ("org", "platform", "division", "status")),
}
ENDED = ("success", "aborted")  # statuses of a run that ended by itself; aborted: the target was not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of an MLPerf log."""

    key: str
    value: Any
    line: int
    time_ms: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value of an event is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_mlperf_log(path: Path) -> bool:
    """Return whether a text file has an MLLOG event near its start."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    try:
        with open_regular(path) as file:
            return TOKEN in file.read(SNIFFED_BYTES)
    except OSError:
        return False


def read_events(path: Path) -> tuple[list[Event], int]:
    """Return the events of a file in their order, and the number of lines whose JSON is damaged."""
    events, num_damaged = [], 0
    with wrap_read_errors(path), open_regular(path) as file:
        for number, line in enumerate(iter_lines(file), 1):
            _, token, text = line.rpartition(TOKEN)  # a rank's prefix may precede it
            if not token:
                continue
            content = parse_json(text.strip())
            if not isinstance(content, dict) or not isinstance(content.get("key"), str):
                num_damaged += 1
                continue
            metadata, time_ms = content.get("metadata"), content.get("time_ms")
            events.append(
                Event(
                    key=content["key"],
                    value=content.get("value"),
                    line=number,
                    time_ms=time_ms if is_number(time_ms) else None,
                    metadata=metadata if isinstance(metadata, dict) else {},
                )
            )
    return events, num_damaged


def read_mlperf_log(path: Path, name: str) -> Log:
    """Return the run in an MLPerf log.

    Metrics are `eval_accuracy` (or `eval_error`), every number that is logged on the same axis, and at each
    evaluation the samples and the seconds since `run_start`. Values before the run, such as the seed, are its
    configuration. A run that was aborted counts as finished: it ended without reaching its target.
    """
    events, num_damaged = read_events(path)
    place = printable(str(path))
    damaged = [f"{num_damaged} damaged MLLOG lines were left out"] if num_damaged else []
    if not events:
        return Log(name=name, place=place, metrics={}, notes=(NOTHING_RECORDED, *damaged))
    axis = _find_axis(events)
    factor = 1 if all(map(float.is_integer, _list_positions(events, axis))) else FRACTION
    metrics, replaced = series_from_rows(_list_rows(events, axis, factor, place))
    ends = [event.metadata.get("status") for event in events if event.key == "run_stop"]
    return Log(
        name=name,
        place=place,
        metrics=metrics,
        config=_read_config(events) or None,
        status="finished" if ends and ends[-1] in ENDED else "unknown",
        guesses=(f"an MLPerf log: a step is {'1' if factor == 1 else f'1/{factor}'} of its {axis}",),
        notes=(*damaged, *replaced_notes(replaced)),
    )


def _find_axis(events: Sequence[Event]) -> str:
    """Return the first axis on which all evaluations are placed; without any, the first that occurs."""
    evaluations = [event for event in events if event.key in EVALUATIONS]
    placed_on = [axis for axis in AXES if len(_list_positions(evaluations, axis)) == len(evaluations)]
    occurring = [axis for axis in placed_on if _list_positions(events, axis)]
    return (occurring or placed_on or AXES)[0]


def _list_positions(events: Sequence[Event], axis: str) -> list[float]:
    positions = (event.metadata.get(axis) for event in events)
    return [float(position) for position in positions if is_number(position)]


def _list_rows(
    events: Sequence[Event], axis: str, factor: int, place: str
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the step and the numbers of every event on the axis."""
    start_ms = next((event.time_ms for event in events if event.key == "run_start"), None)
    for event in events:
        position = event.metadata.get(axis)
        if not is_number(position) or event.key.endswith(INTERVALS):
            continue
        if not 0 <= position * factor < STEP_LIMIT:
            raise StoreError(
                f"{place}, line {event.line}: {axis}: got {position:g}; allowed: 0 to {STEP_LIMIT // factor}"
            )
        values = event.value if isinstance(event.value, dict) else {None: event.value}
        row = {
            event.key if key is None else f"{event.key}/{key}": float(value)
            for key, value in values.items()
            if is_number(value)
        }
        if event.key in EVALUATIONS and start_ms is not None and event.time_ms is not None:
            row[ELAPSED_TIME] = (event.time_ms - start_ms) / 1000
        if event.key in EVALUATIONS and is_number(samples := event.metadata.get("samples_count")):
            row[SAMPLES_SEEN] = float(samples)
        yield round(position * factor), row


def _read_config(events: Sequence[Event]) -> dict[str, Any]:
    """Return the values that were logged before the run started, without those of its machine."""
    start = next((index for index, event in enumerate(events) if event.key == "run_start"), len(events))
    return {
        event.key: event.value
        for event in events[:start]
        if isinstance(event.value, str | int | float) and event.key not in NOT_CONFIGURED
    }
