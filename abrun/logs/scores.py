"""Tables without a curve: one row of final scores per run, or one row per run and prompt.

`arm,seed,ifeval` has a row per run and a column per benchmark. `arm,seed,prompt,score` has a row per prompt,
and several if a prompt has several samples. A column such as `task` may name the benchmark of a row.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from abrun.errors import StoreError
from abrun.logs.key_columns import find_key_columns, key_text, name_log
from abrun.logs.log import Log, list_names, printable
from abrun.logs.rows import STEP_COLUMNS, UNNAMED, Cells, shorten_cell
from abrun.logs.tables import ARM_COLUMNS, METRIC_COLUMNS, VALUE_COLUMNS, log_from_rows
from abrun.stats.series import Series

MODEL_COLUMNS = ("model", "model_name", "checkpoint")  # settings, in a table with steps
BENCHMARK_COLUMNS = ("benchmark", "task", "dataset", "eval", "evaluation")
SCORE_COLUMNS = (*VALUE_COLUMNS, "score", "result")
PROMPT_COLUMNS = (
    *("prompt", "prompt_id", "prompt_idx", "doc_id", "question", "question_id", "problem", "problem_id"),
    *("example", "example_id", "item", "item_id", "instance", "instance_id", "task_id"),
)
SAMPLE_COLUMNS = ("sample", "sample_id", "sample_idx", "completion", "rollout", "repeat", "attempt", "trial")
TRUTH_VALUES = {"true": 1.0, "false": 0.0}
FIRST_HASH = 2**40  # prompts with a number below it keep that number; all others get a hash of their text
STEP = "step"

Row = tuple[int, Cells]  # its line number and cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Columns of a table of scores."""

    keys: Mapping[str, str]  # kind (arm, run, seed) -> column
    benchmarks: tuple[str, ...]  # columns that name what a row scores
    score: str | None  # the only column of scores, if the benchmark has a column
    prompt: str | None
    step: str | None
    ignored: frozenset[str]  # columns that are neither a key nor a score

    def run_of(self, row: Cells) -> tuple[str, ...]:
        """Return the texts that identify the run of a row."""
        return tuple(key_text(row.get(column, "")) for column in self.keys.values())

    def scores(self, row: Cells) -> dict[str, float | str]:
        """Return the scores of a row by benchmark."""
        prefix = "/".join(text for column in self.benchmarks if (text := key_text(row.get(column, ""))))
        scores: dict[str, float | str] = {}
        for column, cell in row.items():
            if column in self.ignored or column.startswith(UNNAMED) or cell == "":
                continue
            name = prefix if column == self.score else f"{prefix}/{column}" if prefix else column
            scores[name] = TRUTH_VALUES.get(cell.strip().lower(), cell) if isinstance(cell, str) else cell
        return scores


