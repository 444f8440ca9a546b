"""Readers for the logs of any framework: TensorBoard, wandb, CSV, JSON lines, Parquet and others.

A source is a file, a folder that may hold many runs, or a project on a wandb server. Each run becomes a
`Log`. The module `naming` finds its arm and seed, and `aliases` maps its metric names to abrun's.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.exports import merge_parts, read_csv, read_json, read_parquet
from abrun.logs.foreign.files import (
    Folder,
    find_companion,
    link_notes,
    open_file,
    path_kind,
    walk,
    wrap_exhaustion,
)
from abrun.logs.lm_eval import is_samples_file, read_samples
from abrun.logs.log import Log, sanitize_log
from abrun.logs.mlflow_files import META
from abrun.logs.naming import SUFFIXES, strip_suffix
from abrun.logs.readers import all_readers, find_reader, read_with
from abrun.logs.starts import START_FOLDER, merge_continued_starts
from abrun.logs.stored import is_run_dir, read_run_dir
from abrun.logs.tables import read_trainer_state
from abrun.logs.tensorboard import EVENT_FILE_PREFIX, read_event_files, start_key
from abrun.logs.trackers import complete_tracker_logs
from abrun.logs.wandb_files import read_wandb_files
from abrun.runs.files import UnreadableError
from abrun.runs.redaction import list_names, printable

__all__ = ["FORMATS", "Log", "read_log", "read_logs"]

FORMATS = ("tensorboard", "wandb", "csv", "jsonl", "parquet")  # of one run, which read_log follows
LM_EVAL = "lm-eval"
TABLE_FORMATS = ("csv", "jsonl", "parquet", "json")
# Tables that no reader supports; an error names them if a source has no other runs.
FOREIGN_FILE = re.compile(
    r".+\.(xlsx?|ods|numbers|db|sqlite3?|feather|arrow|h5|hdf5|zip|7z|tar|bz2|xz|zst|tgz|gz)"
    r"|.+\.(csv|tsv|jsonl|ndjson|parquet)[.~].*",  # rotated or copied, such as log.jsonl.1
    re.IGNORECASE,
)
TRAINER_STATE = "trainer_state.json"
FALLBACK_FORMATS = ("trainer_state", "json")
JSON_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
CHECKPOINT = r"checkpoint-(\d+)"
# Names of files with completions, prompts and evaluations, which trainers write next to their logs.
DUMP_FILE = re.compile(
    r"(completions|generated_predictions|predict|traces|eval_results|table)(_\d+)?|(train|val)_data_step\d+"
)
DUMP_FOLDERS = {"completions", "rollouts", "rollout_data", "streams", "generations"}
WANDB_PROJECT = r"[^/:]+/[^/]+(/[^/]+)?"
HPARAMS_RUN = r"\d{9,}(\.\d+)?"  # the subfolder that torch's add_hparams creates, named by the time
START_TIME = re.compile(r"run-(\d{8}_\d{6})-")
RUN_ID = re.compile(r"run-(.+)\.wandb")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Location of a run that has not been read yet."""

    format: str
    name: str
    path: Path  # its folder, or its file for a table
    files: tuple[Path, ...]


@dataclass(slots=True)
class Findings:
    """Contents of a folder: its runs, links that lead out of it, and a few names of files."""

    runs: list[RunFiles]
    links: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def stores() -> tuple[str, ...]:
    """Return the names of formats that hold any number of runs, for comparisons only."""
    return (*all_readers(), LM_EVAL)


def prefixes() -> dict[str, str]:
    """Return the format of each prefix of a source."""
    return {"tb": "tensorboard"} | {name: name for name in (*FORMATS, *stores())}


def _formats_by_preference() -> tuple[str, ...]:
    """Return the order of preference among formats with equally many runs. The last two are fallbacks."""
    first = ("abrun", "tensorboard", "wandb", *all_readers())
    return (*first, "jsonl", "csv", "parquet", LM_EVAL, *FALLBACK_FORMATS)


