"""One round of a gate: the candidate and the incumbent of a recipe, on the same new seeds, side by side."""

import hashlib
import shlex
from dataclasses import replace
from pathlib import Path

from abrun.api import launch
from abrun.errors import ComparisonError
from abrun.messages.numbers import listed
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import is_experiment, open_experiment
from abrun.tools.drift.gate import Source, refuse_decided
from abrun.tools.drift.store import read_state


def launch_round(path: Path, recipe: Path, source: Source, *, quiet: bool) -> Source:
    """Launch the pairs that the gate asks for next, and return the runs. A stopped round is resumed.

    The recipe's baseline is the incumbent, and its other arm the candidate. Pairs run one after the other, so
    the environment moves for both alike. Seeds follow from the store's last line: of a round that was removed
    before its answer, the same runs are trained again. Raises AbrunError.
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
    num_done, num_pairs = (len(earlier.candidate.runs), earlier.seeds_to_add) if earlier else (0, 1)
    reading = source.reading
    folder = reading.runs_dir / f"{name}-round-{num_done + 1}"
    if earlier:
        refuse_decided(earlier, state)
        if earlier.candidate.failed:
            rounds = (reading.runs_dir / f"{name}-round-{number}" for number in range(num_done, 0, -1))
            last = shlex.quote(str(next(filter(is_experiment, rounds), "ROUND")))
            words = ["--arm", arm, "--control", loaded.baseline, "--name", name, "--against", str(path)]
            raise ComparisonError(
                f"{name}: {listed(earlier.candidate.failed)} failed, which is WORSE; to run it again: abrun "
                f"launch {last} --resume --no-compare, then abrun gate {last} {shlex.join(words)}"
            )
    if resumed := is_experiment(folder):
        seeds = open_experiment(folder)["recipe"]["seeds"]
    else:
        digests = (hashlib.sha256(f"{state.sha256} {pair}".encode()).digest() for pair in range(num_pairs))
        seeds = [int.from_bytes(digest[:4]) >> 1 for digest in digests]
    changes = {"compare.claims": [], "compare.interim": []}  # the store has the claim
    options = {"name": folder.name, "runs_dir": reading.runs_dir, "resume": resumed, "quiet": quiet}
    launched = launch(recipe, seeds=seeds, overrides=changes, **options)  # refuses to resume another recipe
    if launched.exit_code > 128:
        verb = "resumed" if resumed else "launched"
        raise ComparisonError(
            f"--round: {folder}, just {verb}, was stopped; the same command resumes it and judges"
        )
    return replace(source, path=str(folder), arm=arm, control=loaded.baseline, name=name)
