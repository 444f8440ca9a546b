"""Reading of a source: its runs in the format that holds most of them, and what was left aside.

A source is a file, a folder that may hold many runs, or a project on a wandb server.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.logs.foreign.files import Folder, link_notes, path_kind, walk, wrap_exhaustion
from abrun.logs.log import Log, sanitize_log, unreadable_log
from abrun.logs.mlflow_files import META
from abrun.logs.naming import matches, strip_suffix
from abrun.logs.parts import merge_parts, merge_run_parts, merge_subfolders
from abrun.logs.readers import (
    TRAINER_STATE,
    Format,
    RunFiles,
    all_formats,
    find_file_format,
    find_folder_format,
    load_readers,
)
from abrun.logs.settings import add_settings
from abrun.logs.tensorboard import EVENT_FILE_PREFIX
from abrun.logs.trackers import complete_tracker_logs
from abrun.logs.words import WORDS
from abrun.runs.redaction import list_names, printable

FORMATS = ("tensorboard", "wandb", "csv", "jsonl", "parquet")  # of one run, which read_log follows
FOREIGN_FILE = re.compile("|".join(WORDS["foreign"]), re.IGNORECASE)
DUMP_FOLDERS = {"completions", "rollouts", "rollout_data", "streams", "generations"}
WANDB_PROJECT = r"[^/:]+/[^/]+(/[^/]+)?"
START_TIME = re.compile(r"run-(\d{8}_\d{6})-")
RUN_ID = re.compile(r"run-(.+)\.wandb")

ReadRuns = list[tuple[RunFiles, Log]]


@dataclass(slots=True)
class Findings:
    """Contents of a source: its runs, links that lead out of it, and names of files."""

    runs: list[RunFiles] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # a few


def stores() -> tuple[str, ...]:
    """Return the names of formats that hold any number of runs, for comparisons only."""
    readers, _ = load_readers()
    return (*(reader.name for reader in readers), "lm-eval")


def prefixes() -> dict[str, str]:
    """Return the format of each prefix of a source."""
    return {"tb": "tensorboard"} | {name: name for name in (*FORMATS, *stores())}


def read_logs(
    source: str,
    *,
    group: str | None = None,
    step_column: str | None = None,
    pattern: str | None = None,
    is_excluded: Callable[[Log], bool] = lambda log: False,
) -> list[Log]:
    """Return every run of a source, sorted by name.

    A source is `PATH`, `FORMAT:PATH` with one of `prefixes()`, or `wandb:ENTITY/PROJECT[/RUN]` on a server.
    `group` selects one wandb group. Logs that are parts of one run are joined, but not those that
    `is_excluded` names, nor any if only the names of the parts match `pattern`. Raises StoreError if nothing
    can be read.
    """
    prefix, colon, rest = source.partition(":")
    format = prefixes().get(prefix) if colon else None
    path = Path(rest if format else source)
    with wrap_exhaustion(path):
        if format == "wandb" and not path_kind(path) and re.fullmatch(WANDB_PROJECT, rest.strip("/")):
            from abrun.logs.wandb_api import read_project

            logs, ignored, is_tracker = read_project(rest, group, step_column), list[str](), False
        else:
            by_format, notes, links = _find_runs(path, format, source)
            runs, ignored = _read_fullest_format(by_format, notes, source, step_column)
            runs += _linked_runs(path, links, runs)
            is_tracker = bool(runs) and runs[0][0].format.is_installed
            event_runs = {run.path: log for run, log in runs if run.format.name == "tensorboard"}
            others = [log for run, log in runs if run.format.name != "tensorboard"]
            logs = [*merge_subfolders(event_runs), *others]
        excluded = [log for log in logs if is_excluded(log)]
        logs = _join_parts([log for log in logs if not is_excluded(log)], pattern)
        logs = complete_tracker_logs(logs) if is_tracker else logs
        logs = add_settings(logs, path)
        logs = [*(replace(log, guesses=(*log.guesses, *ignored)) for log in logs), *excluded]
        if group is not None:
            logs, groups = [log for log in logs if log.group == group], {log.group for log in logs}
            if not logs:
                available = f"available: {list_names(sorted(filter(None, groups)))}"
                available = available if any(groups) else "these runs have no groups"
                raise StoreError(f"{printable(source)}: --group: got '{printable(group)}'; {available}")
        return sorted((sanitize_log(log) for log in logs), key=lambda log: _natural_key(log.name))


def _join_parts(logs: Sequence[Log], pattern: str | None) -> list[Log]:
    """Return runs whose parts are joined, unless a pattern matches the names of parts alone."""
    joined = merge_run_parts(logs)
    names_parts = pattern and not all(matches(pattern, log.name) for log in joined)
    if pattern and names_parts and all(matches(pattern, log.name) for log in logs):
        return merge_parts(logs)
    return joined


def read_log(path: Path, format: str, step_column: str | None = None) -> Log:
    """Return the single run in a file or a folder; an empty log while the path does not exist.

    The run may still be written: a torn end is skipped with a note.
    """
    if format not in FORMATS:
        raise StoreError(f"format: got {format!r}; allowed: {', '.join(FORMATS)}")
    name, files = path.name, [path]
    kind = path_kind(path)
    if kind == "folder":
        runs = (run for run in _find_in_folder(path).runs if run.format.name == format)
        files = [file for run in runs for file in run.files]
    if not kind or not files:
        problem = "holds nothing of that format yet" if kind else "does not exist yet"
        return Log(name=name, place=printable(str(path)), metrics={}, notes=(f"it {problem}",))
    if format in ("csv", "jsonl", "parquet") and len(files) > 1:
        raise StoreError(
            f"{printable(str(path))}: got {len(files)} {format} files; one run is one file: name it"
        )
    if format == "wandb":
        files = sorted(files, key=_start_key)
    reader = next(form for form in all_formats() if form.name == format)
    run = RunFiles(format=reader, name=name, path=path if len(files) > 1 else files[0], files=tuple(files))
    with wrap_exhaustion(run.path):
        (log,) = reader.read(run, step_column, one_run=True)
    return sanitize_log(replace(log, name=name))


# --- which runs are there ---


def _find_runs(
    path: Path, format: str | None, source: str
) -> tuple[dict[Format, list[RunFiles]], list[str], list[str]]:
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
    unsupported = findings.unsupported
    names = {format, "json"} if format == "jsonl" else {format}
    runs = [run for run in _drop_links(findings.runs) if format is None or run.format.name in names]
    if not runs:
        expected = format or f"{', '.join((*FORMATS, *stores()))} or abrun's own"
        others = unsupported or sorted(findings.names)
        way = _way_to_table([] if findings.runs else others)
        contents = f"; it holds {list_names(others, 3)}{way}" if others else ""
        raise StoreError(
            f"{printable(source)}: no runs found; allowed: runs logged as {expected}{contents}"
            + "".join(f"; {note.partition(': ')[2]}" for note in link_note)
        )

    formats = all_formats()
    by_format = {form: [run for run in runs if run.format is form] for form in formats}

    def preference(form: Format) -> tuple[int, int]:
        return form.is_fallback and formats.index(form), -len(by_format[form])

    forms = sorted((form for form in formats if by_format[form]), key=preference)
    note = f"{printable(source)}: unsupported format, not read: {list_names(unsupported, 3)}"
    note += _way_to_table(unsupported)
    return {form: by_format[form] for form in forms}, [note] * bool(unsupported) + link_note, findings.links


def _single_file(path: Path, format: str | None) -> RunFiles:
    reader = find_file_format(path)
    is_list = reader is not None and reader.name == "json" and format == "jsonl"
    if ((reader is None or reader.is_incidental) and format in FORMATS[1:]) or is_list:
        # the user's prefix decides for an unknown suffix
        reader = next(form for form in all_formats() if form.name == format)
    if reader is None or (format is not None and reader.name != format):
        raise StoreError(
            f"{printable(str(path))}: not a {format or 'metrics'} file{_way_to_table([path.name])}; allowed: "
            "*.csv, *.tsv, *.jsonl, *.ndjson (also as *.gz), *.json, *.parquet, *.log, *.txt, *.out, "
            f"*.wandb, *.swanlab, {EVENT_FILE_PREFIX}*, {TRAINER_STATE}, a database of MLflow or trackio"
        )
    return RunFiles(format=reader, name=path.name, path=path, files=(path,))


def _way_to_table(names: Sequence[str]) -> str:
    """Return, in brackets, how to make a table of the first file of a known format; empty if none is."""
    for name in names:
        for pattern, way in (WORDS["foreign"] | WORDS["other"]).items():
            if re.fullmatch(pattern, name, re.IGNORECASE):
                return f" ({way})"
    return ""


def _find_in_folder(top: Path) -> Findings:
    findings, runs_below = Findings(), list[RunFiles]()
    for folder in walk(top):
        folder.folders[:] = [entry for entry in folder.folders if not entry.name.startswith(".")]
        names = [_relative_name(file, top) for file in folder.files if "." in file.name]
        findings.names += names[: 100 - len(findings.names)]
        findings.links += [
            _relative_name(link, top)
            for link in folder.outside
            if path_kind(link) == "folder" or link.name == META or find_file_format(link, own=True)
        ]
        (runs_below if folder.depth else findings.runs).extend(_find_in(folder, top, findings.unsupported))
    findings.runs += _merge_resumed_runs(runs_below)
    return findings


def _find_in(folder: Folder, top: Path, unsupported: list[str]) -> Iterator[RunFiles]:
    """Yield the runs in one folder; subfolders that hold no runs of their own will not be entered."""
    folder_name = _relative_name(folder.path, top) if folder.depth else folder.path.resolve().name

    def locate(form: Format, places: Iterator[tuple[Path, Sequence[Path]]]) -> Iterator[RunFiles]:
        for path, files in places:
            is_folder = path == folder.path or form.is_named_by_folder
            name = folder_name if is_folder else _relative_name(path, top)
            yield RunFiles(format=form, name=name, path=path, files=tuple(files))

    names = {entry.name for entry in (*folder.files, *folder.folders)}
    form = find_folder_format(folder.path, names)
    if form and (places := list(form.take(folder))):  # none if a subfolder alone is named like its files
        folder.folders.clear()
        yield from locate(form, iter(places))
        return
    claimed: dict[Format | None, list[Path]] = defaultdict(list)
    for file in folder.files:
        claimed[find_file_format(file)].append(file)
    for form in all_formats():
        yield from locate(form, form.find(folder, claimed[form]))
    unsupported += [_relative_name(file, top) for file in claimed[None] if FOREIGN_FILE.fullmatch(file.name)]
    folder.folders[:] = [subfolder for subfolder in folder.folders if subfolder.name not in DUMP_FOLDERS]


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


def _merge_resumed_runs(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Merge the folders of a wandb run that was resumed offline: each start has its own."""
    merged: dict[Any, RunFiles] = {}
    for run in runs:
        run_id = RUN_ID.fullmatch(run.files[0].name) if run.format.name == "wandb" else None
        key = (run.path.parent, run_id[1]) if run_id else (run.path, run.format)
        files = (*merged[key].files, *run.files) if key in merged else run.files
        merged[key] = replace(run, files=tuple(sorted(files, key=_start_key)) if run_id else files)
    return list(merged.values())


