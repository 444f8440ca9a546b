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
from abrun.logs.foreign.columns import NO_CELLS, Cells, Table, TableBuilder
from abrun.logs.foreign.values import shorten_cell
from abrun.logs.log import Log
from abrun.logs.naming import EVALUATED
from abrun.logs.rows import STEP_COLUMNS, UNNAMED
from abrun.logs.tables import (
    ARM_COLUMNS,
    BENCHMARK_COLUMNS,
    METRIC_COLUMNS,
    MODEL_COLUMNS,
    PROMPT_COLUMNS,
    VALUE_COLUMNS,
    find_key_columns,
    group_rows,
    key_text,
    log_from_table,
    name_log,
)
from abrun.logs.words import COLUMNS, find_columns
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Series

SCORE_COLUMNS = (*VALUE_COLUMNS, "score", "result")
TRUTH_VALUES = {"true": 1.0, "false": 0.0}
FIRST_HASH = 2**40  # prompts with a number below it keep that number; all others get a hash of their text
STEP = "step"
MAX_RUNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Columns of a table of scores."""

    keys: Mapping[str, str]  # kind (arm, run, seed) -> column
    benchmarks: tuple[str, ...]  # columns that name what a row scores
    score: str | None  # the only column of scores, if the benchmark has a column
    prompt: str | None
    step: str | None
    ignored: frozenset[str]  # columns that are neither a key nor a score

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


def read_scores(path: Path, name: str, table: Table) -> list[Log]:
    """Return the runs of a table of scores; empty if it is none, such as a log with steps.

    Raises StoreError if a run has several rows that nothing tells apart.
    """
    layout = _find_layout(table)
    if layout is None:
        return []
    runs, groups = group_rows(table, [*layout.keys.values()], MAX_RUNS)
    if not runs and len(table) and layout.step is None:
        raise StoreError(f"{printable(str(path))}: got more than {MAX_RUNS} runs; split the file")
    if not runs:
        return []
    unnamed = next((number for number, run in enumerate(runs) if not all(run)), None)
    if unnamed is not None:
        row = int(np.flatnonzero(groups == unnamed)[0])
        raise StoreError(
            f"{printable(str(path))}, line {table.lines[row]}: no value in a column that names the run "
            f"({list_names([*layout.keys.values()])}); fill it in, or remove the line"
        )
    if layout.prompt is None:
        if layout.step is not None and not _is_one_row_per_run(layout, table, len(runs)):
            return []
        is_model = layout.keys.get("run", "").lower() in MODEL_COLUMNS
        if [*layout.keys] == ["run"] and len(runs) < len(table) and is_model:
            layout = replace(layout, keys={"arm": layout.keys["run"]})  # a model named twice is no run
        if layout.step is None and [*layout.keys] == ["arm"] and not layout.benchmarks:
            runs = [(*runs[group], f"line {line}") for group, line in zip(groups, table.lines, strict=True)]
            groups, layout = np.arange(len(table)), replace(layout, keys={**layout.keys, "run": "line"})
    read_run = _read_final_scores if layout.prompt is None else _read_prompts
    tables = zip(runs, table.split(groups, len(runs)), strict=True)
    return [read_run(path, name, layout, run, run_table) for run, run_table in tables]


def _find_layout(table: Table) -> Layout | None:
    """Return the columns of a table of scores; None if no column names a run or a benchmark."""
    columns = table.names()

    def find_column(words: Sequence[str]) -> str | None:
        return next(iter(find_columns(columns, words)), None)

    # `best` and `last` are evaluations of one run
    evaluated = find_column(["checkpoint"])
    if not all(EVALUATED.fullmatch(key_text(cell)) for cell in {*table.cells(evaluated)}):
        evaluated = None
    key_names = [column for column in columns if column != evaluated]
    keys = {
        kind: column
        for kind, column in find_key_columns(table, key_names, (*ARM_COLUMNS, *MODEL_COLUMNS)).items()
        if kind != "metric"
    }
    if [*keys] == ["arm"] and keys["arm"].lower() in MODEL_COLUMNS:
        keys = {"run": keys["arm"]}  # a name such as `hf-s0` may hold the seed
    step, prompt = find_column(STEP_COLUMNS), find_column(PROMPT_COLUMNS)
    if prompt is not None and keys.keys() == {"arm", "run", "seed"}:
        del keys["run"]  # it numbers the samples of a prompt
    if prompt is not None and len({*table.cells(step)}) > 1:
        return None
    score, metric = find_column(SCORE_COLUMNS), find_column(METRIC_COLUMNS)
    named_by = [evaluated, *(find_column([column]) for column in BENCHMARK_COLUMNS)]
    has_benchmark = any(named_by)
    named_by += [metric] if score is not None and metric not in keys.values() else []
    benchmarks = tuple(column for column in named_by if column is not None and column not in keys.values())
    filled = [table.columns.get(name, NO_CELLS) for name in benchmarks]
    if all(column.all_texts is None and len(column) == len(table) for column in filled):  # numbers alone
        benchmarks = ()
    if not keys and (step or prompt or score is None or not (has_benchmark and benchmarks)):
        return None
    samples = find_columns(columns, COLUMNS["sample"]) if prompt else []
    ignored = {*keys.values(), *benchmarks, *samples, *filter(None, (prompt, step))}
    return Layout(
        keys=keys,
        benchmarks=benchmarks,
        score=score if benchmarks else None,
        prompt=prompt,
        step=step,
        ignored=frozenset(ignored),
    )


def _is_one_row_per_run(layout: Layout, table: Table, num_runs: int) -> bool:
    """Return True for final scores that also name the step of the evaluated checkpoint."""
    num_steps = len({*table.cells(layout.step)})
    if "seed" not in layout.keys or num_runs < 2 or 2 * num_steps > len(table) + 1:
        return False
    keys = layout.keys.values()
    evaluated = {
        (*(key_text(row.get(key, "")) for key in keys), *layout.scores(row)) for _, row in table.iterate()
    }
    return len(evaluated) == len(table)


def _read_final_scores(path: Path, name: str, layout: Layout, run: Sequence[str], table: Table) -> Log:
    scores: dict[str, float | str] = {}
    first_line: dict[str, int] = {}
    for line, row in table.iterate():
        for benchmark, score in layout.scores(row).items():
            if benchmark in scores:
                raise _repeated_run_error(path, layout, run, table.names(), (first_line[benchmark], line))
            scores[benchmark], first_line[benchmark] = score, line
    builder = TableBuilder(table.place)
    builder.add(int(table.lines[0]), {STEP: 0.0, **scores})
    log = log_from_table(path, builder.build([STEP, *scores]), STEP)
    columns = " and ".join(layout.keys.values() or layout.benchmarks)
    guess = f"final scores, one row per {columns}: windows and step one do not apply"
    return replace(
        name_log(log, name, dict(zip(layout.keys, run, strict=True)), printable(guess)), axis="final"
    )


def _repeated_run_error(
    path: Path, layout: Layout, run: Sequence[str], columns: list[str], lines: tuple[int, int]
) -> StoreError:
    values = ", ".join(f"{column}={text}" for column, text in zip(layout.keys.values(), run, strict=True))
    values = values or f"one {' and '.join(layout.benchmarks)}"
    return StoreError(
        f"{printable(str(path))}, lines {lines[0]} and {lines[1]}: two rows of {printable(values)}, and no "
        f"column with the step, the prompt or another seed; columns: {list_names(columns, 12)}; name the "
        "step column with --step-column, or add a column 'seed' or 'prompt'"
    )


def _read_prompts(path: Path, name: str, layout: Layout, run: Sequence[str], table: Table) -> Log:
    """Return one run of a table of per-prompt scores: its series are over prompts, not steps."""
    assert layout.prompt is not None
    builder = TableBuilder(table.place)
    for index, (line, row) in enumerate(table.iterate()):
        builder.add(line, {STEP: float(index), **layout.scores(row)})
    scored = builder.build()
    log = log_from_table(path, replace(scored, header=[STEP, *scored.columns]), STEP)
    prompts = np.array([number_prompt(cell) for cell in table.cells(layout.prompt)])
    metrics = {metric: average_by_prompt(series, prompts) for metric, series in log.metrics.items()}
    log = name_log(replace(log, metrics=metrics), name, dict(zip(layout.keys, run, strict=True)), "")
    num_prompts = max(map(len, metrics.values()), default=0)
    samples = ", averaged over the samples of a prompt" * (len(table) > num_prompts)
    guess = (
        f"scores per prompt (column {layout.prompt}){samples}, of the prompts that all runs share: windows "
    )
    guess = printable(f"{guess}and step one do not apply")
    return replace(log, axis="prompts", guesses=(guess,))


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
