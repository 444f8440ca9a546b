"""Pairs on recorded rollouts against free-running pairs: the spread of differences, and the pairs needed.

    python -m tests.bench.bench_recorded                           # the quickstart's arms, CPU cores
    python -m tests.bench.bench_recorded --recipe A --recipe B --set model.path=FOLDER
    python -m tests.bench.bench_recorded --launched FREE RECORDED  # folders of experiments, no launch

A recipe's arms that train on the baseline's rollouts are launched twice in one experiment, so that its runs
share the machine: as they are, and `-free`, sampling. Both are compared with one baseline. With --launched
the two designs are read from experiments of their own, over the steps that both have.

For each metric, of its mean over all steps: the sd over seeds of the paired differences relative to the
baseline, and the pairs that a margin of 1 % (--margin) needs for a power of 80 % if the arms are equal. For
`final_weights`, the root mean square of the distance that a claim on it is about, in place of the sd. Then,
for each pair, the first step at which it differs by more than the margin. `token_mult_prob_error` is no
measure of agreement here: on recorded rollouts it shows how far the treatment has left the recorded policy.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from abrun.errors import AbrunError
from abrun.metric_names import FINAL_WEIGHTS
from abrun.recipe.experiment import BASELINE, Recipe, load_recipe
from abrun.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.recorded.stored import load_experiment
from abrun.runs.layout import RunName
from abrun.stats.power import MAX_PAIRS, pairs_needed
from abrun.stats.series import Array
from abrun.verdict.final_weights import measure_weight_distance
from tests.bench.common import heading, make_parser, markdown_row
from tests.bench.launches import REPOSITORY, launch

RECIPE = REPOSITORY / "recipes" / "recorded-rollouts.yaml"
METRICS = ("train/grad_norm", "train/entropy", "train/reward", "train/token_mult_prob_error")
FREE = "-free"
ENGINE, SOURCE = "rollout.engine", "rollout.from"
TITLES = ("metric", "free: sd", "pairs", "recorded: sd", "pairs", "ratio of sd", "first step > margin")


@dataclass(frozen=True, slots=True)
class Design:
    """The pairs of an arm with its baseline."""

    experiment: RecordedExperiment
    arm: str

    @property
    def pairs(self) -> list[tuple[RecordedRun, RecordedRun]]:
        """The pairs whose runs have finished, by seed."""
        runs = self.experiment.runs
        pairs = [
            (run, runs[other])
            for name, run in sorted(runs.items(), key=lambda item: item[0].seed)
            if name.arm == BASELINE
            and not name.rerun
            and (other := RunName(arm=self.arm, seed=name.seed)) in runs
        ]
        return [pair for pair in pairs if all(run.finished for run in pair)]

    @property
    def num_steps(self) -> int:
        return min((int(run.steps.max()) for pair in self.pairs for run in pair), default=0)

    def differences(self, metric: str, num_steps: int) -> Array:  # [pairs, steps]
        """Return the differences up to a step, relative to the baseline's mean; empty if not recorded."""
        rows = []
        for baseline, treatment in self.pairs:
            series = [run.metrics.get(metric) for run in (baseline, treatment)]
            values = [side.values[side.steps <= num_steps] for side in series if side]
            if len(values) == 2 and len(values[0]) == len(values[1]) > 0:
                rows.append((values[1] - values[0]) / max(abs(values[0].mean()), 1e-12))
        return np.array(rows)

    def weight_distances(self) -> list[float]:
        distances = [measure_weight_distance(*pair) for pair in self.pairs]
        return [distance for distance in distances if isinstance(distance, float)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", type=Path, action="append", default=[])
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="key=value, for all")
    parser.add_argument("--launched", type=Path, nargs=2, action="append", default=[])
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--work", type=Path, default=Path("/tmp/recorded-pairs"))
    options = parser.parse_args()
    recipes = options.recipe or ([] if options.launched else [RECIPE])
    print(heading("recipe, arm", *TITLES))
    try:
        designs = [*launch_designs(recipes, options), *read_designs(options.launched)]
        for name, free, recorded in designs:
            print(*rows(name, free, recorded, options.margin), sep="\n", flush=True)
    except AbrunError as error:
        sys.exit(str(error))