# --- reading them ---


def _read_fullest_format(
    by_format: Mapping[Format, Sequence[RunFiles]], ignored: list[str], source: str, step_column: str | None
) -> tuple[ReadRuns, list[str]]:
    """Return the runs of the first format that holds any number, and notes on the ignored formats."""
    first_error: StoreError | None = None
    runs_without_metrics: ReadRuns = []
    score_tables: ReadRuns = []  # used if no format has runs with steps
    for format, runs in by_format.items():
        try:
            logs, ignored_tables = _read_runs(runs, step_column)
        except StoreError as error:
            if not format.is_table:
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
            others = {form for form in by_format if form is not format and not form.is_incidental}
            other_formats = [form.name for form in all_formats() if form in others]
            note = f"{printable(source)}: read the {format.name} logs, ignored {', '.join(other_formats)}"
            return logs, [*([note] if other_formats else []), *ignored_tables, *ignored]
        runs_without_metrics = runs_without_metrics or logs
    if score_tables:
        return score_tables, ignored
    if first_error:  # of files that may be no logs: what else is there may be them
        raise type(first_error)("; ".join((str(first_error), *ignored)))
    return runs_without_metrics, ignored


def _read_runs(sources: Sequence[RunFiles], step_column: str | None) -> tuple[ReadRuns, list[str]]:
    """Return every run, and notes on ignored tables.

    An unreadable table counts as a run if a readable run has a file of the same name apart from digits;
    otherwise it is ignored. An empty table next to the only run of a folder is ignored, too. Raises
    StoreError if there is no run.
    """
    logs: ReadRuns = []
    errors: list[tuple[RunFiles, StoreError]] = []
    for source in sources:
        try:
            with wrap_exhaustion(source.path):
                logs += [(source, log) for log in source.format.read(source, step_column)]
        except StoreError as error:
            if not source.format.is_table:
                raise
            errors.append((source, error))
    runs = [(source, log) for source, log in logs if log.metrics or not source.format.is_table]
    if errors and not runs:
        raise errors[0][1]
    names = {_name_without_digits(source) for source, _ in runs}
    num_runs = Counter(source.path.parent for source, _ in runs)
    ignored: dict[str, list[str]] = defaultdict(list)
    for source, log in logs:
        if log.metrics or not source.format.is_table or _name_without_digits(source) in names:
            continue
        if num_runs[source.path.parent] == 1:  # the folder is one run; its other files are not runs
            logs = [(other_source, other_log) for other_source, other_log in logs if other_log is not log]
            ignored[_name_without_digits(source)].append(f"{log.place}: {'; '.join(log.notes)}")
    for source, error in errors:
        if _name_without_digits(source) in names:
            logs.append((source, unreadable_log(source.name, source.path, error)))
        elif not source.format.is_incidental:
            ignored[_name_without_digits(source)].append(str(error))
    return logs, [
        f"ignored: {problems[0]}{f' (and {len(problems) - 1} more of that name)' * (len(problems) > 1)}"
        for problems in ignored.values()
    ]


