"""Measure `abrun compare` on large experiments: seconds, and memory of all processes.

    python -m tests.bench.bench_compare [long] [many] [wide] [usual] [table]

Writes each experiment to a temporary folder, then runs the command as a user does: a fresh process each time,
all formats of the report. `table` is a compressed CSV file of 6 million rows of two metrics. Prints seconds
(wall clock, and of the processor), and the peak of the proportional set size, summed over the processes of
the command. Fails where a comparison takes a minute or 2 GB.
"""

import contextlib
import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from abrun.runs.lines import LineWriter
from tests.bench.common import heading, make_parser, markdown_row, seconds_of_children
from tests.verdict.simulate import write_experiment

SHAPES = {  # runs, steps, metrics
    "long": (2, 1_500_000, 12),
    "many": (500, 2_000, 20),
    "wide": (2, 2_000, 5_000),
    "usual": (20, 10_000, 40),
}
TABLE_ROWS = 6_000_000
MAX_SECONDS = 60.0
MAX_BYTES = 2e9
SAMPLED_EVERY_S = 0.1


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, "table", []])
    names = parser.parse_args().shapes or [*SHAPES, "table"]
    print(heading("runs", "steps", "metrics", "files", "exit code", "seconds", "CPU seconds", "peak memory"))
    exceeded = [measure(*SHAPES[name]) for name in names if name in SHAPES]
    exceeded += [measure_table(TABLE_ROWS)] if "table" in names else []
    sys.exit(any(exceeded))


def measure(runs: int, steps: int, metrics: int) -> bool:
    """Print a line for an experiment; return True where its comparison exceeds the bound."""
    with tempfile.TemporaryDirectory() as folder:
        experiment_dir = Path(folder) / "large"
        write_large(experiment_dir, runs // 2, steps, metrics)
        size = sum(path.stat().st_size for path in experiment_dir.rglob("metrics.jsonl"))
        return compare(
            (runs, f"{steps:,}", f"{metrics:,}"), size, experiment_dir, "-o", Path(folder) / "report"
        )


def measure_table(num_rows: int) -> bool:
    """Print a line for a table; return True where its comparison exceeds the bound."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            file.write("step,train/reward,train/loss\n")
            file.writelines(f"{n},{n % 1000 / 1000:.3f},{n % 777 / 77:.4f}\n" for n in range(num_rows))
        return compare((1, f"{num_rows:,}", 2), path.stat().st_size, path)


def compare(shape: tuple[object, ...], num_bytes: int, *arguments: object) -> bool:
    """Print a line for a comparison; return True where it exceeds the bound."""
    command = [sys.executable, "-m", "abrun", "compare", *map(str, arguments)]
    seconds, cpu_seconds, peak, code = timed(command)
    cells = (
        f"{num_bytes / 2**20:,.0f} MiB",
        code,
        f"{seconds:.1f}",
        f"{cpu_seconds:.1f}",
        f"{peak / 1e9:.2f} GB",
    )
    print(markdown_row(*shape, *cells), flush=True)
    return seconds > MAX_SECONDS or peak > MAX_BYTES


def write_large(experiment_dir: Path, num_seeds: int, steps: int, metrics: int) -> None:
    """Write a finished experiment of curves that rise alike in both arms, and of metrics of noise."""
    planned: dict[str, Any] = {"steps": 1, "seeds": list(range(num_seeds)), "controls": {"aa_reruns": 0}}
    if num_seeds == 1:  # a margin needs a spread over seeds
        planned["compare"] = {"claims": []}
    write_experiment(experiment_dir, **planned)
    names = ["train/reward", "train/loss", "train/grad_norm", "train/token_mult_prob_error"]
    names += [f"other/metric_{index:04}" for index in range(metrics - len(names))]
    for place, directory in enumerate(sorted(experiment_dir.glob("*/seed-*"))):
        set_steps(directory / "config.json", steps)
        (directory / "metrics.jsonl").unlink()
        writer = LineWriter(directory / "metrics.jsonl")
        rng = np.random.default_rng(place)
        for step in range(1, steps + 1):
            # Both arms of a seed begin alike
            draw = rng if step > 1 else np.random.default_rng([place % num_seeds])
            values = draw.normal(1.0, 0.01, size=metrics)
            values[0] = 0.5 * step / steps + 0.1 * values[0]
            row = {"step": step, "attempt": 1, "time_s": float(step)}
            row |= dict(zip(names, values.tolist(), strict=True))
            writer.write(row)
        writer.close()
    set_steps(experiment_dir / "experiment.json", steps)


def set_steps(path: Path, steps: int) -> None:
    """Replace the number of steps, which is 1 in what was planned."""
    path.write_text(path.read_text().replace('"steps": 1,', f'"steps": {steps},'))


def timed(command: list[str]) -> tuple[float, float, int, int]:
    """Return seconds, CPU seconds, peak bytes of all processes, and exit code of a command."""
    start, before, peak = time.perf_counter(), seconds_of_children(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(SAMPLED_EVERY_S)
    cpu_seconds = seconds_of_children() - before
    return time.perf_counter() - start, cpu_seconds, peak, process.returncode


def memory_of(pid: int) -> int:
    """Return the proportional set size of a process and of those below it, in bytes."""
    total, folder = 0, Path("/proc", str(pid))
    with contextlib.suppress(OSError):
        for line in (folder / "smaps_rollup").read_text().splitlines():
            total += int(line.split()[1]) * 1024 if line.startswith("Pss:") else 0
        for task in os.listdir(folder / "task"):
            children = (folder / "task" / task / "children").read_text().split()
            total += sum(memory_of(int(child)) for child in children)
    return total


if __name__ == "__main__":
    main()
