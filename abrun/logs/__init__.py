"""Runs of any framework, read from what it logs: TensorBoard, wandb, CSV, JSON lines, Parquet.

A source is a file, a folder that may hold many runs, or a project on a wandb server. What is read is a `Log`;
`naming` says which run of an experiment it is, `aliases` what its metrics are called here.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.exports import joined, read_csv, read_json
from abrun.logs.log import Log, cleaned, listed, printable, readable
from abrun.logs.naming import SUFFIXES, stem
from abrun.logs.starts import START, continued
from abrun.logs.stored import is_run_dir, read_run_dir
from abrun.logs.tables import read_parquet, read_trainer_state
from abrun.logs.tensorboard import EVENTS, begun, event_files, read_event_files
from abrun.logs.wandb_files import read_run_files
from abrun.regular_files import exists, is_directory, is_file, open_regular

__all__ = ["FORMATS", "Log", "read_log", "read_logs"]

FORMATS = ("tensorboard", "wandb", "csv", "jsonl", "parquet")
PREFIXES = {"tb": "tensorboard", "tensorboard": "tensorboard", **{name: name for name in FORMATS[1:]}}
TABLES = ("csv", "jsonl", "parquet", "json")
# Tables that nothing here reads, in case that the runs lie in them.
FOREIGN_FILE = re.compile(
    r".+\.(xlsx?|ods|numbers|db|sqlite3?|feather|arrow|h5|hdf5|zip|7z|tar|bz2|xz|zst|tgz|gz)"
    r"|.+\.(csv|tsv|jsonl|ndjson|parquet)[.~].*",  # rotated or copied, such as log.jsonl.1
    re.IGNORECASE,
)
TRAINER_STATE = "trainer_state.json"
# Of formats with as many runs each, the fullest first. The last two only where there is nothing else.
FULLEST = ("abrun", "tensorboard", "wandb", "jsonl", "csv", "parquet", "trainer_state", "json")
LAST_CHOICES = ("trainer_state", "json")
JSON_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
CHECKPOINT = r"checkpoint-(\d+)"
# Completions, prompts and evaluations that trainers keep beside their logs, by what they call them.
DUMP = re.compile(
    r"(completions|generated_predictions|predict|traces|eval_results|table)(_\d+)?|(train|val)_data_step\d+"
)
DUMP_FOLDERS = {"completions", "rollouts", "rollout_data", "streams", "generations"}
PARTS = {"actor", "preprocessor", "finetune"}  # PipelineRL's: three runs of wandb, which are one
PROJECT = r"[^/:]+/[^/]+(/[^/]+)?"
SPLITS = {"train", "validation", "valid", "val", "eval", "test"}  # of one run, each with its own log
HPARAMS_RUN = r"\d{9,}(\.\d+)?"  # the folder that torch's add_hparams makes inside a run's: the time
STARTED = re.compile(r"run-(\d{8}_\d{6})-")
RUN_ID = re.compile(r"run-(.+)\.wandb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run in a folder, not yet read."""

    format: str
    name: str
    path: Path  # its folder, or the file where it is a table
    files: tuple[Path, ...]


def read_logs(source: str, *, group: str | None = None, step_column: str | None = None) -> list[Log]:
    """Every run of a source, by name.

    `PATH`, `tb:PATH`, `wandb:PATH`, `csv:PATH`, `jsonl:PATH`, `parquet:PATH`, or `wandb:ENTITY/PROJECT[/RUN]`
    on a server; `group` keeps the runs of one of wandb's groups. Raises StoreError, one line, where nothing
    can be read.
    """
    prefix, colon, rest = source.partition(":")
    format = PREFIXES.get(prefix) if colon else None
    path = Path(rest if format else source)
    if format == "wandb" and not exists(path) and re.fullmatch(PROJECT, rest.strip("/")):
        from abrun.logs.wandb_api import read_project

        logs = read_project(rest, group, step_column)
    else:
        read, left_aside = _read_fullest(*_runs_in(path, format, source), source, step_column)
        logs = _in_one_piece(_without_hparams_runs(read))
        logs = [replace(log, guesses=(*log.guesses, *left_aside)) for log in logs]
    if group is not None:
        logs = _of_group(logs, group, source)
    return sorted((cleaned(log) for log in logs), key=lambda log: _natural(log.name))


