"""Loading of experiments from the run store for a comparison."""

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from abrun.errors import ComparisonError, RecipeError, StoreError
from abrun.experiment.plan import describe_decisions, launched_compare_hash
from abrun.logs.log import sanitize_recording
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.logs.recorded.reference import load_reference
from abrun.logs.stored import read_recording
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import listed
from abrun.recipe.experiment import parse_stored_recipe, parse_stored_run
from abrun.recipe.reading import dotted
from abrun.recipe.run import can_change_numbers
from abrun.runs.experiment import EXPERIMENT, REFERENCE, open_experiment, planned_runs, run_dir
from abrun.runs.files import UnreadableError, is_directory, wrap_read_errors
from abrun.runs.layout import RunName
from abrun.runs.migrations import migrate_dotted
from abrun.runs.records import RunRecord
from abrun.runs.redaction import display_safe, display_safe_tree, printable
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState, read_state
from abrun.runs.traces import FOLDER, StoredTrace, read_trace

URL_PATTERN = r"https?://[A-Za-z0-9._:-]+(/[A-Za-z0-9._~%-]+)+"


def load_experiment(experiment_dir: Path) -> RecordedExperiment:
    """Return a stored experiment. Raises StoreError if a file is missing, damaged or not abrun's."""
    path = experiment_dir / EXPERIMENT
    content = open_experiment(experiment_dir)
    missing = [
        key
        for key in ("experiment", "recipe", "runs", "treatment_diff", "compare_sha256")
        if key not in content
    ]
    if missing:
        raise StoreError(f"{path}: {missing[0]}: missing; launch the recipe again with another --name")
    try:
        recipe = parse_stored_recipe(content["recipe"])
    except RecipeError as error:
        raise StoreError(f"{path}: {error}; use the abrun version that launched it to compare") from None
    names = planned_runs(experiment_dir)
    loaded = {name: _load_run(RunDir(run_dir(experiment_dir, name)), name) for name in names}
    injected = recipe.control_arms
    return RecordedExperiment(
        name=printable(str(content["experiment"])),
        directory=experiment_dir,
        arms=(recipe.baseline, *(arm for arm in recipe.arms if arm != recipe.baseline)),
        compare=recipe.compare,
        treatment_diff=display_safe_tree(content["treatment_diff"]),
        launched_compare_sha256=launched_compare_hash(content["compare_sha256"], recipe.compare),
        launched_pairs=content.get("launched_pairs", len(recipe.seeds)),
        decided=tuple(
            Code.DECIDED_AT_LAUNCH(decision=display_safe(line))
            for line in describe_decisions(content.get("decided", {}))
        ),
        reference=load_reference(experiment_dir / REFERENCE) if recipe.compare.reference else None,
        runs={name: run for name, run in loaded.items() if name.arm not in injected},
        injected=injected,
        controls={name: run for name, run in loaded.items() if name.arm in injected},
        trace=_read_trace(experiment_dir, loaded),
    )


def choose_baseline(experiment: RecordedExperiment, arm: str) -> RecordedExperiment:
    """Return a launched experiment with another of its arms as the baseline, compared with all the others.

    Reruns, controls and the trace belong to the launched baseline and are dropped. Raises ComparisonError for
    an unknown arm.
    """
    launched = experiment.baseline
    if arm not in experiment.arms:
        raise ComparisonError(f"--baseline: got {arm!r}; allowed: {listed(experiment.arms)}")
    if arm == launched:
        return experiment
    differences = {launched: {}, **(experiment.treatment_diff or {})}
    launched_values = {key: pair[0] for keys in differences.values() for key, pair in keys.items()}
    values = {
        name: launched_values | {key: pair[1] for key, pair in keys.items()}
        for name, keys in differences.items()
    }
    treatments = [name for name in experiment.arms if name != arm]
    return replace(
        experiment,
        arms=(arm, *treatments),
        launched_baseline=launched,
        treatment_diff={
            name: {
                key: [values[arm][key], value]
                for key, value in values[name].items()
                if value != values[arm][key]
            }
            for name in treatments
        },
        runs={name: run for name, run in experiment.runs.items() if not name.rerun},
        injected={},
        controls={},
        trace=None,
    )


