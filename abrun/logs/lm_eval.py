"""Reader for the samples of lm-evaluation-harness (`--log_samples`): scores per document.

A model's folder has a file `samples_<task>_<time>.jsonl` for each task, with a row per document and filter. A
row has the document's number and hash, the names of its metrics, and each metric under its own key
(EleutherAI/lm-evaluation-harness, `lm_eval/evaluator.py` and `result_schema.py` of August 2026).
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from abrun.errors import StoreError
from abrun.logs.log import NOTHING_RECORDED, Log, list_names, printable, wrap_read_errors
from abrun.logs.rows import parse_json
from abrun.logs.scores import average_by_prompt, number_prompt
from abrun.logs.tables import TORN_NOTE
from abrun.regular_files import read_regular
from abrun.stats.series import Series

SAMPLES_FILE = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?)\.jsonl")
GUESS = "samples of lm-evaluation-harness: scores per prompt; windows and step one do not apply"


def is_samples_file(path: Path) -> bool:
    """Return True for the name of a file with the samples of one task."""
    return SAMPLES_FILE.fullmatch(path.name) is not None


def read_samples(files: Sequence[Path], name: str) -> Log:
    """Return the scores of one model from its files of samples, as metrics `<task>/<metric>[,<filter>]`.

    Of several evaluations of a task, the last counts.
    """
    newest: dict[str, Path] = {}
    for path in sorted(files, key=lambda path: _match_name(path)["time"]):
        newest[_match_name(path)["task"]] = path
    scores: dict[str, tuple[list[int], list[float]]] = {}
    notes: list[str] = []
    not_numbers: dict[str, None] = {}
    prompts: set[str] = set()
    for task, path in sorted(newest.items()):
        rows, task_notes = _read_rows(path)
        notes += [f"{task}: {note}" for note in task_notes]
        for line, row in rows:
            filter_name, metric_names = row.get("filter", "none"), row.get("metrics")
            if "doc_id" not in row or not isinstance(metric_names, list):
                raise StoreError(
                    f"{printable(str(path))}, line {line}: no 'doc_id' and 'metrics'; expected a sample of "
                    "lm-evaluation-harness 0.4.7 or newer: evaluate again with --log_samples"
                )
            document = number_prompt(f"{row['doc_id']} {row.get('doc_hash', '')}".strip())
            prompts.add(str(row.get("prompt_hash", "")))
            for metric in map(str, metric_names):
                score_name = f"{task}/{metric}" + ("" if filter_name == "none" else f",{filter_name}")
                if isinstance(row.get(metric), bool | int | float):
                    documents, values = scores.setdefault(score_name, ([], []))
                    documents.append(document)
                    values.append(float(row[metric]))
                else:
                    not_numbers[score_name] = None
    if not_numbers:
        notes.append(f"no single number per document, so left out: {list_names([*not_numbers])}")
    if len(newest) < len(files):
        notes.append(f"{len(files) - len(newest)} older evaluations of the same tasks were left out")
    return Log(
        name=name,
        place=printable(str(files[-1].parent)),
        axis="prompts",
        metrics={metric: _make_series(*points) for metric, points in scores.items()},
        config={"lm_eval.prompts": hashlib.sha256("".join(sorted(prompts)).encode()).hexdigest()[:12]},
        guesses=(GUESS,),
        notes=tuple(notes if scores else [*notes, NOTHING_RECORDED]),
    )


def _match_name(path: Path) -> re.Match[str]:
    match = SAMPLES_FILE.fullmatch(path.name)
    assert match is not None
    return match


def _make_series(documents: Sequence[int], values: Sequence[float]) -> Series:
    rows = Series(np.arange(len(values)), np.array(values, float))
    return average_by_prompt(rows, np.array(documents))


def _read_rows(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """Return the samples of a file with their line numbers, and a note on a torn last line."""
    with wrap_read_errors(path):
        lines = read_regular(path).split(b"\n")
    last_index = max((index for index, line in enumerate(lines) if line.strip()), default=-1)
    rows: list[tuple[int, dict[str, Any]]] = []
    for index, line in enumerate(lines):
        row = parse_json(line) if line.strip() else {}
        if isinstance(row, dict):
            rows += [(index + 1, row)] if row else []
        elif index == last_index:
            return rows, [TORN_NOTE]
        else:
            raise StoreError(
                f"{printable(str(path))}, line {index + 1}: not a JSON object; remove the line, or "
                "evaluate again"
            )
    return rows, []
