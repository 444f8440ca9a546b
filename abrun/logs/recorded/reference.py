"""Frozen reference ensembles: the runs of one arm as a small JSON file, to commit and compare with later.

A reference holds what a verdict needs: the claims with their margins, every step of the claimed metrics in
their windows, and a sample of the other steps, including the first and the largest value. It holds no hosts,
absolute paths or environment variables.
"""

import json
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from abrun.errors import ComparisonError, StoreError
from abrun.experiment.plan import RunName, compare_hash
from abrun.logs.log import Axis
from abrun.logs.recorded.experiment import (
    RecordedExperiment,
    RecordedRun,
    Reference,
    refuse_mixed_axes,
    union_steps,
)
from abrun.logs.recorded.ledger import Ledger, append_entry, read_ledger
from abrun.recipe.claims import Compare
from abrun.recipe.experiment import BASELINE
from abrun.recipe.refusals import shortened
from abrun.runs.files import (
    PUBLIC_MODE,
    decode_non_finite,
    encode_non_finite,
    exists,
    is_file,
    read_json,
    write_file,
)
from abrun.runs.layout import EXPERIMENT
from abrun.runs.lock import file_lock
from abrun.runs.metric_names import STEP_ONE, STEP_TIME, is_peak_memory
from abrun.runs.migrations import migrate, migrate_dotted
from abrun.runs.records import Environment
from abrun.runs.schemas import checked
from abrun.stats.series import Series, Steps, window_bounds

REFERENCE_ARM, NEW_ARM = "reference", "new"
_SCHEMA_VERSION, _READ_VERSIONS = 2, (1, 2)  # version 1 has the keys of an earlier version
_NUM_KEPT_STEPS = 64  # per metric outside the windows of claims, spread over the run
_ENVIRONMENT_KEYS = ("python", "versions", "scripts", "devices", "prompts_sha256", "initial_weights_hash")
_PRIVATE_PREFIXES = ("wandb.", "trainer.env.", "initial_weights")


def freeze(
    experiment: RecordedExperiment,
    arm: str,
    path: Path,
    claims: Compare | None = None,
    ledger: Ledger | None = None,
) -> Reference | None:
    """Write the runs of an arm, with `claims` (default: its experiment's), as a reference file.

    A `ledger` records changes that are accepted later. Returns the reference that was replaced, or None.
    Raises ComparisonError if the arm does not exist, has fewer than two seeds or unfinished runs, or if the
    file exists and is not a reference.
    """
    experiment.choose_arm(arm, experiment.arms)  # raises
    runs = [run for name, run in experiment.runs.items() if name.arm == arm]
    num_seeds = len(experiment.arm(arm))
    if num_seeds < 2:
        raise ComparisonError(
            f"{experiment.name}: arm {arm} has {num_seeds} seed, but a reference needs at least two to know "
            "the spread; launch more seeds"
        )
    for run in runs:
        if not run.finished:
            raise ComparisonError(
                f"{run} is not finished ({run.status}), but a reference needs finished runs"
            )
    runs = [_with_largest_share(run) for run in runs]
    compare = (claims or experiment.compare).model_copy(update={"interim": [], "reference": None})
    grids = {
        claim.metric: union_steps(run.series(claim.metric).steps for run in runs) for claim in compare.claims
    }
    content = {
        "schema_version": _SCHEMA_VERSION,
        "name": experiment.name if arm == experiment.baseline else f"{experiment.name}, {arm}",
        "compare": compare.model_dump(mode="json", exclude_defaults=True),
        "declared_s": _claims_declared_s(experiment),
        "config": public_config(runs),
        "environment": _common_values([_frozen_environment(run) for run in runs]),
        **({"axis": experiment.axis} if experiment.axis != "steps" else {}),
    }
    content["runs"] = [
        {
            "seed": run.name.seed,
            "rerun": run.name.rerun,
            "config": _without_common(_public_settings(run.config or {}), content["config"]),
            "environment": _without_common(_frozen_environment(run), content["environment"]),
            "metrics": _frozen_metrics(run, compare, grids),
        }
        for run in runs
    ]
    if ledger:
        content["ledger"] = ledger.model_dump(mode="json")
    replaced = _read_replaced(path)
    try:
        write_file(path, _format_reference(content).encode(), mode=PUBLIC_MODE)
    except StoreError as error:
        reason = getattr(error.__cause__, "strerror", None) or str(error)
        raise ComparisonError(f"--output: {path} cannot be written: {reason}; choose another file") from None
    return replaced


def add_entry(path: Path, make_entry: Callable[[Reference], Mapping[str, Any]]) -> Reference:
    """Append the entry that `make_entry` returns for the current file to its ledger; return the reference.

    The file is locked and written atomically. Raises ComparisonError or StoreError.
    """
    load_reference(path)  # raise for other files before waiting for a lock
    with file_lock(path):
        entry = make_entry(load_reference(path))
        mode = path.stat().st_mode & 0o777
        write_file(path, _format_reference(append_entry(read_json(path), entry)).encode(), mode=mode)
    return load_reference(path)


