"""Readers of logs: abrun's own formats, and those that packages add by an entry point of `abrun.readers`.

A format claims a folder that holds nothing but its runs, or files, and says which files are one run.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from abrun.errors import AbrunError, StoreError
from abrun.logs.console import read_console
from abrun.logs.exports import read_csv, read_json, read_parquet
from abrun.logs.foreign.files import Folder, find_companion, open_file, read_companion
from abrun.logs.foreign.values import Points, as_mapping, parse_json
from abrun.logs.golden_values import SERIES
from abrun.logs.lm_eval import SAMPLES_FILE, TOTALS_FILE, read_samples, read_totals
from abrun.logs.log import Log, LogStatus, collect_points
from abrun.logs.monitor import read_monitor
from abrun.logs.naming import SUFFIXES, strip_suffix
from abrun.logs.stored import is_run_dir, read_run_dir
from abrun.logs.tables import read_results, read_trainer_state
from abrun.logs.tensorboard import EVENT_FILE_PREFIX, read_event_files, start_key
from abrun.logs.wandb_files import read_wandb_files
from abrun.recipe.implementations import READERS, installed, load_installed
from abrun.runs.redaction import printable

TRAINER_STATE = "trainer_state.json"
CHECKPOINT = r"checkpoint-(\d+)"
JSON_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
JSON_LINES = re.compile(rb'(\xef\xbb\xbf)?\s*\{[^\n]*\}\s*\n\s*\{\s*"')  # detectron2, mmengine, RLlib
MAX_RESULT_BYTES = 1 << 20
# Names of files with completions, prompts and evaluations, which trainers write next to their logs.
DUMP_FILE = re.compile(
    r"(completions|generated_predictions|predict|traces|eval_results|table)(_\d+)?|(train|val)_data_step\d+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Location of a run that has not been read yet."""

    format: "Format"
    name: str
    path: Path  # its folder, or its file for a table
    files: tuple[Path, ...]


Places = Iterator[tuple[Path, Sequence[Path]]]  # path and files of runs


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
    recorded: dict[str, Points] = defaultdict(Points)
    for metric, points in metrics.items():
        for step, value in points:
            recorded[metric].add(step, value)
    series, notes = collect_points(recorded)
    place = printable(str(path))
    return Log(name=name, place=place, metrics=series, config=config, status=status, notes=tuple(notes))


# --- abrun's own formats ---


class Format:
    """A format of logs. It claims paths like a Reader, but a run of it may be several files."""

    name: str
    file_name: re.Pattern[str]  # of its files
    is_one_run = False  # a folder's files are one run
    is_named_by_folder = False  # a run in a file has the name of its folder
    is_table = False  # a file that cannot be read may be none of the runs
    is_fallback = False  # read only if no other format has runs
    is_incidental = False  # files of its suffixes lie beside any logs: not mentioned if others are read
    is_installed = False  # added by an entry point: files that another format claims are not offered to it

    def claims(self, path: Path, names: Collection[str] = ()) -> bool:
        """Return True for a file of this format, or for a folder in which no other format has runs.

        `names`: of the folder's entries; empty for a file.
        """
        return not names and self.file_name.fullmatch(path.name) is not None

    def take(self, folder: Folder) -> Places:
        """Yield path and files of each run in a folder that the format claimed."""
        yield folder.path, ()

    def find(self, folder: Folder, files: Sequence[Path]) -> Places:
        """Yield path and files of each run in any other folder; `files`: those that the format claimed."""
        if self.is_one_run:
            yield from [(folder.path, files)] if files else []
        else:
            yield from ((file, (file,)) for file in files)

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        """Return the runs in these files; `one_run`: a table is one run, whatever its columns name."""
        raise NotImplementedError


class AbrunRuns(Format):
    name = "abrun"

    def claims(self, path: Path, names: Collection[str] = ()) -> bool:
        return bool(names) and is_run_dir(path)

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return [read_run_dir(run.path, run.name)]


class TensorBoard(Format):
    name, is_one_run = "tensorboard", True
    file_name = re.compile(rf".*{re.escape(EVENT_FILE_PREFIX)}.*", re.DOTALL)

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return [read_event_files(sorted(run.files, key=start_key), run.name, run.path)]


class Wandb(Format):
    """Local files of wandb. Folders below one with such a file hold copies of the run's files."""

    name, file_name = "wandb", re.compile(r".+\.wandb", re.IGNORECASE | re.DOTALL)

    def claims(self, path: Path, names: Collection[str] = ()) -> bool:
        return any(map(self.file_name.fullmatch, names or (path.name,)))

    def take(self, folder: Folder) -> Places:
        yield from ((folder.path, (file,)) for file in folder.files if self.claims(file))

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return [read_wandb_files(run.files, run.name, step_column)]


class LmEval(Format):
    """Samples of a model, and without these its totals."""

    name, is_one_run = "lm-eval", True
    file_name = re.compile(f"{SAMPLES_FILE.pattern}|{TOTALS_FILE.pattern.replace('?P<time>', '')}")

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        samples = [file for file in run.files if SAMPLES_FILE.fullmatch(file.name)]
        return [read_samples(samples, run.name) if samples else read_totals(run.files, run.name)]


class TrainerState(Format):
    """The state of transformers' Trainer: of a run, or of the last checkpoint in its folder."""

    name, is_fallback, is_named_by_folder = "trainer_state", True, True
    file_name = re.compile(re.escape(TRAINER_STATE))

    def find(self, folder: Folder, files: Sequence[Path]) -> Places:
        if folder.depth and re.fullmatch(CHECKPOINT, folder.path.name):
            return  # found from the run's folder
        numbered = [(re.fullmatch(CHECKPOINT, subfolder.name), subfolder) for subfolder in folder.folders]
        checkpoints = sorted(
            ((int(match[1]), subfolder) for match, subfolder in numbered if match), reverse=True
        )
        states = (*files, *(find_companion(subfolder, TRAINER_STATE) for _, subfolder in checkpoints))
        yield from [(state, (state,)) for state in states if state][:1]

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return [replace(read_trainer_state(run.path, step_column), name=run.name)]


