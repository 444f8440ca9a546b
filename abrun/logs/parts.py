"""One run from several files or processes: event files in subfolders, exports, splits, starts."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from abrun.logs.foreign.values import Points
from abrun.logs.log import Log, collect_points, unite_logs
from abrun.logs.naming import CHECKPOINT, EVALUATED, strip_suffix
from abrun.logs.starts import merge_continued_starts, run_of_start, without_times
from abrun.logs.step_parts import PROCESS, average_series
from abrun.runs.metric_names import is_clock, is_counter
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Series

HPARAMS_RUN = r"\d{9,}(\.\d+)?"  # the subfolder that torch's add_hparams creates, named by the time
# Splits of one run, each with its own log
SPLITS = {"train", "training", "validation", "valid", "val", "eval", "evaluation", "test"}
# Processes of one run that log metrics of their own: PipelineRL's, prime-rl's, Trinity's and others'
COMPONENTS = SPLITS | {"actor", "preprocessor", "finetune", "trainer", "orchestrator", "explorer", "learner"}
COMPONENTS |= {"rollout", "rollouts", "sampler", "generator", "inference", "evaluator", "buffer", "critic"}
MAX_SHARED = 1 / 3  # share of the metrics of a component that another one may have, too
# Number of a process: `rank_3`, `3_of_8`, torchrun's folder `attempt_0/3`, submitit's
# `4821_0_log`, or the leader of numbered ones
PROCESS_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9])(?:{PROCESS}[-_=]?(?P<rank>\d{{1,5}})(?:[-_]of[-_]\d+)?"
    r"|(?<!(?:seed|fold)[-_])(?<!(?:run|rep)[-_])(?<!trial[-_])(?P<part>\d+)[-_]of[-_]\d+"
    r"|attempt_\d+/(?P<local>\d+)|(?<=\d_)(?P<task>\d+)_log"
    r"|(?P<leader>(?:master|head|chief|launcher|leader|driver)(?:[-_]?\d+)?)"
    r")(?![A-Za-z0-9]|\.\d)",
    re.IGNORECASE,
)
CHECKPOINT_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9])(?:{CHECKPOINT})[-_=]?(\d{{1,15}})(?![A-Za-z0-9]|\.\d)", re.IGNORECASE
)
COPY = re.compile(
    r"(?<![^/])(latest|last|newest|current|best)([-_](run|model|checkpoint))?(?![^/])", re.IGNORECASE
)
LEADER = -1  # in the place of its number


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
    logs = _join_checkpoints(_join_processes(_leave_out_copies(merge_parts(logs))))
    starts: dict[str, list[Log]] = {}
    for log in logs:
        run = "" if log.run_id or log.identity else run_of_start(log.name)
        starts.setdefault(run or f"/{len(starts)}", []).append(log)
    merged_runs: list[Log] = []
    for name, run_starts in starts.items():
        place = str(Path(run_starts[0].place).parent)
        run = merge_continued_starts(run_starts, place) if len(run_starts) > 1 else None
        merged_runs += [replace(run, name=name)] if run else run_starts
    return _join_components(merged_runs)


# --- processes: the same metrics, from each rank ---


def _join_processes(logs: Sequence[Log]) -> list[Log]:
    """Average the logs of runs' processes, whose names differ in the number of a rank or worker alone.

    One of the numbers is 0, as of an index: `gpu2` and `gpu4` may be arms. Beside a leader such as `master-0`
    it may be 1.
    """
    groups: dict[tuple[str, ...], list[tuple[int, str, int]]] = defaultdict(list)  # number, its text, index
    for index, log in enumerate(logs):
        matches = [] if log.identity else [*PROCESS_NUMBER.finditer(log.name)]
        for match in matches[-1:]:  # the last number of `node1/rank_0` first
            number = LEADER if match["leader"] else int(match[match.lastgroup or 0])
            key = (_without(log.name, match), log.group or "", log.axis)
            groups[key].append((number, match[0], index))
    if groups and max(map(len, groups.values())) == 1:  # each process may have its own time of start
        timeless: dict[tuple[str, ...], list[tuple[int, str, int]]] = defaultdict(list)
        for (name, *key), processes in groups.items():
            timeless[(without_times(name), *key)] += processes
        groups = timeless
    joined: dict[int, Log] = dict(enumerate(logs))
    for (name, *_), processes in groups.items():
        numbers, words, indices = zip(*sorted(processes), strict=True)
        num_leaders = numbers.count(LEADER)
        is_repeated = len({*words}) < len(words)
        if is_repeated or num_leaders > 1 or not numbers[-1] >= 0 or numbers[num_leaders] > num_leaders:
            continue
        log = replace(_average_logs([joined.pop(index) for index in indices]), name=name, run_id=None)
        guess = f"mean over {len(words)} processes of one run ({words[num_leaders]} and so on)"
        joined[min(indices)] = replace(log, guesses=(*log.guesses, guess)) if len(words) > 1 else log
    merged = [joined[index] for index in sorted(joined)]
    return _join_processes(merged) if groups and len(merged) < len(logs) else merged


def _without(name: str, match: re.Match[str]) -> str:
    """Return a name without the match, but for the word of a component, and one separator beside it."""
    start, end = strip_suffix(name[: match.start()]), strip_suffix(name[match.end() :])
    word = re.match("[A-Za-z]*", match[0])
    if word and word[0].lower() in COMPONENTS and word[0] != match[0]:
        return f"{start}{word[0]}{end}"
    joined = f"{start.rstrip('/-_. ')}{end}" if end.startswith("/") else f"{start}{end.lstrip('/-_. ')}"
    return joined.strip("/-_. ")


def _average_logs(logs: Sequence[Log]) -> Log:
    """Return a log whose metrics are means, at each step, over the logs that have them."""
    series_of: dict[str, list[Series]] = defaultdict(list)
    for log in logs:
        for metric, series in log.metrics.items():
            series_of[metric].append(series)
    return replace(logs[0], metrics={metric: average_series(series) for metric, series in series_of.items()})


# --- copies and checkpoints ---


def _leave_out_copies(logs: Sequence[Log]) -> list[Log]:
    """Leave out a log called `latest` or alike with the points of one of the numbered runs beside it."""
    remaining = dict(enumerate(logs))
    names = [strip_suffix(log.name) for log in logs]
    for index, name in enumerate(names):
        for match in COPY.finditer(name):
            start, end = re.escape(name[: match.start()]), re.escape(name[match.end() :])
            numbered = re.compile(rf"{start}[^/]*\d[^/]*{end}")
            siblings = [place for place, sibling in enumerate(names) if numbered.fullmatch(sibling)]
            place = next((place for place in siblings if _holds(logs[place], logs[index])), None)
            if place is None or len(siblings) < 2:
                continue
            line = f"{printable(logs[index].name)}: copy of {printable(logs[place].name)}, left out"
            remaining[place] = replace(remaining[place], guesses=(*remaining[place].guesses, line))
            remaining.pop(index, None)
    return [*remaining.values()]


def _holds(log: Log, copy: Log) -> bool:
    return bool(copy.metrics) and all(
        name in log.metrics
        and np.isin(series.steps, log.metrics[name].steps).all()
        and np.array_equal(log.metrics[name].values_at(series.steps), series.values, equal_nan=True)
        for name, series in copy.metrics.items()
    )


def _find_checkpoint(log: Log) -> re.Match[str] | None:
    """Return the number of a checkpoint in the name of its scores, or of a file that is its only step."""
    if log.axis != "steps":
        return CHECKPOINT_NUMBER.search(log.name)
    match = re.search(r"(?<![^/])(\d{1,15})$", strip_suffix(log.name))
    steps = {int(step) for series in log.metrics.values() for step in series.steps[:2]}
    return match if match and steps == {int(match[1])} else None


def _join_checkpoints(logs: Sequence[Log]) -> list[Log]:
    """Join scores whose names differ in the number of a checkpoint alone: the number is the step of a run.

    Of scores per prompt the mean counts. Scores of the end, without a step, are left out beside them.
    """
    groups: dict[str, dict[int, Log]] = defaultdict(dict)
    unnumbered: list[Log] = []
    for log in logs:
        if match := _find_checkpoint(log):
            groups[_without(log.name, match)][int(match[1])] = log
        else:
            unnumbered.append(log)
    if all(len(checkpoints) < 2 for checkpoints in groups.values()):
        return [*logs]
    joined = [log for log in unnumbered if log.axis == "steps" or _evaluated_run(log)[0] not in groups]
    for name, checkpoints in groups.items():
        points: dict[str, Points] = defaultdict(Points)
        for step, log in sorted(checkpoints.items()):
            for metric, series in log.metrics.items():
                points[metric].add(step, float(series.values.mean()))
        steps = list_names([str(step) for step in sorted(checkpoints)], 4)
        guess = f"{printable(name) or 'one run'}: scores of its checkpoints, by step: {steps}"
        metrics, _ = collect_points(points)
        newest = checkpoints[max(checkpoints)]
        newest = replace(newest, name=name or "run", standard_errors={}, guesses=(*newest.guesses, guess))
        joined.append(replace(newest, axis="steps", metrics=metrics))
    return joined


def _evaluated_run(log: Log) -> tuple[str, str]:
    """Return the run and the checkpoint (best, 500) that the name of scores states; an empty one if none."""
    if log.axis == "steps":
        return log.name, ""
    if match := EVALUATED.search(log.name):
        return _without(log.name, match), match["word"]
    match = _find_checkpoint(log)
    return (_without(log.name, match), match[1]) if match else (log.name, "")


def _is_evaluation(component: str) -> bool:
    return component.isdigit() or EVALUATED.fullmatch(component) is not None


# --- components: other metrics, from each process or file ---


def _join_components(logs: Sequence[Log]) -> list[Log]:
    """Merge the logs of runs' components: processes, splits, or files with a metric each.

    Components other than the splits `train.csv` and `eval.csv` of a folder have few metrics in common, since
    arms would share them. A metric that another component has, too, is prefixed with its component.
    """
    groups: dict[tuple[str, object], dict[str, Log]] = {}
    for index, log in enumerate(logs):
        run, component = _find_component(log)
        key = (run, log.group if log.run_id else None) if component else (run, index)
        components = groups.setdefault(key, {})
        components[component if component not in components else f"/{index}"] = log
    joined: list[Log] = []
    for (run, _), components in groups.items():
        joined += [_merge_components(run, components)] if _are_components(components) else components.values()
    return joined


def _find_component(log: Log) -> tuple[str, str]:
    """Return the run and the component that a log's name or job type states; an empty component if none."""
    if log.identity:
        return log.name, ""
    run, checkpoint = _evaluated_run(log)
    if checkpoint:
        return run, checkpoint
    folder, _, stem = strip_suffix(log.name).rpartition("/")
    if len(log.metrics) == 1 and _as_words(stem).endswith(_as_words(next(iter(log.metrics)))):
        return folder, stem  # a file for each metric, as DeepSpeed's csv_monitor writes them
    for match in reversed([*re.finditer(r"[A-Za-z]+", strip_suffix(log.name))]):
        if match[0].lower() in COMPONENTS:
            return _without(log.name, match), match[0]
    job_type = log.job_type or ""
    return (log.group or log.name, job_type) if job_type.lower() in COMPONENTS else (log.name, "")