def read_log(path: Path, format: str, step_column: str | None = None) -> Log:
    """The one run that a file, or everything in a folder, holds; empty while the path does not exist.

    It may still be written: a torn end is left out, with a note.
    """
    if format not in FORMATS:
        raise StoreError(f"format: got {format!r}; allowed: {', '.join(FORMATS)}")
    name = path.name
    found = [one for one in _walk(path, path) if one.format == format] if is_directory(path) else []
    files = [file for one in found for file in one.files] if is_directory(path) else [path]
    if not exists(path) or not files:
        what = "holds nothing of that format yet" if exists(path) else "does not exist yet"
        return Log(name=name, place=printable(str(path)), metrics={}, notes=(f"it {what}",))
    if format in ("csv", "jsonl", "parquet") and len(files) > 1:
        raise StoreError(
            f"{printable(str(path))}: got {len(files)} {format} files; one run is one file: name it"
        )
    if format == "tensorboard":
        files = sorted(files, key=begun)
    elif format == "wandb":
        files = sorted(files, key=_started)
    one = Found(format=format, name=name, path=path if len(files) > 1 else files[0], files=tuple(files))
    (log,) = _read(one, step_column, one_run=True)
    return cleaned(replace(log, name=name))


# --- which runs are there ---


def _runs_in(path: Path, format: str | None, source: str) -> tuple[dict[str, list[Found]], list[str]]:
    """The runs by format, the one to read first, and a sentence on files that nothing here reads."""
    with readable(path):
        there = exists(path)
    if not there:
        prefixes = ", ".join(f"{name}:" for name in ("tb", *FORMATS[1:]))
        raise StoreError(
            f"{printable(source)}: no such file or folder; allowed: a path, with one of {prefixes} before it "
            "or none, or wandb:ENTITY/PROJECT"
        )
    found = _without_links(list(_walk(path, path))) if is_directory(path) else [_file(path, format)]
    foreign = [one.name for one in found if one.format == "foreign"]
    formats = {format, "json"} if format == "jsonl" else {format}
    found = [one for one in found if one.format != "foreign" and (format is None or one.format in formats)]
    if not found:
        what = format or f"{', '.join(FORMATS)} or abrun's own"
        names = foreign or sorted(
            _name(file, path) for file in islice(path.rglob("*.*"), 100) if is_file(file)
        )
        holds = f"; it holds {listed(names, 3)}" if names else ""
        raise StoreError(f"{printable(source)}: no runs there; allowed: runs logged as {what}{holds}")
    by_format = {form: [one for one in found if one.format == form] for form in FULLEST}
    forms = sorted(
        (form for form in FULLEST if by_format[form]),
        key=lambda form: (form in LAST_CHOICES and FULLEST.index(form), -len(by_format[form])),
    )
    said = [f"of {printable(source)} not read: {listed(foreign, 3)}"] if foreign else []
    return {form: by_format[form] for form in forms}, said


def _file(path: Path, format: str | None) -> Found:
    kind = _kind(path)
    if (kind is None and format in ("csv", "jsonl", "parquet", "wandb")) or (kind, format) == (
        "json",
        "jsonl",
    ):
        kind = format  # an odd suffix, but the user says what it is
    if kind is None or (format is not None and kind != format):
        raise StoreError(
            f"{printable(str(path))}: not a file of {format or 'metrics'}; allowed: *.csv, *.tsv, *.jsonl, "
            f"*.ndjson, these as *.gz, *.json, *.parquet, *.wandb, {EVENTS}*, {TRAINER_STATE}"
        )
    return Found(format=kind, name=path.name, path=path, files=(path,))