class TrainerResults(Format):
    """Metrics that transformers' Trainer saves beside a model, or beside a checkpoint that was evaluated."""

    name, is_one_run, is_fallback, is_incidental = "trainer_results", True, True, True
    file_name = re.compile(r"(all|train|eval|test|predict)_results\.json")

    def find(self, folder: Folder, files: Sequence[Path]) -> Places:
        flat = []
        for file in files:
            content = read_companion(folder.path, file.name, notes=[], max_bytes=MAX_RESULT_BYTES)
            values = as_mapping(parse_json(content or b"")).values()
            flat += [file] * any(isinstance(value, float) for value in values)
        yield from super().find(folder, flat)

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return [read_results(run.files, run.name)]


class Monitor(Format):
    """Episodes that Stable-Baselines3 records: a file for each worker, or for a run."""

    name, is_fallback = "monitor", True
    file_name = re.compile(r"(.+\.)?monitor\.csv", re.DOTALL)

    def find(self, folder: Folder, files: Sequence[Path]) -> Places:
        workers = [file for file in files if file.name.partition(".")[0].isdecimal()]
        yield from [(folder.path, workers)] if workers else []
        yield from ((file, (file,)) for file in files if file not in workers)

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return [read_monitor(run.files, run.name, run.path)]


class TableFormat(Format):
    """Files with rows of metrics, by their suffix, without the completions and evaluations beside them."""

    is_table = True

    def __init__(self, name: str, read_file: Callable[..., list[Log]], *, is_fallback: bool = False) -> None:
        self.name, self.read_file, self.is_fallback = name, read_file, is_fallback
        self.is_incidental = name == "console"
        suffixes = "|".join(re.escape(suffix) for suffix, form in SUFFIXES.items() if form == name)
        packed = "" if name == "parquet" else r"(\.gz)?"
        self.file_name = re.compile(rf".+({suffixes}){packed}", re.IGNORECASE | re.DOTALL)

    def find(self, folder: Folder, files: Sequence[Path]) -> Places:
        for file in files:
            is_dump = DUMP_FILE.fullmatch(strip_suffix(file.name))
            if not is_dump and (self.name != "json" or _holds_json_rows(file)):
                yield file, (file,)

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        return self.read_file(run.path, run.name, step_column, one_run=one_run)


def _holds_json_rows(path: Path) -> bool:
    try:
        with open_file(path) as file:
            start = file.read(1 << 16)
    except StoreError:
        return False
    return start.startswith(b"\x1f\x8b") or any(kind.match(start) for kind in (JSON_LIST, JSON_LINES, SERIES))


# --- installed readers ---


class InstalledReader(Format):
    """The reader of an entry point. Its errors name it."""

    is_installed = True

    def __init__(self, name: str, reader: Reader) -> None:
        self.name, self.reader = name, reader

    def claims(self, path: Path, names: Collection[str] = ()) -> bool:
        with self._named(path):
            return bool(self.reader.claims(path, names))

    def read(self, run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
        with self._named(run.path):
            logs = list(self.reader.read(run.path, run.name, step_column))
            if not all(isinstance(log, Log) for log in logs):
                raise TypeError("read returned something other than runs")
        return logs

    @contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (AbrunError, MemoryError, RecursionError):
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            problem = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"{printable(str(path))}: the reader {self.name} failed: {printable(problem)}"
            ) from error


@cache
def load_readers() -> tuple[tuple[InstalledReader, ...], list[str]]:
    """Return the installed readers, and the problems of those that cannot be loaded."""
    readers, problems = list[InstalledReader](), list[str]()
    for name, entry in installed(READERS).items():
        if name == "tb" or any(name == own.name for own in (*LOGS, *OTHERS)):
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
            readers.append(InstalledReader(name, reader))
        else:
            problems.append(f"{READERS}: {name}: {entry.value} is no object with functions claims and read")
    return tuple(readers), problems


# By preference among formats with equally many runs; installed readers stand between them
LOGS: tuple[Format, ...] = (AbrunRuns(), TensorBoard(), Wandb())
OTHERS: tuple[Format, ...] = (
    TableFormat("jsonl", read_json),
    TableFormat("csv", read_csv),
    TableFormat("parquet", read_parquet),
    LmEval(),
    TrainerState(),
    Monitor(),
    TrainerResults(),
    TableFormat("json", read_json, is_fallback=True),
    TableFormat("console", read_console, is_fallback=True),
)


def all_formats() -> tuple[Format, ...]:
    """Return every format by preference. The fallbacks are the last."""
    readers, _ = load_readers()
    return (*LOGS, *readers, *OTHERS)


def find_file_format(path: Path, *, own: bool = False) -> Format | None:
    """Return the format of a file: formats with names of their own come before tables, installed ones last.

    `own`: only one of abrun's own.
    """
    formats = (form for form in _by_claim() if not (own and form.is_installed))
    return next((form for form in formats if form.claims(path)), None)


@cache
def _by_claim() -> tuple[Format, ...]:
    return tuple(sorted(all_formats(), key=lambda form: (form.is_installed, form.is_table)))


def find_folder_format(path: Path, names: Collection[str]) -> Format | None:
    """Return the format that claims a whole folder with entries of these names."""
    readers, _ = load_readers()
    by_claim = (LOGS[0], *readers, *LOGS[1:])
    return next((form for form in by_claim if names and form.claims(path, names)), None)
