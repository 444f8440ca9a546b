"""Pairs on recorded rollouts against free-running pairs: the spread of differences, and the pairs needed.

    python -m tests.bench.bench_recorded                                  # the quickstart's arms, CPU cores
    python -m tests.bench.bench_recorded --recipe RECIPE --set model.path=FOLDER

The recipe's treatment trains on the baseline's rollouts. `free` is the same recipe whose treatment samples.
For each metric, of its mean over all steps: the sd over seeds of the paired differences relative to the
baseline, and the pairs that a margin of 1 % needs for a power of 80 % if the arms are equal. Then, for each
pair, the first step at which it differs by more than 1 %. `token_mult_prob_error` is no measure of agreement
here: on recorded rollouts it shows how far the treatment has left the recorded policy.
"""

import sys
from pathlib import Path

import numpy as np

from abrun.errors import AbrunError
from abrun.recipe.experiment import load_recipe
from abrun.stats.power import pairs_needed
from abrun.stats.series import Array
from tests.bench.common import heading, make_parser, markdown_row
from tests.bench.launches import REPOSITORY, clockless_rows, launch

RECIPE = REPOSITORY / "recipes" / "recorded-rollouts.yaml"
METRICS = ("train/grad_norm", "train/entropy", "train/reward", "train/token_mult_prob_error")
MARGIN = 0.01
COMMON = ("controls={}", "compare.claims=[]")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="key=value, for both")
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--work", type=Path, default=Path("/tmp/recorded-pairs"))
    asked = parser.parse_args()
    try:
        recipe = load_recipe(asked.recipe, asked.overrides)
    except AbrunError as error:
        sys.exit(str(error))
    engine = recipe.run_config("baseline").model_dump()["rollout"]["engine"]
    sampling = [f"arms.treatment.rollout.engine={engine}", "arms.treatment.rollout.from=null"]
    tables = []
    for name, changes in {"free": sampling, "recorded": []}.items():
        work = asked.work / name
        if not work.exists():
            settings = [f"--set={text}" for text in (*asked.overrides, *changes, *COMMON)]
            arguments = [str(asked.recipe.resolve()), "--seeds", asked.seeds, *settings]
            outcome = launch(arguments, checkout=REPOSITORY, work=work)
            if not outcome.is_complete:
                sys.exit(f"{name}: ended with exit code {outcome.exit_code}; see {work}/launch.log")
        tables.append(read_differences(work / "runs" / recipe.name))
    print(heading("metric", "free: sd", "pairs", "recorded: sd", "pairs", "ratio of sd", "first step > 1 %"))
    for metric in METRICS:
        print(row(metric, *(table[metric] for table in tables)))


def read_differences(experiment: Path) -> dict[str, Array]:
    """Return, by metric, the differences of each pair at each step, relative to the baseline's mean."""
    curves: dict[str, list[Array]] = {metric: [] for metric in METRICS}
    for run in sorted(experiment.glob("baseline/seed-*")):
        rows = [clockless_rows(experiment / arm / run.name) for arm in ("baseline", "treatment")]
        for metric in METRICS:
            steps = [step for step in sorted(rows[0]) if metric in rows[0][step]]
            own, other = (np.array([side[step][metric] for step in steps]) for side in rows)
            curves[metric].append((other - own) / max(abs(own.mean()), 1e-12))
    return {metric: np.array(pairs) for metric, pairs in curves.items()}  # [pairs, steps]


def row(metric: str, free: Array, recorded: Array) -> str:
    sds = [float(side.mean(axis=1).std(ddof=1)) for side in (free, recorded)]
    cells = [cell for sd in sds for cell in (f"{sd:.2g}", pairs_needed(MARGIN, sd) or "> 1000")]
    parted = [" ".join(map(first_above, side)) for side in (free, recorded)]
    ratio = f"{sds[0] / sds[1]:.3g}" if sds[1] else "-"
    return markdown_row(metric, *cells, ratio, f"free {parted[0]}; recorded {parted[1]}")


def first_above(differences: Array) -> str:  # [steps]
    above = np.abs(differences) > MARGIN
    return str(int(np.argmax(above)) + 1) if above.any() else "-"


if __name__ == "__main__":
    main()
