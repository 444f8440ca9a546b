"""Convergence of the runs of an MLPerf submission: how many samples or epochs each took.

The rules are those of mlcommons/logging, mlperf_logging/rcp_checker/rcp_checker.py (version 4.1.59).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from abrun.errors import ComparisonError, StoreError
from abrun.logs.log import wrap_read_errors
from abrun.logs.mlperf import EVALUATIONS, Event, is_mlperf_log, is_number, read_events
from abrun.redaction import printable
from abrun.regular_files import exists, is_directory, is_file

RESULT_FILES = "result_*.txt"  # of a submission; a folder without any may name its logs differently
FAILED_CONVERGENCE = 1e9  # in place of that of a run that did not reach its target
IN_SAMPLES = {  # benchmarks whose convergence is in samples; the others' is in epochs
    *("llama2_70b_lora", "flux1", "llama31_405b", "llama31_8b", "gpt_oss_20b", "deepseekv3_671b"),
    *("qwen35_397b_grpo", "dlrmv4", "stable_diffusion"),
}
STABLE_DIFFUSION = "stable_diffusion"
# Its target has two parts, which are evaluated apart: metric -> (bound, is an upper bound)
STABLE_DIFFUSION_TARGET = {"FID": (90.0, True), "CLIP": (0.15, False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRun:
    """One run of a submission."""

    path: Path
    benchmark: str
    batch_size: float
    has_converged: bool = True
    convergence: float = FAILED_CONVERGENCE  # samples or epochs


def read_submission(folder: Path, benchmark: str, *, axis: str | None = None) -> list[SubmittedRun]:
    """Return the runs of a benchmark in a folder. Raises ComparisonError if they are not one submission.

    `axis`: the metadata that places an evaluation, if it is not that of the benchmark.
    """
    runs = [_read_run(path, benchmark, axis) for path in _list_files(folder)]
    other = next((run for run in runs if run.batch_size != runs[0].batch_size), None)
    if other is not None:
        raise ComparisonError(
            f"{printable(str(folder))}: global_batch_size is {runs[0].batch_size:g} in {runs[0].path.name} "
            f"and {other.batch_size:g} in {other.path.name}; a submission has one: move the others elsewhere"
        )
    return runs


def _list_files(folder: Path) -> list[Path]:
    place = printable(str(folder))
    with wrap_read_errors(folder):
        if not exists(folder):
            raise StoreError(f"{place}: no such folder; give the folder of a submission's {RESULT_FILES}")
        if not is_directory(folder):
            return [folder]
        files = sorted(folder.glob(RESULT_FILES))
        files = files or sorted(path for path in folder.iterdir() if is_file(path) and is_mlperf_log(path))
    if not files:
        raise StoreError(f"{place}: no MLPerf logs found; give the folder of a submission's {RESULT_FILES}")
    return files


def _read_run(path: Path, benchmark: str, axis: str | None) -> SubmittedRun:
    events, _ = read_events(path)
    values = {event.key: event.value for event in events}  # the last of each key counts
    logged, batch_size = values.get("submission_benchmark"), values.get("global_batch_size")
    if not isinstance(logged, str):
        raise _missing_key(path, "submission_benchmark")
    if logged != benchmark:
        raise ComparisonError(
            f"{printable(str(path))}: is a run of {printable(logged)}, but the references are of {benchmark}"
            f"; give rcps_{printable(logged)}.json of its round"
        )
    if not is_number(batch_size) or batch_size <= 0:
        raise _missing_key(path, "global_batch_size above 0")
    axis = axis or ("samples_count" if benchmark in IN_SAMPLES else "epoch_num")
    run = SubmittedRun(path=path, benchmark=benchmark, batch_size=batch_size)
    convergence = _find_convergence(events, benchmark, axis, path)
    return replace(run, has_converged=False) if convergence is None else replace(run, convergence=convergence)


def _missing_key(path: Path, key: str) -> StoreError:
    return StoreError(f"{printable(str(path))}: no event {key}; log it with mlperf_logging.mllog")


def _find_convergence(events: Sequence[Event], benchmark: str, axis: str, path: Path) -> float | None:
    """Return where the last evaluation before the successful end of the run is; None without such an end."""
    end = next((index for index, event in reversed([*enumerate(events)]) if event.key == "run_stop"), None)
    if end is None or events[end].metadata.get("status") != "success":
        return None
    evaluations = [event for event in events[:end] if event.key in EVALUATIONS]
    if not evaluations:
        raise _missing_key(path, "eval_accuracy before the run_stop of a success")
    for event in evaluations:
        if not is_number(event.metadata.get(axis)):
            raise StoreError(
                f"{printable(str(path))}, line {event.line}: {event.key} lacks {axis} in its metadata; "
                f"{benchmark} is measured by it"
            )
    if benchmark == STABLE_DIFFUSION:
        return _first_passing(evaluations, axis, path)
    position = float(evaluations[-1].metadata[axis])
    return round(position, 3) if axis == "epoch_num" else position


def _first_passing(evaluations: Sequence[Event], axis: str, path: Path) -> float:
    """Return the first position at which both parts of the target of Stable Diffusion are met."""
    scores: dict[float, dict[str, float]] = {}
    for event in evaluations:
        if is_number(event.value):
            metric = str(event.metadata.get("metric"))
            scores.setdefault(float(event.metadata[axis]), {})[metric] = event.value
    passing = [position for position, parts in scores.items() if _meets_target(parts)]
    if not passing:
        raise _missing_key(path, "eval_accuracy that meets the target of FID and CLIP")
    return min(passing)


def _meets_target(scores: Mapping[str, float]) -> bool:
    return all(
        metric in scores and (scores[metric] <= bound if is_upper else scores[metric] >= bound)
        for metric, (bound, is_upper) in STABLE_DIFFUSION_TARGET.items()
    )