def _as_words(name: str) -> str:
    return "_" + re.sub(r"[^a-z0-9]+", "_", name.lower())


def _are_components(components: Mapping[str, Log]) -> bool:
    if len(components) < 2 or any(name.startswith("/") for name in components):
        return False
    names = {name.lower() for name in components}
    if all(map(_is_evaluation, names)):
        return True
    stems = {strip_suffix(log.name).rpartition("/")[2] for log in components.values()}
    if (
        names <= SPLITS
        and "train" in names
        and stems == {*components}
        and not any(log.run_id for log in components.values())
    ):
        return True
    counts = Counter(metric for log in components.values() for metric in _compared_metrics(log))
    return all(
        sum(counts[metric] > 1 for metric in metrics) <= MAX_SHARED * len(metrics)
        for metrics in map(_compared_metrics, components.values())
    )


def _compared_metrics(log: Log) -> list[str]:
    return [name for name in log.metrics if not (is_clock(name) or is_counter(name))]


def _merge_components(run: str, components: Mapping[str, Log]) -> Log:
    ordered = sorted(components, key=lambda name: (name.lower() not in ("train", "trainer"), name))
    are_evaluations = all(map(_is_evaluation, ordered))
    guess = f"{', '.join(ordered)}: {'evaluated checkpoints' if are_evaluations else 'logs'} of one run"
    logs, used_names = list[Log](), set[str]()
    for component in ordered:
        log = components[component]
        new_names = {
            name: f"{component}/{name}" if are_evaluations or name in used_names else name
            for name in (*log.metrics, *log.dropped)
        }
        used_names |= {*log.metrics}
        metrics = {new_names[name]: series for name, series in log.metrics.items()}
        dropped = {new_names[name]: steps for name, steps in log.dropped.items()}
        errors = {new_names[name]: error for name, error in log.standard_errors.items() if name in new_names}
        logs.append(replace(log, metrics=metrics, dropped=dropped, standard_errors=errors))
    united = unite_logs(logs, name=run or "run", run_id=None, job_type=None)
    return replace(united, guesses=(*united.guesses, guess))


def merge_parts(logs: Sequence[Log]) -> list[Log]:
    """Merge the runs whose metrics lie in several files."""
    runs: dict[object, list[Log]] = {}
    for index, log in enumerate(logs):
        runs.setdefault(log.name if log.is_part else index, []).append(log)
    return [unite_logs(parts) if len(parts) > 1 else parts[0] for parts in runs.values()]
