"""The price of a verdict: one experiment, launched as before and with shared GPUs and surviving engines.

    python -m tests.bench.bench_verdict_cost --model FOLDER --before CHECKOUT     # one GPU, 17 runs
    python -m tests.bench.bench_verdict_cost --model FOLDER --before CHECKOUT --seeds 0-1 --steps 20 \\
        --recipe recipes/evidence/smollm2-vllm-engine.yaml                        # needs vllm
    python -m tests.bench.bench_verdict_cost --gpus 0 --jobs 2 --recipe recipes/quickstart.yaml

Each scheduling is an `abrun launch` of its own with empty caches, in FOLDER/before and FOLDER/now of --work.
`before` runs the code of an older checkout; without one, this code with one run at a time on a GPU, whose
engines still serve several runs. `now` sets cluster.runs_per_gpu, on CPU cores --jobs. A scheduling that has
ended is not measured again, and one that the limit has stopped is resumed: the same command goes on, and
--only takes one of the two.

- on a device: runs that share it. wall: seconds of the launch with its comparison, from the command to its
  exit. device-hours: times devices.
- useful: the report's useful share, seconds of steps of the pairs' runs over device seconds held by the
  experiment; a run on a shared GPU counts by its share of it.
- first step: seconds from a run's start to the end of its first step, of the first run and the median of the
  later ones. run: likewise of whole runs.

Verdicts are equal if the verdict, each arm's, and all claims and first steps are, with all their figures.
Metrics are equal if no run differs in a bit of any value but time, throughput and device memory.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError
from abrun.experiment.preflight.machine import find_gpus
from abrun.recipe.experiment import load_recipe
from abrun.runs.experiment import open_experiment, planned_runs, run_dir
from abrun.runs.files import write_json
from tests.bench.common import heading, make_parser, markdown_row
from tests.bench.launches import (
    REPOSITORY,
    finished_runs,
    first_and_later,
    first_difference,
    last_log_lines,
    launch,
    run_seconds,
)

RECIPE = REPOSITORY / "recipes" / "evidence" / "smollm2-grpo-fused.yaml"
SCHEDULINGS = ("before", "now")
JUDGED = ("verdict", "claims", "step_one", "sensitivity")  # fields of a verdict that no clock changes
HEADER = (
    *("scheduling", "on a device", "wall, s", "device-hours", "first step, s", "run, s"),
    *("runs", "verdict"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """One way to launch the experiment, and its files."""

    name: str
    checkout: Path
    arguments: tuple[str, ...]  # of `abrun launch`
    work: Path
    experiment: str
    num_devices: int
    limit_s: float

    @property
    def directory(self) -> Path:
        return self.work / "runs" / self.experiment

    def measure(self) -> None:
        """Launch or resume the experiment, and record the seconds. Raises SystemExit if it fails."""
        record = self.read_record()
        if record["is_complete"]:
            return
        resume = ["--resume"] * self.directory.exists()
        outcome = launch(
            [*self.arguments, *resume], checkout=self.checkout, work=self.work, limit_s=self.limit_s
        )
        record["wall_s"].append(outcome.wall_s)
        write_json(self._record, {**record, "is_complete": outcome.is_complete})
        if not outcome.is_complete and outcome.exit_code >= 0:
            log = "\n    ".join(last_log_lines(self.work))
            sys.exit(f"{self.name}: abrun launch ended with exit code {outcome.exit_code}:\n    {log}")

    @property
    def _record(self) -> Path:
        return self.work / "seconds.json"

    def read_record(self) -> dict[str, Any]:
        """Return the seconds of each launch; refuse those of other arguments."""
        asked = [str(self.checkout), *self.arguments]
        record = {"asked": asked, "wall_s": [], "is_complete": False}
        if self._record.exists():
            record = json.loads(self._record.read_text())
        if record["asked"] != asked:
            sys.exit(f"--work {self.work.parent}: holds {self.name} with other arguments; use another folder")
        return record

    def verdict(self) -> dict[str, Any]:
        path = self.directory / "report" / "verdict.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def row(self) -> str:
        """Return its line of the table."""
        record, runs = self.read_record(), run_seconds(self.directory)
        wall_s = sum(record["wall_s"])
        num_runs = f"{len(runs)} of {len(planned_runs(self.directory))}"
        return markdown_row(
            self.name,
            self.runs_per_device,
            f"{wall_s:.0f}",
            f"{wall_s * self.num_devices / 3600:.3f}",
            first_and_later(run.first_step_s for run in runs),
            first_and_later(run.whole_s for run in runs),
            num_runs,
            self.verdict().get("verdict", "-"),
        )

    @property
    def runs_per_device(self) -> int:
        cluster = open_experiment(self.directory)["recipe"]["cluster"]
        return cluster.get("runs_per_gpu", 1)  # older code has no such key


def judged_fields(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return what a verdict says about the arms, apart from times."""
    arms = {arm: section["verdict"] for arm, section in verdict["arms"].items()}
    return {"arms": arms, **{name: verdict[name] for name in JUDGED}}


