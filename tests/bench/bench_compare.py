"""How long `abrun compare` and `abrun status` take on a large experiment, and how much memory they need.

    python tests/bench/bench_compare.py [--runs 20] [--steps 10000] [--metrics 40] [--nan]
    python tests/bench/bench_compare.py --runs 200 --steps 2000

Writes the experiment to a temporary folder, then runs the command as a user does: a fresh process each time,
all formats of the report. First from JSON lines alone; then with the cache of their numbers and other claims,
so that the report is new; then again, with nothing changed. Prints seconds (wall clock) and peak resident
memory, the largest of its processes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.compare.simulate import edit_rows, write_experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=40)
    parser.add_argument("--nan", action="store_true", help="one value of every run is NaN")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        experiment_dir = Path(folder) / "large"
        write_large(experiment_dir, options)
        size = sum(path.stat().st_size for path in experiment_dir.rglob("metrics.jsonl"))
        print(
            f"{options.runs} runs x {options.steps} steps x {options.metrics} metrics: {size / 2**20:.0f} MiB"
        )
        command = [sys.executable, "-m", "abrun", "compare", str(experiment_dir)]
        status = [sys.executable, "-m", "abrun", "status", str(experiment_dir)]
        for attempt in range(options.repeats):
            for cache in (*experiment_dir.rglob("metrics.npz"), *experiment_dir.glob("report/*")):
                cache.unlink()
            other = ["--primary", f"train/reward:last 20%:0.0{attempt + 3}"]
            cases = {"from JSON lines": command, "from the cache, other claims": [*command, *other]}
            for label, case in (cases | {"again": [*command, *other], "status": status}).items():
                seconds, peak, code = timed(case)
                print(f"{label:29} {seconds:5.2f} s  {peak / 2**20:5.0f} MiB  exit code {code}")
        page = experiment_dir / "report" / "report.html"
        if page.is_file():
            print(f"report.html: {page.stat().st_size / 2**20:.1f} MiB")


def write_large(experiment_dir: Path, options: argparse.Namespace) -> None:
    seeds = list(range(options.runs // 2))
    write_experiment(experiment_dir, steps=options.steps, seeds=seeds, controls={"aa_reruns": 0})
    rng = np.random.default_rng(0)
    for directory in sorted(experiment_dir.glob("*/seed-*")):
        more = rng.normal(size=(options.steps, options.metrics - 7))  # beside those of the simulation

        def widen(row: dict, more: np.ndarray = more) -> None:
            row.update((f"other/metric_{i:02}", float(x)) for i, x in enumerate(more[row["step"] - 1]))
            if options.nan and row["step"] == 7:
                row["other/metric_00"] = "NaN"

        edit_rows(directory, widen)


def timed(command: list[str]) -> tuple[float, int, int]:
    """Seconds, peak resident bytes and exit code of a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - start, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
