"""One round of a gate: the candidate and the incumbent of a recipe, on the same new seeds, side by side."""

import secrets
from dataclasses import replace
from pathlib import Path

from abrun.api import launch
from abrun.errors import ComparisonError
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import is_experiment
from abrun.tools.drift.gate import Source
from abrun.tools.drift.store import read_state


def launch_round(path: Path, recipe: Path, source: Source, *, quiet: bool) -> Source:
    """Launch the pairs that the gate asks for next, and return the runs. A stopped round is resumed.

    The recipe's baseline is the incumbent, and its other arm the candidate. Pairs run one after the other, so
    the environment moves for both alike. Seeds are drawn here: nobody can have tried them before. Raises
    AbrunError.
    """
    state, loaded = read_state(path), load_recipe(recipe)
    treatments = [arm for arm in loaded.arms if arm != loaded.baseline]
    arm = source.arm or (treatments[0] if len(treatments) == 1 else None)
    if arm not in treatments:
        raise ComparisonError(
            f"--round: {loaded.name} has the arms {', '.join(loaded.arms)}; give the one to compare with "
            f"{loaded.baseline} as --arm"
        )
    name = source.name or loaded.name
    earlier = state.candidates.get(name)
    if earlier and earlier.outcome != "OPEN":
        raise ComparisonError(
            f"{name}: was answered {earlier.outcome} in {path}; give another candidate another --name"
        )
    num_done, num_pairs = (len(earlier.candidate.runs), earlier.seeds_to_add) if earlier else (0, 1)
    reading = source.reading
    folder = reading.runs_dir / f"{name}-round-{num_done + 1}"
    if resumed := is_experiment(folder):
        launched = launch(folder, resume=True, runs_dir=reading.runs_dir, quiet=quiet)
    else:
        seeds = [secrets.randbelow(2**31) for _ in range(num_pairs)]
        changes = {"compare.claims": [], "compare.interim": []}  # the store has the claim
        options = {"name": folder.name, "runs_dir": reading.runs_dir, "quiet": quiet}
        launched = launch(recipe, seeds=seeds, overrides=changes, **options)
    if launched.exit_code > 128:
        verb = "resumed" if resumed else "launched"
        raise ComparisonError(
            f"--round: {folder}, just {verb}, was stopped; the same command resumes it and judges"
        )
    return replace(source, path=str(folder), arm=arm, control=loaded.baseline, name=name)
