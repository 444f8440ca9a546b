"""Readers of experiment trackers, which other packages add by an entry point of the group `abrun.readers`."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from abrun.errors import AbrunError, StoreError
from abrun.logs.foreign.values import Points
from abrun.logs.log import Log, LogStatus, replaced_notes
from abrun.recipe.implementations import READERS, installed, load_installed
from abrun.runs.redaction import printable
from abrun.stats.series import build_series, split_series

OWN_FORMATS = (
    "abrun",
    "tb",
    "tensorboard",
    "wandb",
    "csv",
    "jsonl",
    "json",
    "parquet",
    "trainer_state",
    "lm-eval",
)


class Reader(Protocol):
    """Reader of one tracker's runs. An entry point names an object with these functions, such as a module.

    Its name is a prefix of sources: `abrun compare NAME:PATH`.
    """

    def claims(self, path: Path, names: Collection[str]) -> bool:
        """Return True for a file of this tracker, or for a folder that is one run of it.

        `names`: of the folder's entries; empty for a file. Called for many paths, most of them of others.
        """
        ...

    def read(self, path: Path, name: str, step_column: str | None) -> list[Log]:
        """Return the runs in a file or folder that `claims` accepted; a run's name may be PROJECT/RUN.

        `name`: of the path in its source. `step_column`: the user's --step-column. Raises StoreError, with
        the path in front.
        """
        ...


def make_log(
    path: Path,
    name: str,
    metrics: Mapping[str, Iterable[tuple[int, float]]],
    *,
    config: Mapping[str, Any] | None = None,
    status: LogStatus = "unknown",
) -> Log:
    """Return a run from its metrics as (step, value) in the order in which they were written.

    Of two values at one step the later counts. `config`: settings by dotted key.
    """
    built = {}
    for metric, points in metrics.items():
        recorded = Points()
        for step, value in points:
            recorded.add(step, value)
        built[metric] = build_series(recorded.steps, recorded.values)
    series, replaced = split_series(built)
    notes = tuple(replaced_notes(replaced))
    place = printable(str(path))
    return Log(name=name, place=place, metrics=series, config=config, status=status, notes=notes)


@cache
def _load_readers() -> tuple[Mapping[str, Reader], list[str]]:
    """Return the installed readers by name, and the problems of those that cannot be loaded."""
    readers, problems = dict[str, Reader](), list[str]()
    for name, entry in installed(READERS).items():
        if name in OWN_FORMATS:
            problems.append(
                f"{READERS}: {name}: is a format of abrun's own; {entry.value} needs another name"
            )
            continue
        try:
            reader = load_installed(entry)
        except AbrunError as error:
            problems.append(str(error))
            continue
        functions = (getattr(reader, name, None) for name in ("claims", "read"))
        if all(map(callable, functions)) and not isinstance(reader, type):
            readers[name] = reader
        else:
            problems.append(f"{READERS}: {name}: {entry.value} is no object with functions claims and read")
    return readers, problems


def all_readers() -> Mapping[str, Reader]:
    """Return the installed readers by name, without those that cannot be loaded."""
    return _load_readers()[0]


def reader_problems() -> list[str]:
    """Return a line for each installed reader that cannot be loaded."""
    return _load_readers()[1]


def find_reader(path: Path, names: Collection[str] = ()) -> str | None:
    """Return the name of the reader of a file or folder; None for any other path. Raises StoreError."""
    for name, reader in all_readers().items():
        with _named(name, path):
            if reader.claims(path, names):
                return name
    return None


def read_with(name: str, path: Path, run_name: str, step_column: str | None) -> list[Log]:
    """Return the runs that a reader finds in a file or folder. Raises StoreError."""
    with _named(name, path):
        logs = list(all_readers()[name].read(path, run_name, step_column))
        if not all(isinstance(log, Log) for log in logs):
            raise TypeError("read returned something other than runs")
    return logs


@contextmanager
def _named(reader: str, path: Path) -> Iterator[None]:
    """Turn an error of another package's code into one that names it."""
    try:
        yield
    except (AbrunError, MemoryError, RecursionError):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StoreError(
            f"{printable(str(path))}: the reader {reader} failed: {printable(problem)}"
        ) from error