def launch_designs(
    recipes: Sequence[Path], options: argparse.Namespace
) -> Iterator[tuple[str, Design, Design]]:
    """Launch what is not there, or go on with it; yield each arm's name and its two designs."""
    for path in recipes:
        recipe = load_recipe(path, options.overrides)
        assert isinstance(recipe, Recipe)
        arms = with_free_arms(recipe)
        directory = options.work / "runs" / recipe.name
        changes = [*options.overrides, f"arms={json.dumps(arms)}", "controls={}", "compare.claims=[]"]
        arguments = [str(path.resolve()), "--seeds", options.seeds, "--exit-zero"]
        arguments += [f"--set={text}" for text in changes] + ["--resume"] * directory.exists()
        outcome = launch(arguments, checkout=REPOSITORY, work=options.work)
        if not outcome.is_complete:
            log = options.work / "launch.log"
            sys.exit(f"{recipe.name}: ended with exit code {outcome.exit_code}; see {log}")
        experiment = load_experiment(directory)
        for arm in arms:
            if f"{arm}{FREE}" in arms:
                yield f"{recipe.name}, {arm}", Design(experiment, f"{arm}{FREE}"), Design(experiment, arm)


def with_free_arms(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the arms of a recipe, each on the baseline's rollouts followed by one that samples."""
    arms: dict[str, dict[str, Any]] = {}
    for arm, change in recipe.arms.items():
        arms[arm] = change
        if change.get(ENGINE) == "recorded" and change.get(SOURCE) == BASELINE:
            arms[f"{arm}{FREE}"] = {key: change[key] for key in change if key not in (ENGINE, SOURCE)}
    if len(arms) == len(recipe.arms):
        sys.exit(f"{recipe.name}: no arm trains on the baseline's rollouts; give a recipe with one")
    return arms


def read_designs(folders: Sequence[tuple[Path, Path]]) -> Iterator[tuple[str, Design, Design]]:
    """Yield the arms that a free-running experiment and one on recorded rollouts share."""
    for pair in folders:
        free, recorded = map(load_experiment, pair)
        arms = [arm for arm in recorded.arms if arm in free.arms and arm != BASELINE]
        if not arms:
            sys.exit(f"{pair[1]}: has no treatment of {pair[0]}; give two designs of the same arms")
        for arm in arms:
            yield f"{recorded.name}, {arm}", Design(free, arm), Design(recorded, arm)


def rows(name: str, free: Design, recorded: Design, margin: float) -> Iterator[str]:
    designs = (free, recorded)
    num_steps = min(design.num_steps for design in designs)
    counts = " and ".join(str(len(design.pairs)) for design in designs)
    if not all(len(design.pairs) > 1 for design in designs):
        yield markdown_row(name, f"too few pairs have finished: {counts}", *[""] * (len(TITLES) - 1))
        return
    for metric in METRICS:
        sides = [design.differences(metric, num_steps) for design in designs]
        if any(len(side) > 1 for side in sides):
            yield markdown_row(f"{name} ({counts} pairs, {num_steps} steps)", metric, *cells(sides, margin))
    distances = [design.weight_distances() if design.num_steps == num_steps else [] for design in designs]
    sizes = [float(np.sqrt(np.mean(np.square(side)))) if side else None for side in distances]
    shown = ["-" if size is None else f"{size:.2g}" for size in sizes]
    ratio = f"{sizes[0] / sizes[1]:.3g}" if sizes[0] and sizes[1] else "-"
    yield markdown_row(name, FINAL_WEIGHTS, shown[0], "", shown[1], "", ratio, "")


def cells(sides: Sequence[Array], margin: float) -> list[str]:
    """Return the cells of a metric whose differences [pairs, steps] both designs have."""
    sds = [float(side.mean(axis=1).std(ddof=1)) if len(side) > 1 else float("nan") for side in sides]
    spreads = [cell for sd in sds for cell in (f"{sd:.2g}", show_pairs(margin, sd))]
    first = [" ".join(first_above(pair, margin) for pair in side) for side in sides]
    ratio = f"{sds[0] / sds[1]:.3g}" if sds[1] else "-"
    return [*spreads, ratio, f"free {first[0]}; recorded {first[1]}"]


def show_pairs(margin: float, sd: float) -> str:
    return str(pairs_needed(margin, sd) or f"> {MAX_PAIRS}") if np.isfinite(sd) else "-"


def first_above(differences: Array, margin: float) -> str:  # [steps]
    above = np.abs(differences) > margin
    return str(int(np.argmax(above)) + 1) if above.any() else "-"


if __name__ == "__main__":
    main()