def _kind(path: Path) -> str | None:
    if EVENTS in path.name:
        return "tensorboard"
    if path.name == TRAINER_STATE:
        return "trainer_state"
    name = path.name.lower()
    kind = SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind in ("parquet", "wandb") and name.endswith(".gz") else kind


def _is_json_list(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            start = file.read(64)
    except OSError:
        return False
    return start.startswith(b"\x1f\x8b") or JSON_LIST.match(start) is not None


def _walk(folder: Path, top: Path, seen: set[Path] | None = None) -> Iterator[Found]:
    """The runs in a folder and below it, each once, however its folder is linked to."""
    seen = set() if seen is None else seen
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    name = _name(folder, top) if folder != top else folder.resolve().name
    if is_run_dir(folder):
        yield Found(format="abrun", name=name, path=folder, files=())
        return
    with readable(folder):
        entries = sorted(folder.iterdir(), key=lambda entry: (entry.is_symlink(), entry.name))
        files = [entry for entry in entries if is_file(entry)]
        folders = [entry for entry in entries if is_directory(entry) and not entry.name.startswith(".")]
    kinds = {file: _kind(file) for file in files}
    if any(kind == "wandb" for kind in kinds.values()):
        for file in (file for file in files if kinds[file] == "wandb"):
            yield Found(format="wandb", name=name, path=folder, files=(file,))
        return  # what is below are its own copies
    if any(kind == "tensorboard" for kind in kinds.values()):
        yield Found(format="tensorboard", name=name, path=folder, files=tuple(event_files(folder)))
    state = _trainer_state(folder, folders)
    if state is not None and (folder == top or not re.fullmatch(CHECKPOINT, folder.name)):
        yield Found(format="trainer_state", name=name, path=state, files=(state,))
    folders = [below for below in folders if below.name not in DUMP_FOLDERS]
    for file in files:
        kind = kinds[file]
        if kind in TABLES and not DUMP.fullmatch(stem(file.name)) and (kind != "json" or _is_json_list(file)):
            yield Found(format=kind, name=_name(file, top), path=file, files=(file,))
        elif kind is None and FOREIGN_FILE.fullmatch(file.name):
            yield Found(format="foreign", name=_name(file, top), path=file, files=())
    yield from _joined([one for below in folders for one in _walk(below, top, seen)])


def _without_links(found: Sequence[Found]) -> list[Found]:
    """The runs without links to a file that is here as well, such as `latest.jsonl`."""
    files = {file for one in found for file in one.files if not file.is_symlink()}
    here = {file.resolve() for file in files}
    return [
        one for one in found if not one.files or any(f in files or f.resolve() not in here for f in one.files)
    ]


def _name(path: Path, top: Path) -> str:
    """A path below a source. A file unpacked from Windows may have the separators of there in its name."""
    return path.relative_to(top).as_posix().replace("\\", "/")


def _trainer_state(folder: Path, folders: Sequence[Path]) -> Path | None:
    """The one in the folder, or in the last of its checkpoints, whose log_history goes furthest."""
    numbered = [(re.fullmatch(CHECKPOINT, below.name), below) for below in folders]
    checkpoints = sorted((int(found[1]), below) for found, below in numbered if found)
    there = [folder, *(below for _, below in reversed(checkpoints))]
    return next((state for one in there if is_file(state := one / TRAINER_STATE)), None)


def _joined(found: Sequence[Found]) -> list[Found]:
    """A wandb run that was resumed offline has a folder for each start, side by side: one run."""
    joined: dict[Any, Found] = {}
    for one in found:
        run_id = RUN_ID.fullmatch(one.files[0].name) if one.format == "wandb" else None
        key = (one.path.parent, run_id[1]) if run_id else (one.path, one.format)
        files = (*joined[key].files, *one.files) if key in joined else one.files
        joined[key] = replace(one, files=tuple(sorted(files, key=_started)) if run_id else files)
    return list(joined.values())


# --- reading them ---


def _read_fullest(
    by_format: Mapping[str, Sequence[Found]], left_aside: list[str], source: str, step_column: str | None
) -> tuple[list[tuple[Found, Log]], list[str]]:
    """The runs of the first format that has any number, and sentences on what was left aside."""
    refused: StoreError | None = None
    without: list[tuple[Found, Log]] = []
    for form, found in by_format.items():
        try:
            read, aside = _read_all(found, step_column)
        except StoreError as error:
            if form not in TABLES:
                raise
            refused = refused or error
            continue
        if any(log.metrics for _, log in read):
            others = [other for other in FULLEST if other in by_format and other != form]
            said = f"of {printable(source)} the {form} logs; left aside: {', '.join(others)}"
            return read, [*([said] if others else []), *aside, *left_aside]
        without = without or read
    if refused:
        raise refused
    return without, left_aside


def _read_all(found: Sequence[Found], step_column: str | None) -> tuple[list[tuple[Found, Log]], list[str]]:
    """Every run, and sentences on tables that are none.

    A table that cannot be read is a run all the same where runs that can be read have files of the same name;
    else it is left aside, as is an empty one beside the only run of a folder. Raises StoreError where there
    is no run.
    """
    read: list[tuple[Found, Log]] = []
    refused: list[tuple[Found, StoreError]] = []
    for one in found:
        try:
            read += [(one, log) for log in _read(one, step_column)]
        except StoreError as error:
            if one.format not in TABLES:
                raise
            refused.append((one, error))
    runs = [(one, log) for one, log in read if log.metrics or one.format not in TABLES]
    if refused and not runs:
        raise refused[0][1]
    names = {_without_digits(one) for one, _ in runs}
    num_runs = Counter(one.path.parent for one, _ in runs)
    aside: dict[str, list[str]] = {}
    for one, log in read:
        if log.metrics or one.format not in TABLES or _without_digits(one) in names:
            continue
        if num_runs[one.path.parent] == 1:  # the folder is a run, and so is no other file in it
            read = [(other, its) for other, its in read if its is not log]
            aside.setdefault(_without_digits(one), []).append(f"{log.place}: {'; '.join(log.notes)}")
    for one, error in refused:
        if _without_digits(one) in names:
            place = printable(str(one.path))
            read.append(
                (one, Log(name=one.name, place=place, metrics={}, status="unreadable", failure=str(error)))
            )
        else:
            aside.setdefault(_without_digits(one), []).append(str(error))
    return read, [
        f"left aside: {of[0]}{f' (and {len(of) - 1} more of that name)' * (len(of) > 1)}"
        for of in aside.values()
    ]


def _without_digits(found: Found) -> str:
    return re.sub(r"\d+", "0", stem(found.path.name.replace("\\", "/")).rpartition("/")[2])


def _in_one_piece(logs: Sequence[Log]) -> list[Log]:
    """Runs that were logged in several files, or by several processes, or restarted, each as one."""
    named = {log.name: log.name.rpartition("/") for log in logs}
    parts = {name for name, (exp, _, part) in named.items() if exp and part in PARTS}
    whole = {named[name][0] for name in parts if name.endswith("/finetune")}
    logs = joined(
        [
            replace(log, name=named[log.name][0], part=True, run_id=None)
            if log.name in parts and named[log.name][0] in whole
            else log
            for log in logs
        ]
    )
    logs = _splits_joined(logs)
    starts: dict[str, list[Log]] = {}
    for log in logs:
        folder, _, last = log.name.rpartition("/")
        key = folder if folder and log.run_id is None and START.fullmatch(last) else f"/{len(starts)}"
        starts.setdefault(key, []).append(log)
    whole_runs: list[Log] = []
    for folder, of in starts.items():
        run = continued(of, str(Path(of[0].place).parent)) if len(of) > 1 else None
        whole_runs += [replace(run, name=folder)] if run else of
    return whole_runs


def _splits_joined(logs: Sequence[Log]) -> list[Log]:
    """A run's `train` and `validation` logs, side by side, as one run.

    A metric that both have is the training's; the other's goes by its folder or file before it.
    """
    parts = {log.name: (log.name.rpartition("/")[0], stem(log.name.rpartition("/")[2])) for log in logs}
    training = {
        parts[log.name][0]: log for log in logs if parts[log.name][0] and parts[log.name][1] == "train"
    }
    of_run = Counter(run for run, part in parts.values() if run in training and part in SPLITS)
    split: list[Log] = []
    for log in sorted(logs, key=lambda log: parts[log.name][1] != "train"):
        run, part = parts[log.name]
        if part not in SPLITS or of_run[run] < 2 or log.run_id is not None:
            split.append(log)
            continue
        train = training[run].metrics if part != "train" else {}
        called = {name: f"{part}/{name}" if name in train else name for name in (*log.metrics, *log.dropped)}
        metrics = {called[name]: series for name, series in log.metrics.items()}
        dropped = {called[name]: steps for name, steps in log.dropped.items()}
        said = "the train and other logs of a run, side by side, are one run"
        log = replace(log, metrics=metrics, dropped=dropped, guesses=(*log.guesses, said))
        split.append(replace(log, name=run, part=True))
    return joined(split)


def _read(found: Found, step_column: str | None, *, one_run: bool = False) -> list[Log]:
    """Return the runs of what was found; `one_run`: a table is one, whatever its columns name."""
    match found.format:
        case "abrun":
            log = read_run_dir(found.path, found.name)
        case "tensorboard":
            log = read_event_files(found.files, found.name, found.path)
        case "wandb":
            log = read_run_files(found.files, found.name, step_column)
        case "csv":
            return read_csv(found.path, found.name, step_column, one_run=one_run)
        case "parquet":
            log = replace(read_parquet(found.path, step_column), name=found.name)
        case "trainer_state":
            log = replace(read_trainer_state(found.path, step_column), name=found.name)
        case _:
            return read_json(found.path, found.name, step_column, one_run=one_run)
    return [log]


def _without_hparams_runs(read: Sequence[tuple[Found, Log]]) -> list[Log]:
    """Event files below a run's own, of its hyperparameters or of torch's add_scalars, are part of it."""
    runs = {one.path: log for one, log in read if one.format == "tensorboard"}
    for folder, log in list(runs.items()):
        parent = next((above for above in folder.parents if above in runs), None)
        if parent is not None and (not log.metrics or re.fullmatch(HPARAMS_RUN, folder.name)):
            del runs[folder]
            config = {**(runs[parent].config or {}), **(log.config or {})}
            runs[parent] = replace(runs[parent], config=config or None)
        elif parent is not None and (key := _of_scalars(folder, log)):
            del runs[folder]
            series = {key: next(iter(log.metrics.values()))}
            runs[parent] = replace(runs[parent], metrics={**series, **runs[parent].metrics})
    return [*runs.values(), *(log for one, log in read if one.format != "tensorboard")]


def _of_scalars(folder: Path, log: Log) -> str | None:
    """The metric in a folder of torch's add_scalars: it is called `<tag>_<key>` and holds that tag alone."""
    tag = next(iter(log.metrics)) if len(log.metrics) == 1 else None
    start = "" if tag is None else tag.replace("/", "_") + "_"
    return f"{tag}/{folder.name[len(start) :]}" if start and folder.name.startswith(start) else None


def _of_group(logs: Sequence[Log], group: str, source: str) -> list[Log]:
    kept = [log for log in logs if log.group == group]
    if not kept:
        groups = sorted({log.group for log in logs if log.group})
        there = f"there are {listed(groups)}" if groups else "its runs have none (wandb's have)"
        raise StoreError(f"{printable(source)}: --group: got '{printable(group)}'; {there}")
    return kept


def _started(file: Path) -> tuple[str, str]:
    found = STARTED.search(file.parent.name)
    return found[1] if found else "", file.name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts s2 before s10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]