def _read_trace(experiment_dir: Path, runs: Mapping[RunName, RecordedRun]) -> StoredTrace | Reason | None:
    """Return the result of `abrun trace`, or the reason why it does not apply to the experiment's arms.

    A step is traced without compiling, which hides modules, whatever the recipe says.
    """
    try:
        trace = read_trace(experiment_dir / FOLDER, StoredTrace)
    except StoreError as error:
        return Code.TRACE_UNREADABLE(problem=display_safe(str(error)))
    if trace is None:
        return None
    changed: dict[str, None] = {}
    for arm, config in trace.configs.items():
        name = RunName(arm=arm, seed=trace.seed)
        launched = (runs[name].config if name in runs else None) or {}
        traced = display_safe_tree(dotted(config))
        keys = {key for key in {*traced, *launched} if traced.get(key) != launched.get(key)}
        keys -= {"initial_weights", "policy.compile"}
        changed |= dict.fromkeys(sorted(filter(can_change_numbers, keys)))
    arm = display_safe(trace.arm)
    return Code.TRACE_OF_OTHER_VALUES(arm=arm, step=trace.step, keys=[*changed]) if changed else trace


def _load_run(run: RunDir, name: RunName) -> RecordedRun:
    """Return a run; one whose files cannot be read gets the status `unreadable` and the cause."""
    try:
        with wrap_read_errors(run.path):
            return _read_run(run, name)
    except StoreError as error:
        return RecordedRun(
            name=name,
            place=str(run.path),
            status="unreadable",
            failure=display_safe(str(error)),
            forbidden=isinstance(error, UnreadableError),
            metrics={},
        )


def _read_run(run: RunDir, name: RunName) -> RecordedRun:
    state, result, launches = read_state(run, name), run.result, run.launches()
    record = run.record() if run.exists else None
    attempts = run.attempts()
    started_s, ended_s = (attempts[0].started_s, attempts[-1].ended_s) if attempts else (None, None)
    fields = {
        **read_recording(run),
        "place": str(run.path),
        "failure": _describe_failure(state) if state.status == "failed" else "",
        "config": _dotted_config(record) if record else None,
    }
    return RecordedRun(
        **sanitize_recording(fields),
        name=name,
        status=state.status if is_directory(run.path) else "missing",
        identity=asdict(record.name) if record else None,
        final_weights_hash=result.final_weights_hash,
        rollouts_sha256=result.rollouts_sha256,
        wandb=_mirror_url(run),
        final_sketch=run.final_sketch,
        initial_sketch=run.initial_sketch,
        span_s=None if started_s is None or ended_s is None else (started_s, ended_s),
        runs_per_gpu=max((launch.runs_per_gpu for launch in launches), default=1),
        mps=any(launch.mps for launch in launches),
    )


def _mirror_url(run: RunDir) -> str | None:
    """Return the URL of a run's wandb mirror, if valid: the file could hold anything."""
    url = run.wandb_location().get("url", "")
    return url if re.fullmatch(URL_PATTERN, url) else None


def _dotted_config(record: RunRecord) -> dict[str, Any]:
    """Return the configuration by dotted key; keys that abrun gained since have compatible defaults."""
    config = migrate_dotted(dotted({**record.config, "initial_weights": record.initial_weights}))
    try:
        return dotted(parse_stored_run(record.config).model_dump(mode="json")) | config
    except RecipeError:  # another version's: compared as it is
        return config


def _describe_failure(state: RunState) -> str:
    """Return a short description of how the last attempt ended: `exit code 1: CUDA out of memory`."""
    if not state.message:
        return state.ending or "no exit code"
    if state.ending is None or state.has_ending_in_reason:
        return state.message
    return f"{state.ending}: {state.message}"
