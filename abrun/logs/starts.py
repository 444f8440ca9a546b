"""Starts of runs: dates and times in their names, and merging of jobs that were started more than once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from abrun.logs.log import Log, unite_logs
from abrun.messages.codes import Code
from abrun.runs.redaction import printable
from abrun.stats.series import EMPTY_SERIES, Series, build_series

# A folder named only by its start or a checkpoint: a restarted run has several, side by side.
START_FOLDER = re.compile(
    r"(?:version|attempt|restart|retry|checkpoint|ckpt|step|epoch|iter)[-_]?\d+|v\d+-\d{8}-\d{6}|exp_\d+"
    r"|\d{8}[-_T]?\d{4,6}|\d{4}-\d\d-\d\d.*|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.*"
)
_RESUMED = re.compile(r"[-_](resumed?|continued?|restart(ed)?)([-_]?\d+)?(?=/|\.\w+$|$)", re.IGNORECASE)
_YEAR, _MONTH, _DAY = r"(?:19|20)\d\d", r"(?:0[1-9]|1[0-2])", r"(?:0[1-9]|[12]\d|3[01])"
_CLOCK = r"(?:[01]\d|2[0-3])[-:._h]?[0-5]\d(?:[-:._m]?[0-5]\d(?:\.\d+|s)?)?"
_NAMED_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
# A date or a clock time, with the host name that TensorBoard's writers append, or an id. A number after
# "seed" is not a time.
MOMENT = re.compile(
    r"(?<![A-Za-z0-9.])(?<!seed[-_=])(?:"
    rf"{_NAMED_MONTH}{_DAY}_{_CLOCK}(?:_[^/]*)?"
    rf"|{_YEAR}([-_.]?){_MONTH}\1{_DAY}(?:[-_T ]*{_CLOCK})?Z?"
    rf"|{_NAMED_MONTH}[-_ ]?{_DAY}(?:[-_, ]+{_YEAR})?|{_DAY}[-_ ]?{_NAMED_MONTH}(?:[-_ ]?{_YEAR})?"
    rf"|{_MONTH}{_DAY}T{_CLOCK}"
    r"|(?:[01]\d|2[0-3])([-:_])[0-5]\d\2[0-5]\d"
    r"|1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?"
    r"|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
    r"|[0-9a-f]{5,8}_\d{5}_\d+"  # Ray Tune's trial: `abc12_00003_3`
    r")(?![A-Za-z0-9])"
)


def run_of_start(name: str) -> str:
    """Return a name without `-resume`, and without a last folder that its start named."""
    *parents, last = _RESUMED.sub("", name).split("/")
    if START_FOLDER.fullmatch(last):
        return "/".join(parents)
    return "/".join([*(parents[:-1] if parents and START_FOLDER.fullmatch(parents[-1]) else parents), last])


def without_times(name: str) -> str:
    """Return a name without dates, clock times and UUIDs, which identify neither arm nor seed."""
    if not MOMENT.search(name):
        return name
    moment = rf"[-_.@ ]*{MOMENT.pattern}[-_.@ ]*"
    cleaned_parts = [re.sub(moment, "-", text).strip("-_@ ") for text in name.split("/")]
    return "/".join(text for text in cleaned_parts if text)


def merge_continued_starts(logs: Sequence[Log], run: str) -> Log | None:
    """Merge starts whose steps continue each other; return None if they may be different runs.

    Each start has to begin and end after the one before; where steps overlap, the later start counts.
    """
    if len({repr(_run_identity(log)) for log in logs}) > 1:
        return None
    for spans in _step_spans(logs):
        order = sorted(range(len(logs)), key=spans.__getitem__)
        pairs = pairwise(spans[index] for index in order)
        if all(start < next_start and end < next_end for (start, end), (next_start, next_end) in pairs):
            return _merge_logs([logs[index] for index in order], run, sorted(spans))
    return None


def merge_starts(logs: Sequence[Log], run: str) -> Log | None:
    """Merge the starts of one job; return None if they may be different runs.

    Starts are merged as in `merge_continued_starts`, if necessary without unfinished starts whose steps
    another start repeats.
    """
    log = merge_continued_starts(logs, run)
    if log is not None or len({repr(_run_identity(start)) for start in logs}) > 1:
        return log
    spans = next(_step_spans(logs), [])
    counted_starts = [
        log for index, log in enumerate(logs) if spans and not _is_superseded(index, spans, logs)
    ]
    log = merge_continued_starts(counted_starts, run) if 0 < len(counted_starts) < len(logs) else None
    if log is None:
        return None
    excluded = [
        Code.START_LEFT_OUT(
            place=printable(start.place),
            run=printable(run),
            first=first_step,
            last=last_step,
            repeated_by=printable(log.place),
        )
        for start, (first_step, last_step) in zip(logs, spans, strict=True)
        if start not in counted_starts
    ]
    return replace(log, left_out=(*log.left_out, *excluded))


def _merge_logs(ordered: Sequence[Log], run: str, spans: Sequence[tuple[int, int]]) -> Log:
    last_log = ordered[-1]
    if len(ordered) == 1:
        return last_log
    points: dict[str, list[Series]] = {}
    for log in ordered:
        for metric, series in log.metrics.items():
            points.setdefault(metric, []).append(series)
    metrics: dict[str, Series] = {}
    for metric, series in points.items():
        steps, values = (
            np.concatenate([getattr(start, name) for start in series]) for name in ("steps", "values")
        )
        recounted = max(start.recounted for start in series)
        built, _ = build_series(steps, values)
        metrics[metric] = replace(built, recounted=max(built.recounted, recounted))
    steps_text = ", ".join(f"{first_step}-{last_step}" for first_step, last_step in spans)
    guess = f"{printable(run)}: {len(ordered)} starts of one run with continuing steps ({steps_text})"
    dropped: dict[str, tuple[int, ...]] = {}
    for log in ordered:  # a number in a later start replaces a text
        remaining = {
            metric: np.setdiff1d(steps, log.metrics.get(metric, EMPTY_SERIES).steps)
            for metric, steps in dropped.items()
        }
        dropped = {metric: (*map(int, steps),) for metric, steps in remaining.items() if len(steps)}
        for metric, steps in log.dropped.items():
            dropped[metric] = tuple(sorted({*dropped.get(metric, ()), *steps}))
    united = unite_logs(ordered)
    merged = replace(last_log, metrics=metrics, dropped=dropped, unread=united.unread)
    return replace(merged, guesses=(*united.guesses, guess), left_out=united.left_out)


def _step_spans(logs: Sequence[Log]) -> Iterator[list[tuple[int, int]]]:
    """Yield the first and last step of every log, for each metric that all of them have, longest first.

    Some metrics begin at step 0 in every start, so one metric is not enough.
    """
    shared = [metric for metric in logs[0].metrics if all(len(log.metrics.get(metric, ())) for log in logs)]
    for metric in sorted(shared, key=lambda metric: -sum(len(log.metrics[metric]) for log in logs)):
        steps = [log.metrics[metric].steps for log in logs]
        yield [(int(log_steps[0]), int(log_steps[-1])) for log_steps in steps]


def _is_superseded(index: int, spans: Sequence[tuple[int, int]], logs: Sequence[Log]) -> bool:
    """Return True for an unfinished start whose steps are all in another start."""
    first_step, last_step = spans[index]
    return logs[index].status != "finished" and any(
        other_span[0] <= first_step
        and last_step <= other_span[1]
        and (other_span != (first_step, last_step) or log.status == "finished")
        for other_span, log in zip(spans, logs, strict=True)
    )


def _run_identity(log: Log) -> object:
    config: Mapping[str, Any] = log.config or {}
    settings = {
        key: without_times(value) if isinstance(value, str) else value
        for key, value in config.items()
        if "resume" not in key
    }
    versions = (log.environment or {}).get("versions")
    return without_times(run_of_start(log.name)), log.group, log.job_type, settings, versions