def read_logs(source: str, *, group: str | None = None, step_column: str | None = None) -> list[Log]:
    """Return every run of a source, sorted by name.

    A source is `PATH`, `FORMAT:PATH` with one of `prefixes()`, or `wandb:ENTITY/PROJECT[/RUN]` on a server.
    `group` selects one wandb group. Raises StoreError if nothing can be read.
    """
    prefix, colon, rest = source.partition(":")
    format = prefixes().get(prefix) if colon else None
    path = Path(rest if format else source)
    with wrap_exhaustion(path):
        if format == "wandb" and not path_kind(path) and re.fullmatch(WANDB_PROJECT, rest.strip("/")):
            from abrun.logs.wandb_api import read_project

            logs = read_project(rest, group, step_column)
        else:
            by_format, notes, links = _find_runs(path, format, source)
            runs, ignored = _read_fullest_format(by_format, notes, source, step_column)
            runs += _linked_runs(path, links, runs)
            logs = merge_run_parts(_merge_hparams_runs(runs))
            logs = complete_tracker_logs(logs) if runs and runs[0][0].format in all_readers() else logs
            logs = [replace(log, guesses=(*log.guesses, *ignored)) for log in logs]
        if group is not None:
            logs = _select_group(logs, group, source)
        return sorted((sanitize_log(log) for log in logs), key=lambda log: _natural_key(log.name))


def read_log(path: Path, format: str, step_column: str | None = None) -> Log:
    """Return the single run in a file or a folder; an empty log while the path does not exist.

    The run may still be written: a torn end is skipped with a note.
    """
    if format not in FORMATS:
        raise StoreError(f"format: got {format!r}; allowed: {', '.join(FORMATS)}")
    name, files = path.name, [path]
    kind = path_kind(path)
    if kind == "folder":
        sources = (source for source in _find_in_folder(path).runs if source.format == format)
        files = [file for source in sources for file in source.files]
    if not kind or not files:
        problem = "holds nothing of that format yet" if kind else "does not exist yet"
        return Log(name=name, place=printable(str(path)), metrics={}, notes=(f"it {problem}",))
    if format in ("csv", "jsonl", "parquet") and len(files) > 1:
        raise StoreError(
            f"{printable(str(path))}: got {len(files)} {format} files; one run is one file: name it"
        )
    if format == "tensorboard":
        files = sorted(files, key=start_key)
    elif format == "wandb":
        files = sorted(files, key=_start_key)
    source = RunFiles(format=format, name=name, path=path if len(files) > 1 else files[0], files=tuple(files))
    (log,) = _read_run(source, step_column, one_run=True)
    return sanitize_log(replace(log, name=name))


# --- which runs are there ---


def _find_runs(
    path: Path, format: str | None, source: str
) -> tuple[dict[str, list[RunFiles]], list[str], list[str]]:
    """Return the runs by format, in order of preference, notes on other files, and links that lead out."""
    kind = path_kind(path)
    if not kind:
        names = ", ".join(f"{name}:" for name in ("tb", *FORMATS[1:], *stores()))
        raise StoreError(
            f"{printable(source)}: no such file or folder; allowed: a path, optionally with a prefix "
            f"({names}), or wandb:ENTITY/PROJECT"
        )
    findings = _find_in_folder(path) if kind == "folder" else Findings([_single_file(path, format)])
    link_note = link_notes(printable(str(path)), findings.links)
    unsupported = [run.name for run in findings.runs if run.format == "foreign"]
    formats = {format, "json"} if format == "jsonl" else {format}
    runs = _drop_links([run for run in findings.runs if run.format != "foreign"])
    runs = [run for run in runs if format is None or run.format in formats]
    if not runs:
        expected = format or f"{', '.join((*FORMATS, *stores()))} or abrun's own"
        names = unsupported or sorted(findings.names)
        contents = f"; it holds {list_names(names, 3)}" if names else ""
        raise StoreError(
            f"{printable(source)}: no runs found; allowed: runs logged as {expected}{contents}"
            + "".join(f"; {note.partition(': ')[2]}" for note in link_note)
        )
    preferred = _formats_by_preference()
    by_format = {form: [run for run in runs if run.format == form] for form in preferred}

    def preference(form: str) -> tuple[int, int]:
        is_fallback = form in FALLBACK_FORMATS
        return is_fallback and preferred.index(form), -len(by_format[form])

    forms = sorted((form for form in preferred if by_format[form]), key=preference)
    note = f"{printable(source)}: unsupported format, not read: {list_names(unsupported, 3)}"
    return {form: by_format[form] for form in forms}, [note] * bool(unsupported) + link_note, findings.links


