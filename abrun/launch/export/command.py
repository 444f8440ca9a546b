"""`abrun launch --export`: writes the manifests of a plan, completely or not at all."""

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import anywhere_refusals, separate_job_refusals
from abrun.launch.export import jobset, skypilot
from abrun.launch.export.manifest import ExportedPlan, dump_yaml
from abrun.launch.prepare import refuse_impossible
from abrun.messages.numbers import count_text
from abrun.reasons import Code
from abrun.recipe.launcher import resolve_launcher_settings
from abrun.regular_files import exists, is_directory
from abrun.runs.files import write_file

ENGINES: dict[str, Any] = {"jobset": jobset, "skypilot": skypilot}
NEVER_LAUNCHED = "never launched"


def export_plan(plan: ExperimentPlan, engine: str, folder: Path, name: str, *, compare: bool = True) -> str:
    """Write the manifests of a plan and a submit script into a new folder; return a sentence about them.

    Raises LaunchError or RecipeError, with nothing written, if a setting is missing or the plan cannot run.
    """
    if engine not in ENGINES:
        raise LaunchError(Code.NOT_ALLOWED(field="--export", got=repr(engine), allowed=[*ENGINES]))
    declared = plan.recipe.launcher
    export = ExportedPlan(plan=plan, name=name, settings=resolve_launcher_settings(declared, engine))
    problems = [*anywhere_refusals(plan), *separate_job_refusals(plan)]
    problems += ENGINES[engine].find_problems(export)
    if (runs_per_gpu := max(run.config.cluster.runs_per_gpu for run in plan.runs)) > 1:
        why = "its resource is a whole GPU"
        problems.append(Code.GPUS_NOT_SHARED(runs_per_gpu=runs_per_gpu, launcher=engine, why=why))
    refuse_impossible(plan, problems, shown_by_dry_run=False)
    if exists(folder) and (not is_directory(folder) or any(folder.iterdir())):
        raise LaunchError(Code.EXPORT_FOLDER_IN_USE(folder=folder))
    documents = ENGINES[engine].make_manifests(export, compare=compare)
    try:
        if exists(folder):  # empty, and perhaps somebody's working directory
            _write_manifests(export, engine, documents, folder)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as partial:
                _write_manifests(export, engine, documents, Path(partial) / folder.name)
                (Path(partial) / folder.name).rename(folder)  # fails if another process was faster
    except OSError as error:
        raise LaunchError(Code.EXPORT_FOLDER_UNWRITABLE(folder=folder, error=error.strerror)) from None
    count = count_text(len(documents), "manifest")
    return (
        f"{folder}: {count}, {NEVER_LAUNCHED}: no {engine} has seen them. "
        f"Submit them with: sh {shlex.quote(str(folder / 'submit.sh'))}"
    )


def _write_manifests(export: ExportedPlan, engine: str, documents: Mapping[str, Any], folder: Path) -> None:
    note = f"# Written by abrun launch --export: {NEVER_LAUNCHED}."
    for file, document in documents.items():
        write_file(folder / f"{file}.yaml", f"{note}\n{dump_yaml(document)}".encode(), mode=0o644)
    lines = ["#!/bin/sh", note, "set -e", 'cd "$(dirname "$0")"']
    lines += ENGINES[engine].submit_lines(export, documents)
    write_file(folder / "submit.sh", "\n".join([*lines, ""]).encode(), mode=0o755)
