"""Whether an experiment goes on with other code than its runs were made with: said, and never refused."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.experiment.plan import Plan
from abrun.extras import installed_version, is_imported
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.experiment import run_dir
from abrun.runs.files import readable
from abrun.runs.records import code_name
from abrun.runs.rundir import RunDir

MOST_SHOWN = 3


def other_code(plan: Plan, experiment_dir: Path, git: Mapping[str, Any] | None, *, here: bool) -> str | None:
    """A line where runs that have begun are of another commit than `git`, or of other packages; else None.

    `here`: those to come run in this environment, so that its packages are theirs. None where none are left.
    """
    runs = [(RunDir(run_dir(experiment_dir, run.name)), run.config) for run in plan.runs]
    if all(run.finished for run, _ in runs):
        return None
    changes: dict[str, None] = {}
    for run, config in runs:
        with contextlib.suppress(StoreError), readable(run.path):  # what cannot be read its own turn tells
            if run.last_attempt:
                changes |= dict.fromkeys(_commits(run.git(), git))
                changes |= dict.fromkeys(_packages(run.environment(), config) if here else ())
    if not changes:
        return None
    said = list(changes)
    said[MOST_SHOWN:] = [f"and {len(said) - MOST_SHOWN} more"] if len(said) > MOST_SHOWN else []
    return f"{experiment_dir.name}: {'; '.join(said)}: runs may differ by that, whatever their arm"


def _commits(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterator[str]:
    if before and now and code_name(before) != code_name(now):
        yield f"made from commit {code_name(before)} so far, going on from {code_name(now)}"


def _packages(environment: Mapping[str, Any] | None, config: RunConfig) -> Iterator[str]:
    """Of a run of our own trainer; a foreign one has an environment of its own."""
    versions = (environment or {}).get("versions")
    if not (isinstance(versions, Mapping) and isinstance(config, OwnRunConfig)):
        return
    values = dotted(config.model_dump(mode="json"))
    known = {name: before for name, before in versions.items() if name and isinstance(before, str | None)}
    for package, before in known.items():
        now = installed_version(package)
        # torch calls itself 2.11.0+cu130 where its metadata may say 2.11.0
        same = before == now or (before and now == before.partition("+")[0])
        if not same and is_imported(package, values):
            yield f"made with {package} {before or 'missing'} so far, going on with {now or 'none'}"