def read_scores(path: Path, name: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> list[Log]:
    """Return the runs of a table of scores; empty if it is none, such as a log with steps.

    `columns`: all column names of the file, if it has a header. Raises StoreError if a run has several rows
    that nothing tells apart.
    """
    layout = _find_layout(rows, columns or list(dict.fromkeys(column for _, row in rows for column in row)))
    if layout is None:
        return []
    runs: dict[tuple[str, ...], list[Row]] = {}
    for line, row in rows:
        runs.setdefault(layout.run_of(row), []).append((line, row))
    unnamed = next((lines for run, lines in runs.items() if not all(run)), None)
    if unnamed:
        raise StoreError(
            f"{printable(str(path))}, line {unnamed[0][0]}: no value in a column that names the run "
            f"({list_names([*layout.keys.values()])}); fill it in, or remove the line"
        )
    if layout.prompt is not None:
        return [_read_prompts(path, name, layout, run, run_rows) for run, run_rows in runs.items()]
    if layout.step is not None and not _is_one_row_per_run(layout, rows, len(runs)):
        return []
    if [*layout.keys] == ["run"] and len(runs) < len(rows) and layout.keys["run"].lower() in MODEL_COLUMNS:
        layout = replace(layout, keys={"arm": layout.keys["run"]})  # a model named twice is no run
    if layout.step is None and [*layout.keys] == ["arm"] and not layout.benchmarks:
        runs = {(*run, f"line {line}"): [(line, row)] for run, lines in runs.items() for line, row in lines}
        layout = replace(layout, keys={**layout.keys, "run": "line"})
    return [_read_final_scores(path, name, layout, run, run_rows) for run, run_rows in runs.items()]


def _find_layout(rows: Sequence[Row], columns: Sequence[str]) -> Layout | None:
    """Return the columns of a table of scores; None if no column names a run."""
    by_name = {column.strip().lower(): column for column in reversed(columns)}

    def find_column(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    keys = {
        kind: column
        for kind, column in find_key_columns(columns, rows, (*ARM_COLUMNS, *MODEL_COLUMNS)).items()
        if kind != "metric"
    }
    if [*keys] == ["arm"] and keys["arm"].lower() in MODEL_COLUMNS:
        keys = {"run": keys["arm"]}  # a name such as `hf-s0` may hold the seed
    step, prompt = find_column(STEP_COLUMNS), find_column(PROMPT_COLUMNS)
    if prompt is not None and keys.keys() == {"arm", "run", "seed"}:
        del keys["run"]  # it numbers the samples of a prompt
    steps = {row.get(step, "") for _, row in rows} if step is not None else set()
    if not keys or (prompt is not None and len(steps) > 1):
        return None
    score, metric = find_column(SCORE_COLUMNS), find_column(METRIC_COLUMNS)
    named_by = [find_column([column]) for column in BENCHMARK_COLUMNS]
    named_by += [metric] if score is not None and metric not in keys.values() else []
    benchmarks = tuple(column for column in named_by if column is not None and column not in keys.values())
    if all(isinstance(row.get(column), float) for _, row in rows for column in benchmarks):
        benchmarks = ()
    samples = {by_name[column] for column in SAMPLE_COLUMNS if column in by_name} if prompt else set()
    ignored = {*keys.values(), *benchmarks, *samples, *filter(None, (prompt, step))}
    return Layout(
        keys=keys,
        benchmarks=benchmarks,
        score=score if benchmarks else None,
        prompt=prompt,
        step=step,
        ignored=frozenset(ignored),
    )


def _is_one_row_per_run(layout: Layout, rows: Sequence[Row], num_runs: int) -> bool:
    """Return True for final scores that also name the step of the evaluated checkpoint."""
    num_steps = len({row.get(layout.step or "", "") for _, row in rows})
    evaluated = {(layout.run_of(row), *layout.scores(row)) for _, row in rows}
    return (
        "seed" in layout.keys
        and num_runs > 1
        and len(evaluated) == len(rows)
        and 2 * num_steps <= len(rows) + 1
    )


def _read_final_scores(path: Path, name: str, layout: Layout, run: Sequence[str], rows: Sequence[Row]) -> Log:
    """Return one run of a table of final scores: each metric has one value, at step 0."""
    scores: dict[str, float | str] = {}
    first_line: dict[str, int] = {}
    for line, row in rows:
        for benchmark, score in layout.scores(row).items():
            if benchmark in scores:
                raise _repeated_run_error(path, layout, run, rows[0][1], (first_line[benchmark], line))
            scores[benchmark], first_line[benchmark] = score, line
    log = log_from_rows(path, [(rows[0][0], {STEP: 0.0, **scores})], STEP, [STEP, *scores])
    columns = " and ".join(layout.keys.values())
    guess = f"final scores, one row per {columns}: windows and step one do not apply"
    return replace(
        name_log(log, name, dict(zip(layout.keys, run, strict=True)), printable(guess)), axis="final"
    )


def _repeated_run_error(
    path: Path, layout: Layout, run: Sequence[str], row: Cells, lines: tuple[int, int]
) -> StoreError:
    values = ", ".join(f"{column}={text}" for column, text in zip(layout.keys.values(), run, strict=True))
    return StoreError(
        f"{printable(str(path))}, lines {lines[0]} and {lines[1]}: two rows of {printable(values)}, and no "
        f"column with the step, the prompt or another seed; columns: {list_names([*row], 12)}; name the step "
        "column with --step-column, or add a column 'seed' or 'prompt'"
    )


def _read_prompts(path: Path, name: str, layout: Layout, run: Sequence[str], rows: Sequence[Row]) -> Log:
    """Return one run of a table of per-prompt scores: its series are over prompts, not steps."""
    assert layout.prompt is not None
    numbered = [(line, {STEP: float(index), **layout.scores(row)}) for index, (line, row) in enumerate(rows)]
    scores = dict.fromkeys(benchmark for _, row in numbered for benchmark in row if benchmark != STEP)
    log = log_from_rows(path, numbered, STEP, [STEP, *scores])
    prompts = np.array([number_prompt(row.get(layout.prompt, "")) for _, row in rows])
    metrics = {metric: average_by_prompt(series, prompts) for metric, series in log.metrics.items()}
    log = name_log(replace(log, metrics=metrics), name, dict(zip(layout.keys, run, strict=True)), "")
    return replace(log, axis="prompts", guesses=(describe_prompts(log, layout.prompt, len(rows)),))


def describe_prompts(log: Log, column: str, num_rows: int) -> str:
    """Return how the rows of one run were read, for the report."""
    num_prompts = max((len(series) for series in log.metrics.values()), default=0)
    samples = "" if num_rows <= num_prompts else ", averaged over the samples of a prompt"
    return printable(
        f"scores per prompt (column {column}){samples}, of the prompts that all runs share: windows and step "
        "one do not apply"
    )


def number_prompt(cell: float | str) -> int:
    """Return the number of a prompt, the same in every file: its own number, or else a hash of its text."""
    text = key_text(shorten_cell(cell) if isinstance(cell, str) else cell)
    if re.fullmatch(r"\d{1,12}", text, re.ASCII) and int(text) < FIRST_HASH:
        return int(text)
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return FIRST_HASH + int.from_bytes(digest[:6], "big")


def average_by_prompt(
    series: Series,  # over rows
    prompts: np.ndarray,  # [R] the number of each row's prompt
) -> Series:
    """Return the mean score of each prompt; every prompt counts the same, whatever its number of samples."""
    numbers, positions = np.unique(prompts[series.steps], return_inverse=True)
    sums = np.bincount(positions, weights=series.values, minlength=len(numbers))
    return Series(numbers.astype(np.int64), sums / np.bincount(positions, minlength=len(numbers)))
