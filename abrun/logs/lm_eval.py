"""Reader for lm-evaluation-harness: samples (`--log_samples`), scores per document, or else totals.

A model's folder has a file `samples_<task>_<time>.jsonl` for each task, with a row per document and filter. A
row has the document's number and hash, the names of its metrics, and each metric under its own key
(EleutherAI/lm-evaluation-harness, `lm_eval/evaluator.py` and `result_schema.py` of August 2026). The totals
of all tasks are in `results_<time>.json`: `{"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.01}}}`.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from abrun.errors import StoreError
from abrun.logs.foreign.files import MAX_DOCUMENT_BYTES, read_file
from abrun.logs.foreign.values import Points, as_mapping, as_name, as_number, as_text, parse_json, to_float
from abrun.logs.log import NOTHING_RECORDED, Log
from abrun.logs.rows import check_number_of_metrics
from abrun.logs.scores import average_by_prompt, number_prompt
from abrun.logs.tables import read_objects
from abrun.runs.redaction import list_names, printable
from abrun.stats.series import Series

TIME = r"(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?)"
SAMPLES_FILE = re.compile(rf"samples_(?P<task>.+)_{TIME}\.jsonl")
TOTALS_FILE = re.compile(rf"results_{TIME}\.json")
STANDARD_ERROR = "_stderr"
TOTALS_GUESS = "results_*.json holds totals and their errors over prompts; --log_samples allows a paired test"
GUESS = "samples of lm-evaluation-harness: scores per prompt; windows and step one do not apply"


def read_samples(files: Sequence[Path], name: str) -> Log:
    """Return the scores of one model from its files of samples, as metrics `<task>/<metric>[,<filter>]`.

    Of several evaluations of a task, the last counts.
    """
    matches = [(SAMPLES_FILE.fullmatch(path.name), path) for path in files]
    newest = {  # the last of a task
        task: path
        for _, task, path in sorted((match["time"], match["task"], path) for match, path in matches if match)
    }
    scores: dict[str, Points] = defaultdict(Points)  # documents as steps
    notes: list[str] = []
    not_numbers: dict[str, None] = {}
    prompts: set[str] = set()
    for task, path in sorted(newest.items()):
        place, torn_notes = printable(str(path)), list[str]()
        for line, row in read_objects(path, torn_notes):
            filter_name, metric_names = as_name(row.get("filter", "none")), row.get("metrics")
            number = as_text(row.get("doc_id"))
            if number is None or filter_name is None or not isinstance(metric_names, list):
                raise StoreError(
                    f"{place}, line {line}: no 'doc_id' and 'metrics'; expected a sample of "
                    "lm-evaluation-harness 0.4.7 or newer: evaluate again with --log_samples"
                )
            document = number_prompt(f"{number} {as_text(row.get('doc_hash')) or ''}".strip())
            prompts.add(as_name(row.get("prompt_hash")) or "")
            for metric in filter(None, map(as_name, metric_names)):
                score_name = f"{task}/{metric}" + ("" if filter_name == "none" else f",{filter_name}")
                score = row.get(metric)
                if isinstance(score, bool | int | float):
                    scores[score_name].add(document, as_number(score) or 0.0)
                else:
                    not_numbers[score_name] = None
            check_number_of_metrics(len(scores) + len(not_numbers), place)
        notes += [f"{task}: {note}" for note in torn_notes]
    if not_numbers:
        notes.append(f"no single number per document, so left out: {list_names([*not_numbers])}")
    if len(newest) < len(files):
        notes.append(f"{len(files) - len(newest)} older evaluations of the same tasks were left out")
    digest = hashlib.sha256("".join(sorted(prompts)).encode(errors="replace"))
    return Log(
        name=name,
        place=printable(str(files[-1].parent)),
        axis="prompts",
        metrics={
            metric: average_by_prompt(
                Series(np.arange(len(points.values)), np.array(points.values)), np.array(points.steps)
            )
            for metric, points in scores.items()
        },
        config={"lm_eval.prompts": digest.hexdigest()[:12]},
        guesses=(GUESS,),
        notes=tuple(notes if scores else [*notes, NOTHING_RECORDED]),
    )


def read_totals(files: Sequence[Path], name: str) -> Log:
    """Return the totals of one model's last evaluation, as metrics `<task>/<metric>[,<filter>]`."""
    path = max(files)  # the time is in the name
    place = printable(str(path))
    document = parse_json(read_file(path, MAX_DOCUMENT_BYTES), place)
    results = document.get("results") if isinstance(document, dict) else None
    if not isinstance(results, dict):
        raise StoreError(f"{place}: no 'results'; expected totals of lm-evaluation-harness: evaluate again")
    totals: dict[str, float] = {}
    errors: dict[str, float] = {}
    for task, scores in results.items():
        for key, value in as_mapping(scores).items():
            metric, _, filter_name = key.partition(",")
            label = f"{task}/{metric}" + (f",{filter_name}" if filter_name not in ("", "none") else "")
            if isinstance(value, bool) or not isinstance(value, int | float) or not as_name(label):
                continue
            if metric.endswith(STANDARD_ERROR):
                errors[label.replace(STANDARD_ERROR, "")] = to_float(value)
            else:
                totals[label] = to_float(value)
    check_number_of_metrics(len(totals), place)
    notes = [f"older evaluations left out: {len(files) - 1}"] * (len(files) > 1)
    return Log(
        name=name,
        place=place,
        axis="final",
        metrics={label: Series(np.zeros(1, np.int64), np.array([total])) for label, total in totals.items()},
        standard_errors=errors,
        guesses=(TOTALS_GUESS,),
        notes=tuple(notes if totals else [*notes, NOTHING_RECORDED]),
    )
