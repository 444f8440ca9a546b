"""Starts of runs: the dates and clock times in their names, and jobs that were started more than once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from abrun.logs.log import Log, printable
from abrun.reasons import Code
from abrun.stats.series import EMPTY_SERIES, Series, Steps, build_series

# A folder that is named by its start alone: a restarted run has several, side by side.
START = re.compile(
    r"version_\d+|v\d+-\d{8}-\d{6}|exp_\d+|\d{8}[-_T]?\d{4,6}|\d{4}-\d\d-\d\d.*|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.*"
)
_YEAR, _MONTH, _DAY = r"(?:19|20)\d\d", r"(?:0[1-9]|1[0-2])", r"(?:0[1-9]|[12]\d|3[01])"
_CLOCK = r"(?:[01]\d|2[0-3])[-:._h]?[0-5]\d(?:[-:._m]?[0-5]\d(?:\.\d+|s)?)?"
_NAMED_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
# A date or a clock time, with the host behind it where TensorBoard's writers put one; a number that a
# name calls a seed is none.
MOMENT = re.compile(
    r"(?<![A-Za-z0-9.])(?<!seed[-_=])(?:"
    rf"{_NAMED_MONTH}{_DAY}_{_CLOCK}(?:_[^/]*)?"
    rf"|{_YEAR}([-_.]?){_MONTH}\1{_DAY}(?:[-_T ]*{_CLOCK})?Z?"
    rf"|{_NAMED_MONTH}[-_ ]?{_DAY}(?:[-_, ]+{_YEAR})?|{_DAY}[-_ ]?{_NAMED_MONTH}(?:[-_ ]?{_YEAR})?"
    r"|(?:[01]\d|2[0-3])([-:_])[0-5]\d\2[0-5]\d"
    r"|1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?"
    r")(?![A-Za-z0-9])"
)


def without_moments(name: str) -> str:
    """Return a name without dates and clock times, which tell no arm and no seed from another."""
    if not MOMENT.search(name):
        return name
    parts = [re.sub(r"[-_.@ ]{2,}", "-", MOMENT.sub("", part)).strip("-_@ ") for part in name.split("/")]
    return "/".join(part for part in parts if part)


def continued(logs: Sequence[Log], run: str) -> Log | None:
    """Return one log of starts whose steps go on; None where they may be different runs.

    Each begins and ends behind the one before; where steps overlap, the later start counts.
    """
    if len({repr(_identity(log)) for log in logs}) > 1:
        return None
    for spans in _spans(logs):
        order = sorted(range(len(logs)), key=spans.__getitem__)
        if _go_on([spans[index] for index in order]):
            return _joined([logs[index] for index in order], run, sorted(spans))
    return None


def join_starts(logs: Sequence[Log], run: str) -> Log | None:
    """Return one log of a job that was started several times; None where they may be different runs.

    As `continued`; or else without the starts that did not finish and that another one repeats.
    """
    log = continued(logs, run)
    if log is not None or len({repr(_identity(one)) for one in logs}) > 1:
        return log
    spans = next(_spans(logs), [])
    counted = [log for index, log in enumerate(logs) if spans and not _superseded(index, spans, logs)]
    log = continued(counted, run) if 0 < len(counted) < len(logs) else None
    if log is None:
        return None
    left_out = [
        Code.START_LEFT_OUT(
            place=printable(one.place),
            run=printable(run),
            first=first,
            last=last,
            repeated_by=printable(log.place),
        )
        for one, (first, last) in zip(logs, spans, strict=True)
        if one not in counted
    ]
    return replace(log, left_out=(*log.left_out, *left_out))


def _joined(ordered: Sequence[Log], run: str, spans: Sequence[tuple[int, int]]) -> Log:
    last = ordered[-1]
    if len(ordered) == 1:
        return last
    points: dict[str, list[Series]] = {}
    for log in ordered:
        for metric, series in log.metrics.items():
            points.setdefault(metric, []).append(series)
    metrics = {metric: _concatenated(series) for metric, series in points.items()}
    steps = ", ".join(f"{first}-{end}" for first, end in spans)
    guess = f"{printable(run)}: {len(ordered)} starts of one run, whose steps go on ({steps})"
    unread = {name: where for log in reversed(ordered) for name, where in log.unread.items()}
    guesses = dict.fromkeys([*(guess for log in ordered for guess in log.guesses), guess])
    left_out = tuple(line for log in ordered for line in log.left_out)
    dropped: dict[str, tuple[int, ...]] = {}
    for log in ordered:  # what a later start repeats as a number, counts
        kept = {metric: np.setdiff1d(steps, _steps(log, metric)) for metric, steps in dropped.items()}
        dropped = {metric: (*map(int, steps),) for metric, steps in kept.items() if len(steps)}
        for metric, steps in log.dropped.items():
            dropped[metric] = tuple(sorted({*dropped.get(metric, ()), *steps}))
    joined = replace(last, metrics=metrics, guesses=tuple(guesses), left_out=left_out)
    return replace(joined, unread=unread, dropped=dropped)


def _steps(log: Log, metric: str) -> Steps:
    return log.metrics[metric].steps if metric in log.metrics else EMPTY_SERIES.steps


def _concatenated(series: Sequence[Series]) -> Series:
    steps = np.concatenate([one.steps for one in series])
    merged, _ = build_series(steps, np.concatenate([one.values for one in series]))
    return replace(merged, recounted=max(merged.recounted, *(one.recounted for one in series)))


def _spans(logs: Sequence[Log]) -> Iterator[list[tuple[int, int]]]:
    """Yield the first and last step of every log on each metric that all of them have, the longest first.

    Some metrics begin at step 0 in every start, so one alone does not tell.
    """
    shared = [metric for metric in logs[0].metrics if all(len(log.metrics.get(metric, ())) for log in logs)]
    for metric in sorted(shared, key=lambda metric: -sum(len(log.metrics[metric]) for log in logs)):
        steps = [log.metrics[metric].steps for log in logs]
        yield [(int(one[0]), int(one[-1])) for one in steps]


def _go_on(spans: Sequence[tuple[int, int]]) -> bool:
    return all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(spans))


def _superseded(index: int, spans: Sequence[tuple[int, int]], logs: Sequence[Log]) -> bool:
    """Return True for an unfinished start, all of whose steps another one holds."""
    first, last = spans[index]
    return logs[index].status != "finished" and any(
        other[0] <= first and last <= other[1] and (other != (first, last) or log.status == "finished")
        for other, log in zip(spans, logs, strict=True)
    )


def _identity(log: Log) -> object:
    """Return what starts of one run have in common."""
    config: Mapping[str, Any] = log.config or {}
    settings = {
        key: without_moments(value) if isinstance(value, str) else value
        for key, value in config.items()
        if "resume" not in key
    }
    folder, _, last = log.name.rpartition("/")
    name = folder if folder and START.fullmatch(last) else log.name
    versions = (log.environment or {}).get("versions")
    return without_moments(name), log.group, log.job_type, settings, versions