def _linked_runs(top: Path, links: Sequence[str], runs: ReadRuns) -> ReadRuns:
    """Return an unreadable run for each link that lies beside runs and is named like them but for digits."""
    siblings: dict[tuple[str, str], tuple[RunFiles, str]] = {}  # folder and name -> a run, and its name below
    for run, _ in runs:
        folders = run.name.split("/")
        for depth, folder_name in enumerate(folders):
            below = "/".join(["", *folders[depth + 1 :]])
            siblings.setdefault(("/".join(folders[:depth]), _without_digits(folder_name)), (run, below))
    linked: ReadRuns = []
    for link in links:
        folder, _, name = link.rpartition("/")
        if sibling := siblings.get((folder, _without_digits(name))):
            run = replace(sibling[0], name=link + sibling[1].rstrip("/"), path=top / link, files=())
            problem = f"a link that leads out of {printable(str(top))}; copy its target"
            error = StoreError(f"{printable(str(run.path))}: {problem}")
            linked.append((run, unreadable_log(run.name, run.path, error)))
    return linked


def _name_without_digits(run: RunFiles) -> str:
    return _without_digits(run.path.name.replace("\\", "/").rpartition("/")[2])


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "0", strip_suffix(name))


def _start_key(file: Path) -> tuple[str, str]:
    match = START_TIME.search(file.parent.name)
    return match[1] if match else "", file.name


def _natural_key(name: str) -> list[tuple[int, str, str]]:
    """Return a sort key that puts s2 before s10, for numbers of any length."""
    parts = [(text.lstrip("0") if text.isdecimal() else None, text) for text in re.split(r"(\d+)", name)]
    return [(-1 if digits is None else len(digits), digits or "", text) for digits, text in parts]
