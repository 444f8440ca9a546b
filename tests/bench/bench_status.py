"""How long `abrun status` and a refresh of `abrun watch` take where many runs have finished.

    python tests/bench/bench_status.py [--runs 1000] [--experiments 20] [--steps 100] [--repeats 5]

Writes runs as our trainer leaves them into a temporary folder: once as experiments of 50 runs each, once as
one experiment; all have finished, or, `--running N`, N of each are at work. Then runs the commands as a user
does: a fresh process each time, with whatever file cache there is. Prints the median of wall clock seconds,
the least and the most.
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from abrun.launch.cluster import queued_jobs
from abrun.runs.experiment import run_dir, write_experiment
from abrun.runs.layout import RunName
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from abrun.watch import ExperimentReader

METRICS = {f"train/metric_{number}": 0.125 * number for number in range(40)}
CONFIG = {"algorithm": {"type": "grpo"}, **{f"field_{number}": number for number in range(80)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--experiments", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--running", type=int, default=0, help="of the runs of each experiment")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        many, one = Path(folder) / "many", Path(folder) / "one"
        each = options.runs // options.experiments
        for number in range(options.experiments):
            write_finished(many / f"experiment-{number:02d}", each, options.steps, options.running)
        write_finished(one / "large", options.runs, options.steps, options.running)
        print(f"{options.runs} runs of {options.steps} steps, {options.running} at work in each experiment")
        said = [sys.executable, "-m", "abrun", "status"]
        measure("abrun status --help", options.repeats, lambda: run(*said, "--help"))
        measure(
            f"abrun status, {options.experiments} experiments",
            options.repeats,
            lambda: run(*said, "--runs-dir", str(many)),
        )
        measure("abrun status, 1 experiment", options.repeats, lambda: run(*said, "--runs-dir", str(one)))
        measure(
            "abrun status EXPERIMENT", options.repeats, lambda: run(*said, "large", "--runs-dir", str(one))
        )
        measure("abrun watch: first look", options.repeats, lambda: reader(one).read())
        looking = reader(one)
        looking.read()
        measure("abrun watch: refresh", options.repeats, looking.read)


def reader(runs_dir: Path) -> ExperimentReader:
    return ExperimentReader(runs_dir / "large", queued_jobs)


def write_finished(experiment_dir: Path, num_runs: int, num_steps: int, num_running: int) -> None:
    names = [
        RunName(arm=arm, seed=seed) for seed in range(num_runs // 2) for arm in ("baseline", "treatment")
    ]
    listed = [{"arm": name.arm, "seed": name.seed, "rerun": 0} for name in names]
    write_experiment(experiment_dir, {"experiment": "bench", "recipe": {}, "runs": listed})
    for index, name in enumerate(names):
        run = RunDir(run_dir(experiment_dir, name))
        config = {**CONFIG, "steps": num_steps}
        run.write_record(RunRecord(experiment="bench", name=name, initial_weights=None, config=config))
        run.begin_launch(["cpu"], None)
        writer = run.begin_attempt()
        for step in range(1, num_steps + 1):
            writer.metrics(step, METRICS)
        writer.heartbeat(num_steps)
        if index >= num_running:
            with contextlib.redirect_stdout(io.StringIO()):  # of a run its last line
                writer.finish(num_steps)
            run.end_launch("finished", None, exit_code=0, signal=None)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


def measure(title: str, repeats: int, what: Callable[[], object]) -> None:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - began)
    print(f"{title:32s} {statistics.median(seconds):6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
