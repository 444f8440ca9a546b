"""The price of a verdict: seconds of one experiment whose runs share their GPUs.

    python -m tests.bench.bench_verdict_cost --model FOLDER              # one GPU, 17 runs, eight at once
    python -m tests.bench.bench_verdict_cost --model FOLDER --seeds 0-1 --steps 20 \\
        --recipe recipes/evidence/smollm2-vllm-engine.yaml               # needs vllm
    python -m tests.bench.bench_verdict_cost --gpus 0 --jobs 2 --recipe recipes/quickstart.yaml

It is an `abrun launch` of its own with empty caches.

- wall: seconds of the launch with its comparison, from the command to its exit. device-hours: times devices.
- first step: seconds from a run's start to the end of its first step, of the first run and the median of the
  later ones. run: likewise of whole runs.
"""

import json
import sys
import tempfile
from pathlib import Path

from abrun.experiment.preflight.machine import find_gpus
from abrun.runs.experiment import list_experiments, planned_runs
from tests.bench.common import heading, make_parser, markdown_row
from tests.bench.launches import REPOSITORY, first_and_later, last_log_lines, launch, run_seconds

RECIPE = REPOSITORY / "recipes" / "evidence" / "smollm2-grpo-fused.yaml"
HEADER = ("wall, s", "device-hours", "first step, s", "run, s", "runs", "verdict")


def main() -> None:
    parser = make_parser(__doc__)
    gpus = len(find_gpus())
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--model", default="", help="folder of the model; else the recipe's")
    parser.add_argument("--seeds", default="", help="instead of the recipe's, such as 0-2")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="key=value")
    parser.add_argument("--gpus", type=int, default=gpus, help="visible GPUs; 0: on CPU cores")
    parser.add_argument("--runs-per-gpu", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once on CPU cores")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, then it stops")
    asked = parser.parse_args()
    if asked.gpus not in (0, gpus):
        parser.error(f"--gpus: got {asked.gpus}; a launch uses all {gpus} that are visible, or 0")
    overrides = [f"model.path={asked.model}"] * bool(asked.model)
    overrides += [f"steps={asked.steps}"] * bool(asked.steps)
    overrides += [f"cluster.runs_per_gpu={asked.runs_per_gpu}" if asked.gpus else "cluster.gpus_per_node=0"]
    arguments = [str(asked.recipe.resolve()), *(f"--set={text}" for text in [*overrides, *asked.overrides])]
    arguments += ["--seeds", asked.seeds] if asked.seeds else []
    arguments += [] if asked.gpus else ["--jobs", str(asked.jobs)]
    with tempfile.TemporaryDirectory(prefix="verdict-cost-") as folder:
        work = Path(folder)
        outcome = launch(arguments, work=work, limit_s=asked.limit)
        if not outcome.is_complete:
            log = "\n    ".join(last_log_lines(work))
            sys.exit(f"abrun launch ended with exit code {outcome.exit_code}:\n    {log}")
        (directory,) = list_experiments(work / "runs")
        runs = run_seconds(directory)
        row = markdown_row(
            f"{outcome.wall_s:.0f}",
            f"{outcome.wall_s * (asked.gpus or asked.jobs) / 3600:.3f}",
            first_and_later(run.first_step_s for run in runs),
            first_and_later(run.whole_s for run in runs),
            f"{len(runs)} of {len(planned_runs(directory))}",
            json.loads((directory / "report" / "verdict.json").read_text())["verdict"],
        )
        print(heading(*HEADER), row, sep="\n")


if __name__ == "__main__":
    main()
