"""Measure `abrun compare --fleet` on many recipes: seconds, and the processor's seconds of all its processes.

    python -m tests.bench.bench_fleet [--recipes 150] [--seeds 4] [--steps 500] [--metrics 20] [--red 0.3]

Writes the logs of two versions and a reference of each recipe to a temporary folder. Then it judges both in
fresh processes, as a user does: the earlier version, and the present one with `--before`, with all reports.
Fails where both together take a minute.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.common import make_parser, seconds_of_children
from tests.tools.drift.simulate import write_reference, write_runs

MAX_SECONDS = 60.0
DROP = -0.3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipes", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--red", type=float, default=0.3, help="share of recipes that are red in the present")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shape = {
            "seeds": range(options.seeds),
            "num_steps": options.steps,
            "num_monitors": options.metrics - 2,
        }
        for number in range(options.recipes):
            name = f"recipe-{number:03d}"
            shift = DROP if number < options.red * options.recipes else 0.0
            write_reference(root / "references" / f"{name}.json", 3 * number, root / "old" / name, **shape)
            shift_before = shift if number % 2 else 0.0
            write_runs(root / "main" / name, 3 * number + 1, shift=shift_before, **shape)
            write_runs(root / "branch" / name, 3 * number + 2, shift=shift, **shape)
        compare = [sys.executable, "-m", "abrun", "compare", "--reference", str(root / "references")]
        commands = {
            "earlier": [*compare, "--fleet", str(root / "main"), "-o", str(root / "report-main")],
            "present": [*compare, "--fleet", str(root / "branch"), "-o", str(root / "report")],
        }
        commands["present"] += ["--before", str(root / "report-main")]
        print(", ".join(f"{number} {name}" for name, number in vars(options).items()))
        seconds = sum(measure(name, command) for name, command in commands.items())
    sys.exit(seconds > MAX_SECONDS)


def measure(name: str, command: list[str]) -> float:
    """Run a command, print its times and what it says, and return its seconds."""
    before, start = seconds_of_children(), time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    seconds = time.perf_counter() - start
    processor = seconds_of_children() - before
    answer = (done.stdout.splitlines() or [done.stderr])[1:2]
    print(
        f"{name}: {seconds:.1f} s, processor {processor:.1f} s, exit code {done.returncode}: {answer}",
        flush=True,
    )
    return seconds


if __name__ == "__main__":
    main()