def _read_replaced(path: Path) -> Reference | None:
    """Return the existing reference, or None. Raises ComparisonError for a file that must not be replaced."""
    if not is_file(path):
        return None
    try:
        reference = load_reference(path)
    except (ComparisonError, StoreError):
        raise ComparisonError(
            f"--output: {path} exists and is not a reference that this abrun reads; choose another file"
        ) from None
    if reference.ledger and reference.ledger.entries:
        raise ComparisonError(
            f"--output: {path} has a ledger (entries: {len(reference.ledger.entries)}), which would be lost; "
            "choose another file"
        )
    return reference


def _format_reference(content: Mapping[str, Any]) -> str:
    """Return the text of a reference file, with one line per run and per ledger entry."""
    head = {key: value for key, value in content.items() if key not in ("runs", "ledger")}
    sections = [json.dumps(encode_non_finite(head), indent=1, allow_nan=False).removesuffix("\n}")]
    sections.append(f' "runs": {_format_rows(content["runs"])}')
    if "ledger" in content:
        ledger = {key: value for key, value in content["ledger"].items() if key != "entries"}
        start = json.dumps(ledger, allow_nan=False).removesuffix("}")
        sections.append(
            f' "ledger": {start}, "entries": {_format_rows(content["ledger"].get("entries", ()))}}}'
        )
    return ",\n".join(sections) + "\n}\n"


def _format_rows(rows: Sequence[Any]) -> str:
    lines = [json.dumps(encode_non_finite(row), allow_nan=False) for row in rows]
    return "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else "[]"