def _single_file(path: Path, format: str | None) -> RunFiles:
    kind = _file_format(path) or find_reader(path)
    if (kind is None and format in FORMATS[1:]) or (kind == "json" and format == "jsonl"):
        kind = format  # the user's prefix decides for an unknown suffix
    if kind is None or (format is not None and kind != format):
        raise StoreError(
            f"{printable(str(path))}: not a {format or 'metrics'} file; allowed: *.csv, *.tsv, *.jsonl, "
            f"*.ndjson (also as *.gz), *.json, *.parquet, *.wandb, *.swanlab, {EVENT_FILE_PREFIX}*, "
            f"{TRAINER_STATE}, a database of MLflow or trackio"
        )
    return RunFiles(format=kind, name=path.name, path=path, files=(path,))


def _file_format(path: Path) -> str | None:
    if EVENT_FILE_PREFIX in path.name:
        return "tensorboard"
    if path.name == TRAINER_STATE:
        return "trainer_state"
    if is_samples_file(path):
        return "lm-eval"
    name = path.name.lower()
    kind = SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)
    return None if kind in ("parquet", "wandb") and name.endswith(".gz") else kind


def _is_json_list(path: Path) -> bool:
    try:
        with open_file(path) as file:
            start = file.read(64)
    except StoreError:
        return False
    return start.startswith(b"\x1f\x8b") or JSON_LIST.match(start) is not None


def _find_in_folder(top: Path) -> Findings:
    """Return the runs in a folder and its subfolders."""
    findings, runs_below = Findings([]), list[RunFiles]()
    for folder in walk(top):
        folder.folders[:] = [entry for entry in folder.folders if not entry.name.startswith(".")]
        names = [_relative_name(file, top) for file in folder.files if "." in file.name]
        findings.names += names[: 100 - len(findings.names)]
        findings.links += [
            _relative_name(link, top)
            for link in folder.outside
            if path_kind(link) == "folder" or _file_format(link) or link.name == META
        ]
        (findings.runs if folder.path == top else runs_below).extend(_find_in(folder, top))
    findings.runs += _merge_resumed_runs(runs_below)
    return findings


def _find_in(folder: Folder, top: Path) -> Iterator[RunFiles]:
    """Yield the runs in one folder; subfolders that hold no runs of their own will not be entered."""
    path, files = folder.path, folder.files
    name = _relative_name(path, top) if path != top else path.resolve().name
    is_abrun = is_run_dir(path)
    names = {entry.name for entry in (*files, *folder.folders)}
    store = "abrun" if is_abrun else find_reader(path, names) if names else None
    if store is not None:
        folder.folders.clear()
        yield RunFiles(format=store, name=name, path=path, files=())
        return
    kinds = {file: _file_format(file) for file in files}
    by_kind = {kind: tuple(file for file in files if kinds[file] == kind) for kind in {*kinds.values()}}
    if "wandb" in by_kind:
        folder.folders.clear()  # they hold copies of the run's files
        for file in by_kind["wandb"]:
            yield RunFiles(format="wandb", name=name, path=path, files=(file,))
        return
    if "tensorboard" in by_kind:
        events = tuple(sorted(by_kind["tensorboard"], key=start_key))
        yield RunFiles(format="tensorboard", name=name, path=path, files=events)
    if "lm-eval" in by_kind:
        yield RunFiles(format="lm-eval", name=name, path=path, files=by_kind["lm-eval"])
    state = next(iter(by_kind.get("trainer_state", ())), None) or _find_trainer_state(folder)
    if state is not None and (path == top or not re.fullmatch(CHECKPOINT, path.name)):
        yield RunFiles(format="trainer_state", name=name, path=state, files=(state,))
    folder.folders[:] = [subfolder for subfolder in folder.folders if subfolder.name not in DUMP_FOLDERS]
    for file in files:
        kind = kinds[file]
        is_table = kind in TABLE_FORMATS and not DUMP_FILE.fullmatch(strip_suffix(file.name))
        if kind and is_table and (kind != "json" or _is_json_list(file)):
            yield RunFiles(format=kind, name=_relative_name(file, top), path=file, files=(file,))
        elif kind is None and (tracker := find_reader(file)):
            yield RunFiles(format=tracker, name=_relative_name(file, top), path=file, files=(file,))
        elif kind is None and FOREIGN_FILE.fullmatch(file.name):
            yield RunFiles(format="foreign", name=_relative_name(file, top), path=file, files=())


