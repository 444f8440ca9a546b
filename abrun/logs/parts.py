"""One run from several files or processes: event files in subfolders, exports, splits, starts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from abrun.logs.log import Log
from abrun.logs.naming import strip_suffix
from abrun.logs.starts import START_FOLDER, merge_continued_starts

HPARAMS_RUN = r"\d{9,}(\.\d+)?"  # the subfolder that torch's add_hparams creates, named by the time
PIPELINERL_PARTS = {"actor", "preprocessor", "finetune"}  # PipelineRL logs one run as three wandb runs
# Splits of one run, each with its own log
SPLIT_NAMES = {"train", "validation", "valid", "val", "eval", "test"}


def merge_subfolders(runs_by_folder: Mapping[Path, Log]) -> list[Log]:
    """Merge event files in subfolders of a run (hyperparameters, torch's add_scalars) into the run."""
    runs = dict(runs_by_folder)
    for folder, log in runs_by_folder.items():
        parent = next((ancestor for ancestor in folder.parents if ancestor in runs), None)
        if parent is None:
            continue
        run = runs[parent]
        if not log.metrics or re.fullmatch(HPARAMS_RUN, folder.name):
            config = {**(run.config or {}), **(log.config or {})}
            runs[parent] = replace(run, config=config or None)
        elif key := _scalar_key(folder, log):
            series = {key: next(iter(log.metrics.values()))}
            runs[parent] = replace(run, metrics={**series, **run.metrics})
        else:
            continue
        del runs[folder]
    return [*runs.values()]


def _scalar_key(folder: Path, log: Log) -> str | None:
    """Return the metric in a folder `<tag>_<key>` of torch's add_scalars, which holds only that tag."""
    tag = next(iter(log.metrics)) if len(log.metrics) == 1 else None
    prefix = "" if tag is None else tag.replace("/", "_") + "_"
    return f"{tag}/{folder.name[len(prefix) :]}" if prefix and folder.name.startswith(prefix) else None


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


def merge_parts(logs: Sequence[Log]) -> list[Log]:
    """Merge the runs whose metrics lie in several files."""
    runs: dict[object, Log] = {}
    for index, log in enumerate(logs):
        key = log.name if log.is_part else index
        if key in runs:
            merged = runs[key]
            notes = dict.fromkeys((*merged.notes, *log.notes))
            log = replace(
                merged,
                metrics={**merged.metrics, **log.metrics},
                notes=tuple(notes),
                unread={**log.unread, **merged.unread},
                dropped={**log.dropped, **merged.dropped},
            )
        runs[key] = log
    return list(runs.values())