def load_reference(path: Path) -> Reference:
    """Return the reference in a file. Raises ComparisonError if it is not one, or of another version."""
    is_folder = is_file(path / EXPERIMENT)
    content = read_json(path) if is_file(path) else {}
    if is_folder or "recipe" in content:
        directory = shlex.quote(str(path if is_folder else path.parent))
        raise ComparisonError(
            f"{path}: belongs to an experiment and is not a reference; make one from its runs: abrun "
            f"reference save {directory} --output reference.json"
        )
    if not is_file(path):
        problem = "not a file" if exists(path) else "no such file"
        raise ComparisonError(f"reference: got {str(path)!r}, {problem}; make one with abrun reference save")
    if content.get("schema_version") not in _READ_VERSIONS or "runs" not in content:
        version = shortened(content.get("schema_version"))
        raise ComparisonError(
            f"{path}: schema_version is {version}, but this abrun reads {_SCHEMA_VERSION}; make the "
            "reference again with abrun reference save"
        )
    try:
        compare = Compare.model_validate(migrate({"compare": content["compare"]})["compare"])
        runs = tuple(_load_run(row, content, path) for row in content["runs"])
        return Reference(
            name=str(content["name"]),
            compare=compare,
            runs=runs,
            config=migrate_dotted(dict(content["config"])),
            environment=dict(content["environment"]),
            ledger=read_ledger(content, str(path)),
            declared_s=None if content.get("declared_s") is None else float(content["declared_s"]),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ComparisonError(
            f"{path}: not a reference: {_one_line(error)}; make one with abrun reference save"
        ) from None


def make_regression_experiment(
    experiment: RecordedExperiment, reference: Reference, arm: str
) -> RecordedExperiment:
    """Return one arm of an experiment as the treatment of a reference, with the reference's claims.

    Configuration keys that the reference does not hold, such as paths, are not compared.
    """
    experiment.choose_arm(arm, experiment.arms)  # raises
    if reference.runs and reference.runs[0].axis != experiment.axis:
        old_run = reference.runs[0]
        refuse_mixed_axes([(old_run.axis, old_run.place), (experiment.axis, experiment.name)])
    reference_keys = {key for run in reference.runs for key in run.config or {}}
    runs = {run.name: run for run in reference.runs}
    new_arm = NEW_ARM if arm in (BASELINE, REFERENCE_ARM) else arm  # what is under test is neither
    for name, run in experiment.runs.items():
        if name.arm == arm and not name.rerun:
            config = {key: (run.config or {}).get(key) for key in reference_keys} if run.config else None
            new_name, identity = replace(name, arm=new_arm), run.identity
            if identity and identity.get("arm") == arm:
                identity = {**identity, "arm": new_arm}
            runs[new_name] = replace(run, name=new_name, config=config, identity=identity)
    treatment_name = f"{experiment.name}'s arm '{arm}'" if len(experiment.arms) > 1 else experiment.name
    declared_s = -math.inf if reference.declared_s is None else reference.declared_s
    is_any_run_older = any(run.span_s and run.span_s[0] < declared_s for run in runs.values())
    return RecordedExperiment(
        name=f"{treatment_name} against {reference.name}",
        arms=(REFERENCE_ARM, new_arm),
        compare=reference.compare,
        directory=experiment.directory,
        launched_compare_sha256=None if is_any_run_older else compare_hash(reference.compare),
        launched_pairs=len(reference.runs),
        left_out=experiment.left_out,
        runs=runs,
        reference=reference,
        regression=True,
    )


def _claims_declared_s(experiment: RecordedExperiment) -> int:
    """Return when an experiment's claims were declared: before its runs, or else now."""
    starts = [run.span_s[0] for run in experiment.runs.values() if run.span_s]
    if starts and compare_hash(experiment.compare) == experiment.launched_compare_sha256:
        return math.floor(min(starts))
    return round(time.time())


def public_config(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the values shared by the configurations of runs, without machine-specific ones."""
    return _common_values([_public_settings(run.config or {}) for run in runs])


def public_diff(diff: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, Any]]:
    """Return the part of a treatment's diff that a reference would hold."""
    return {
        key: (old, new)
        for key, (old, new) in diff.items()
        if len(_public_settings({key: old})) and len(_public_settings({key: new}))
    }


def _frozen_metrics(run: RecordedRun, compare: Compare, grids: Mapping[str, Steps]) -> dict[str, Any]:
    metric_names = [*(claim.metric for claim in compare.claims), *STEP_ONE, STEP_TIME]
    metric_names += filter(is_peak_memory, run.metrics)
    metrics = {}
    for metric in dict.fromkeys(metric_names):
        if metric in run.metrics:
            windows = [
                window_bounds(claim.window, grids[metric], metric)
                for claim in compare.claims
                if claim.metric == metric and len(grids[metric])
            ]
            series = _thin_series(run.series(metric), windows)
            metrics[metric] = {"steps": series.steps.tolist(), "values": series.values.tolist()}
            if series.recounted:
                metrics[metric]["recounted"] = series.recounted
    return metrics


def _thin_series(series: Series, windows: Sequence[tuple[int, int]]) -> Series:
    """Keep every step in the windows, and a sample elsewhere with the largest and first non-finite value."""
    size = len(series)
    keep = np.zeros(size, bool)
    keep[np.linspace(0, size - 1, min(size, _NUM_KEPT_STEPS)).round().astype(int)] = True
    keep[np.argmax(np.nan_to_num(series.values, nan=-np.inf))] = True
    keep[np.flatnonzero(~np.isfinite(series.values))[:1]] = True
    for first_step, last_step in windows:
        keep |= (first_step <= series.steps) & (series.steps <= last_step)
    return Series(series.steps[keep], series.values[keep], series.recounted)


def _load_run(row: Mapping[str, Any], content: Mapping[str, Any], path: Path) -> RecordedRun:
    seed, rerun = row["seed"], row["rerun"]
    if type(seed) is not int or type(rerun) is not int:
        raise ValueError(f"got seed {shortened(seed)}, rerun {shortened(rerun)}; expected whole numbers")
    metrics = {
        metric: _load_series(metric, stored_series) for metric, stored_series in row["metrics"].items()
    }
    axis = content.get("axis", "steps")  # files without scores do not say
    if axis not in get_args(Axis):
        raise ValueError(f"axis: got {shortened(axis)}; expected one of {', '.join(get_args(Axis))}")
    environment = {**content["environment"], **row["environment"]}
    checked(Environment, environment, path)
    config = migrate_dotted({**content["config"], **row["config"]})
    runs_per_gpu = config.get("cluster.runs_per_gpu")
    return RecordedRun(
        name=RunName(arm=REFERENCE_ARM, seed=seed, rerun=rerun),
        place=str(path),
        status="finished",
        config=config,
        runs_per_gpu=runs_per_gpu if type(runs_per_gpu) is int else 1,
        environment=environment,
        metrics=metrics,
        axis=axis,
        thinned=True,
    )


def _load_series(metric: str, stored_series: Mapping[str, Any]) -> Series:
    steps = np.array(stored_series["steps"], np.int64)
    values = np.array([decode_non_finite(value) for value in stored_series["values"]], np.float64)
    if steps.ndim != 1 or steps.shape != values.shape or not len(steps) or (np.diff(steps) <= 0).any():
        raise ValueError(f"{shortened(metric)}: expected increasing steps with one value each")
    return Series(steps, values, int(stored_series.get("recounted", 0)))


def _with_largest_share(run: RecordedRun) -> RecordedRun:
    """Return a run whose configuration says how many runs shared its GPUs at most, over all of its starts."""
    if not run.config or run.runs_per_gpu == 1:
        return run
    return replace(run, config={**run.config, "cluster.runs_per_gpu": run.runs_per_gpu})


def _public_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without values specific to one machine or person."""
    return {
        key: value
        for key, value in config.items()
        if not key.startswith(_PRIVATE_PREFIXES) and not (isinstance(value, str) and os.path.isabs(value))
    }


def _frozen_environment(run: RecordedRun) -> dict[str, Any]:
    return {key: (run.environment or {}).get(key) for key in _ENVIRONMENT_KEYS}


def _without_common(values: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in common}


def _common_values(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first_config, *other_configs = configs
    return {
        key: value
        for key, value in first_config.items()
        if all(config.get(key) == value for config in other_configs)
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