def _drop_links(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Return the runs without those that only link to another run's file, such as `latest.jsonl`."""
    files = {file for run in runs for file in run.files if not file.is_symlink()}
    targets = {file.resolve() for file in files}
    return [
        run
        for run in runs
        if not run.files or any(link in files or link.resolve() not in targets for link in run.files)
    ]


def _relative_name(path: Path, top: Path) -> str:
    """Return a path relative to its source. Names unpacked from a Windows archive may hold backslashes."""
    return path.relative_to(top).as_posix().replace("\\", "/")


def _find_trainer_state(folder: Folder) -> Path | None:
    """Return the trainer state of the last checkpoint in a folder that has one."""
    numbered = [(re.fullmatch(CHECKPOINT, subfolder.name), subfolder) for subfolder in folder.folders]
    checkpoints = sorted(((int(match[1]), subfolder) for match, subfolder in numbered if match), reverse=True)
    states = (find_companion(subfolder, TRAINER_STATE) for _, subfolder in checkpoints)
    return next(filter(None, states), None)


def _merge_resumed_runs(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Merge the folders of a wandb run that was resumed offline: each start has its own."""
    merged: dict[Any, RunFiles] = {}
    for run in runs:
        run_id = RUN_ID.fullmatch(run.files[0].name) if run.format == "wandb" else None
        key = (run.path.parent, run_id[1]) if run_id else (run.path, run.format)
        files = (*merged[key].files, *run.files) if key in merged else run.files
        merged[key] = replace(run, files=tuple(sorted(files, key=_start_key)) if run_id else files)
    return list(merged.values())


# --- reading them ---


def _read_fullest_format(
    by_format: Mapping[str, Sequence[RunFiles]], ignored: list[str], source: str, step_column: str | None
) -> tuple[list[tuple[RunFiles, Log]], list[str]]:
    """Return the runs of the first format that holds any number, and notes on the ignored formats."""
    first_error: StoreError | None = None
    runs_without_metrics: list[tuple[RunFiles, Log]] = []
    score_tables: list[tuple[RunFiles, Log]] = []  # used if no format has runs with steps
    for format, runs in by_format.items():
        try:
            logs, ignored_tables = _read_runs(runs, step_column)
        except StoreError as error:
            if format not in TABLE_FORMATS:
                raise
            first_error = first_error or error
            continue
        if any(log.axis != "steps" for _, log in logs):
            has_steps = any(log.metrics and log.axis == "steps" for _, log in logs)
            scored = [(run, log) for run, log in logs if log.axis != "steps"]
            score_tables = score_tables or scored
            logs = [(run, log) for run, log in logs if log.axis == "steps"] if has_steps else []
            num_scored = f"{len(scored)} run{'s' * (len(scored) != 1)}"
            note = f"{printable(source)}: read the runs with steps, ignored the final scores of {num_scored}"
            ignored = [*ignored, *([note] if has_steps and scored else [])]
        if any(log.metrics for _, log in logs):
            other_formats = [
                form for form in _formats_by_preference() if form in by_format and form != format
            ]
            note = f"{printable(source)}: read the {format} logs, ignored {', '.join(other_formats)}"
            return logs, [*([note] if other_formats else []), *ignored_tables, *ignored]
        runs_without_metrics = runs_without_metrics or logs
    if score_tables:
        return score_tables, ignored
    if first_error:
        raise first_error
    return runs_without_metrics, ignored


def _read_runs(
    sources: Sequence[RunFiles], step_column: str | None
) -> tuple[list[tuple[RunFiles, Log]], list[str]]:
    """Return every run, and notes on ignored tables.

    An unreadable table counts as a run if a readable run has a file of the same name apart from digits;
    otherwise it is ignored. An empty table next to the only run of a folder is ignored, too. Raises
    StoreError if there is no run.
    """
    logs: list[tuple[RunFiles, Log]] = []
    errors: list[tuple[RunFiles, StoreError]] = []
    for source in sources:
        try:
            logs += [(source, log) for log in _read_run(source, step_column)]
        except StoreError as error:
            if source.format not in TABLE_FORMATS:
                raise
            errors.append((source, error))
    runs = [(source, log) for source, log in logs if log.metrics or source.format not in TABLE_FORMATS]
    if errors and not runs:
        raise errors[0][1]
    names = {_name_without_digits(source) for source, _ in runs}
    num_runs = Counter(source.path.parent for source, _ in runs)
    ignored: dict[str, list[str]] = defaultdict(list)
    for source, log in logs:
        if log.metrics or source.format not in TABLE_FORMATS or _name_without_digits(source) in names:
            continue
        if num_runs[source.path.parent] == 1:  # the folder is one run; its other files are not runs
            logs = [(other_source, other_log) for other_source, other_log in logs if other_log is not log]
            ignored[_name_without_digits(source)].append(f"{log.place}: {'; '.join(log.notes)}")
    for source, error in errors:
        if _name_without_digits(source) in names:
            place = printable(str(source.path))
            log = Log(
                name=source.name,
                place=place,
                metrics={},
                status="unreadable",
                failure=str(error),
                forbidden=isinstance(error, UnreadableError),
            )
            logs.append((source, log))
        else:
            ignored[_name_without_digits(source)].append(str(error))
    return logs, [
        f"ignored: {problems[0]}{f' (and {len(problems) - 1} more of that name)' * (len(problems) > 1)}"
        for problems in ignored.values()
    ]


def _linked_runs(
    top: Path, links: Sequence[str], runs: Sequence[tuple[RunFiles, Log]]
) -> list[tuple[RunFiles, Log]]:
    """Return an unreadable run for each link that lies beside runs and is named like them but for digits."""
    siblings: dict[tuple[str, str], tuple[RunFiles, str]] = {}  # folder and name -> a run, and its name below
    for run, _ in runs:
        folders = run.name.split("/")
        for depth, folder_name in enumerate(folders):
            below = "/".join(["", *folders[depth + 1 :]])
            siblings.setdefault(("/".join(folders[:depth]), _without_digits(folder_name)), (run, below))
    linked: list[tuple[RunFiles, Log]] = []
    for link in links:
        folder, _, name = link.rpartition("/")
        if sibling := siblings.get((folder, _without_digits(name))):
            run = replace(sibling[0], name=link + sibling[1].rstrip("/"), path=top / link, files=())
            failure = (
                f"{printable(str(run.path))}: a link that leads out of {printable(str(top))}; copy its target"
            )
            place = printable(str(run.path))
            linked.append(
                (run, Log(name=run.name, place=place, metrics={}, status="unreadable", failure=failure))
            )
    return linked


def _name_without_digits(run: RunFiles) -> str:
    return _without_digits(run.path.name.replace("\\", "/").rpartition("/")[2])


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "0", strip_suffix(name))


def _read_run(run: RunFiles, step_column: str | None, *, one_run: bool = False) -> list[Log]:
    """Read the runs at a location; `one_run`: treat a table as one run, whatever its columns name."""
    with wrap_exhaustion(run.path):
        match run.format:
            case "abrun":
                log = read_run_dir(run.path, run.name)
            case "tensorboard":
                log = read_event_files(run.files, run.name, run.path)
            case "wandb":
                log = read_wandb_files(run.files, run.name, step_column)
            case "lm-eval":
                log = read_samples(run.files, run.name)
            case store if store in all_readers():
                return read_with(store, run.path, run.name, step_column)
            case "csv":
                return read_csv(run.path, run.name, step_column, one_run=one_run)
            case "parquet":
                return read_parquet(run.path, run.name, step_column, one_run=one_run)
            case "trainer_state":
                log = replace(read_trainer_state(run.path, step_column), name=run.name)
            case _:
                return read_json(run.path, run.name, step_column, one_run=one_run)
        return [log]


def _merge_hparams_runs(logs: Sequence[tuple[RunFiles, Log]]) -> list[Log]:
    """Merge event files in subfolders of a run (hyperparameters, torch's add_scalars) into the run."""
    runs_by_folder = {run.path: log for run, log in logs if run.format == "tensorboard"}
    for folder, log in list(runs_by_folder.items()):
        parent = next((ancestor for ancestor in folder.parents if ancestor in runs_by_folder), None)
        if parent is None:
            continue
        run = runs_by_folder[parent]
        if not log.metrics or re.fullmatch(HPARAMS_RUN, folder.name):
            config = {**(run.config or {}), **(log.config or {})}
            runs_by_folder[parent] = replace(run, config=config or None)
        elif key := _scalar_key(folder, log):
            series = {key: next(iter(log.metrics.values()))}
            runs_by_folder[parent] = replace(run, metrics={**series, **run.metrics})
        else:
            continue
        del runs_by_folder[folder]
    return [*runs_by_folder.values(), *(log for run, log in logs if run.format != "tensorboard")]


def _scalar_key(folder: Path, log: Log) -> str | None:
    """Return the metric in a folder `<tag>_<key>` of torch's add_scalars, which holds only that tag."""
    tag = next(iter(log.metrics)) if len(log.metrics) == 1 else None
    prefix = "" if tag is None else tag.replace("/", "_") + "_"
    return f"{tag}/{folder.name[len(prefix) :]}" if prefix and folder.name.startswith(prefix) else None


def _select_group(logs: Sequence[Log], group: str, source: str) -> list[Log]:
    selected = [log for log in logs if log.group == group]
    if not selected:
        groups = sorted({log.group for log in logs if log.group})
        available = f"available: {list_names(groups)}" if groups else "these runs have no groups"
        raise StoreError(f"{printable(source)}: --group: got '{printable(group)}'; {available}")
    return selected


def _start_key(file: Path) -> tuple[str, str]:
    match = START_TIME.search(file.parent.name)
    return match[1] if match else "", file.name


def _natural_key(name: str) -> list[tuple[int, str, str]]:
    """Return a sort key that puts s2 before s10, for numbers of any length."""
    parts = [(text.lstrip("0") if text.isdecimal() else None, text) for text in re.split(r"(\d+)", name)]
    return [(-1 if digits is None else len(digits), digits or "", text) for digits, text in parts]


PIPELINERL_PARTS = {"actor", "preprocessor", "finetune"}  # PipelineRL logs one run as three wandb runs
# Splits of one run, each with its own log
SPLIT_NAMES = {"train", "validation", "valid", "val", "eval", "test"}


def merge_run_parts(logs: Sequence[Log]) -> list[Log]:
    """Merge runs that were logged in several files, by several processes, or over several starts."""
    split_names = {log.name: log.name.rpartition("/") for log in logs}
    part_names = {
        name
        for name, (experiment, _, component) in split_names.items()
        if experiment and component in PIPELINERL_PARTS
    }
    complete_runs = {split_names[name][0] for name in part_names if name.endswith("/finetune")}
    parts: list[Log] = []
    for log in logs:
        run = split_names[log.name][0]
        is_part = log.name in part_names and run in complete_runs
        parts.append(replace(log, name=run, is_part=True, run_id=None) if is_part else log)
    logs = _merge_splits(merge_parts(parts))
    starts: dict[str, list[Log]] = {}
    for log in logs:
        folder, _, leaf = log.name.rpartition("/")
        key = folder if folder and log.run_id is None and START_FOLDER.fullmatch(leaf) else f"/{len(starts)}"
        starts.setdefault(key, []).append(log)
    merged_runs: list[Log] = []
    for folder, run_starts in starts.items():
        place = str(Path(run_starts[0].place).parent)
        run = merge_continued_starts(run_starts, place) if len(run_starts) > 1 else None
        merged_runs += [replace(run, name=folder)] if run else run_starts
    return merged_runs


def _merge_splits(logs: Sequence[Log]) -> list[Log]:
    """Merge the `train` and `validation` logs of a run that lie side by side.

    If both have a metric, the training's keeps its name, and the other's is prefixed with its split.
    """
    run_and_split = {
        log.name: (log.name.rpartition("/")[0], strip_suffix(log.name.rpartition("/")[2])) for log in logs
    }
    by_place = {run_and_split[log.name]: log for log in logs}
    training = {run: log for (run, split), log in by_place.items() if run and split == "train"}
    num_splits = Counter(
        run for run, split_name in run_and_split.values() if run in training and split_name in SPLIT_NAMES
    )
    merged_logs: list[Log] = []
    for log in sorted(logs, key=lambda log: run_and_split[log.name][1] != "train"):
        run, split_name = run_and_split[log.name]
        if split_name not in SPLIT_NAMES or num_splits[run] < 2 or log.run_id is not None:
            merged_logs.append(log)
            continue
        train_metrics = training[run].metrics if split_name != "train" else {}
        new_names = {
            name: f"{split_name}/{name}" if name in train_metrics else name
            for name in (*log.metrics, *log.dropped)
        }
        metrics = {new_names[name]: series for name, series in log.metrics.items()}
        dropped = {new_names[name]: steps for name, steps in log.dropped.items()}
        guess = "train and other logs that lie side by side were merged into one run"
        log = replace(log, metrics=metrics, dropped=dropped, guesses=(*log.guesses, guess))
        merged_logs.append(replace(log, name=run, is_part=True))
    return merge_parts(merged_logs)