def compare(before: Scheduling, now: Scheduling) -> list[str]:
    """Return the lines on what the two schedulings' results share."""
    records = [scheduling.read_record() for scheduling in (before, now)]
    if not all(record["is_complete"] for record in records):
        return []
    ratio = sum(records[0]["wall_s"]) / sum(records[1]["wall_s"])
    sides = [judged_fields(scheduling.verdict()) for scheduling in (before, now)]
    differing = [name for name, value in sides[0].items() if value != sides[1][name]]
    verdict_text = f"DIFFERS in {', '.join(differing)}" if differing else "identical"
    differences = {}
    names = finished_runs(before.directory)
    for name in names:
        difference = first_difference(run_dir(before.directory, name), run_dir(now.directory, name))
        differences |= {name: difference} if difference else {}
    return [
        f"before / now: {ratio:.2f} times the wall time; verdict {verdict_text}; metrics of "
        f"{len(names) - len(differences)} of {len(names)} runs are equal bit for bit",
        *(f"    {name}: {difference}" for name, difference in differences.items()),
    ]


def make_schedulings(asked: argparse.Namespace) -> list[Scheduling]:
    overrides = [f"model.path={asked.model}"] * bool(asked.model)
    overrides += [f"steps={asked.steps}"] * bool(asked.steps)
    overrides += ["cluster.gpus_per_node=0"] * (asked.gpus == 0) + asked.overrides
    try:
        recipe = load_recipe(asked.recipe, overrides)
    except AbrunError as error:
        sys.exit(str(error))
    path = asked.recipe.resolve()
    if asked.before:  # older code may lack the key
        text = re.sub(r",? *runs_per_gpu: *\w+", "", path.read_text())
        path = asked.work / path.name
        asked.work.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    common = [str(path), *(f"--set={override}" for override in overrides)]
    common += ["--seeds", asked.seeds] if asked.seeds else []
    serial, sharing = ["--jobs", "1"], ["--jobs", str(asked.jobs)]
    if asked.gpus:
        serial = [] if asked.before else ["--set=cluster.runs_per_gpu=1"]
        sharing = [f"--set=cluster.runs_per_gpu={asked.runs_per_gpu}"]
    checkouts = {"before": (asked.before or REPOSITORY).resolve(), "now": REPOSITORY}
    num_devices = {"before": asked.gpus or 1, "now": asked.gpus or asked.jobs}
    return [
        Scheduling(
            name=name,
            checkout=checkouts[name],
            arguments=(*common, *(serial if name == "before" else sharing)),
            work=asked.work / name,
            experiment=recipe.name,
            num_devices=num_devices[name],
            limit_s=asked.limit,
        )
        for name in SCHEDULINGS
    ]


def main() -> None:
    parser = make_parser(__doc__)
    gpus = find_gpus()
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--model", default="", help="folder of the model; else the recipe's")
    parser.add_argument("--seeds", default="", help="instead of the recipe's, such as 0-2")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="key=value, for both")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="older code for `before`")
    parser.add_argument("--only", choices=SCHEDULINGS, help="measure this one alone")
    parser.add_argument("--gpus", type=int, default=len(gpus), help="visible GPUs; 0: on CPU cores")
    parser.add_argument("--runs-per-gpu", default="auto", help="of `now`")
    parser.add_argument("--jobs", type=int, default=2, help="of `now` on CPU cores")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of each, then it stops")
    parser.add_argument("--work", type=Path, default=Path("/tmp/verdict-cost"), help="where experiments lie")
    asked = parser.parse_args()
    if asked.gpus not in (0, len(gpus)):
        parser.error(f"--gpus: got {asked.gpus}; a launch uses all {len(gpus)} that are visible, or 0")
    if asked.before and not (asked.before / "abrun").is_dir():
        parser.error(f"--before: got {asked.before}, which has no folder abrun; give a checkout")
    schedulings = make_schedulings(asked)
    print(heading(*HEADER), flush=True)
    for scheduling in schedulings:
        if asked.only in (None, scheduling.name):
            scheduling.measure()
        if scheduling.directory.exists():
            print(scheduling.row(), flush=True)
    if all(scheduling.directory.exists() for scheduling in schedulings):
        print(*compare(*schedulings), sep="\n", flush=True)


if __name__ == "__main__":
    main()
