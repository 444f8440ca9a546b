"""`abrun export`: refused, or written whole."""

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import anywhere_refusals
from abrun.launch.export import jobset, skypilot
from abrun.launch.export.parts import Export, as_yaml
from abrun.launch.prepare import refuse_impossible
from abrun.reasons import Code
from abrun.recipe.launcher import resolve_launcher_settings
from abrun.regular_files import exists, is_directory
from abrun.runs.files import write_file

ENGINES: dict[str, Any] = {"jobset": jobset, "skypilot": skypilot}
NEVER = "never launched"


def export(plan: ExperimentPlan, engine: str, folder: Path, name: str, *, compare: bool = True) -> str:
    """Write the manifests of a plan, and a script that submits them, into a new folder; returns what to say.

    Raises LaunchError or RecipeError, with nothing written, where engine or plan leave something open.
    """
    if engine not in ENGINES:
        raise LaunchError(Code.NOT_ALLOWED(field="--to", got=repr(engine), allowed=[*ENGINES]))
    declared = plan.recipe.launcher
    asked = Export(plan=plan, name=name, settings=resolve_launcher_settings(declared, engine))
    refusals = [*anywhere_refusals(plan), *ENGINES[engine].refusals(asked)]
    refuse_impossible(plan, refusals, shown_by_dry_run=False)
    if exists(folder) and (not is_directory(folder) or any(folder.iterdir())):
        raise LaunchError(Code.EXPORT_FOLDER_IN_USE(folder=folder))
    documents = ENGINES[engine].manifests(asked, compare=compare)
    try:
        if exists(folder):  # empty, and perhaps where somebody is
            _write(asked, engine, documents, folder)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as partial:
                _write(asked, engine, documents, Path(partial) / folder.name)
                (Path(partial) / folder.name).rename(folder)  # refused where another was faster
    except OSError as error:
        raise LaunchError(Code.EXPORT_FOLDER_UNWRITABLE(folder=folder, error=error.strerror)) from None
    count = f"{len(documents)} manifest{'' if len(documents) == 1 else 's'}"
    return (
        f"{folder}: {count}, {NEVER}: no {engine} has seen them. "
        f"Submit them with: sh {shlex.quote(str(folder / 'submit.sh'))}"
    )


def _write(asked: Export, engine: str, documents: Mapping[str, Any], folder: Path) -> None:
    note = f"# Written by abrun export: {NEVER}."
    for file, document in documents.items():
        write_file(folder / f"{file}.yaml", f"{note}\n{as_yaml(document)}".encode(), mode=0o644)
    lines = ["#!/bin/sh", note, "set -e", 'cd "$(dirname "$0")"']
    lines += ENGINES[engine].submission(asked, documents)
    write_file(folder / "submit.sh", "\n".join([*lines, ""]).encode(), mode=0o755)
