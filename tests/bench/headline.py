"""The headline figures of docs/measured.md, each beside what is recorded there.

    python -m tests.bench.headline [--only kernel sft ...]

Runs on an H200 in about five minutes, with vLLM; on two, their layouts as well. Prints a row for each figure
and exits with 1 if one is worse than recorded by more than LIMIT, or was not measured.
"""

import re
import subprocess
import sys
import time
from dataclasses import dataclass

from abrun.tools.predict.peaks import query_gpus
from tests.bench.common import heading, make_parser, markdown_row

LIMIT = 0.07
TIMEOUT_S = 300


@dataclass(frozen=True)
class Measurement:
    """One benchmark, and the figures that its output holds: name, pattern of its number, recorded value."""

    arguments: tuple[str, ...]
    figures: tuple[tuple[str, str, float], ...]
    gpus: int = 1
    higher_is_better: bool = False


MEASUREMENTS = {
    "kernel": Measurement(
        ("bench_logprobs", "--rounds", "3", "--only", "triton", "--shapes", "8192,4096,151936"),
        (
            ("triton, forward and backward, ms", r"^\| triton \|[^|]*\|[^|]*\| ([\d.]+)", 62.2),
            ("triton, one pass, ms", r"^\| one-pass triton \|[^|]*\|[^|]*\| ([\d.]+)", 48.6),
        ),
    ),
    "sft": Measurement(
        ("bench_step", "--algorithm", "sft", "--only", "all on"),
        (("SFT, all on, s a step", r"^all on +([\d.]+)", 0.894),),
    ),
    "grpo": Measurement(
        ("bench_step", "--algorithm", "grpo", "--only", "all on"),
        (("GRPO with vLLM, all on, s a step", r"^all on +([\d.]+)", 2.425),),
    ),
    "start": Measurement(
        ("bench_starts", "--only", "again"),
        (
            ("first step of a run, s", r"^again baseline\S*: first step ended after ([\d.]+)", 17.3),
            ("the same, compiled, s", r"^again compiled\S*: first step ended after ([\d.]+)", 21.1),
        ),
    ),
    "two": Measurement(
        ("bench_scaling", "--algorithm", "sft", "--only", "FSDP2", "megatron", "TP 2"),
        (
            ("dtensor on two GPUs, of one's tokens/s", r"^\| sft \| FSDP2 \| 2 \|[^|]*\| ([\d.]+)", 0.93),
            ("megatron on two GPUs", r"^\| sft \| megatron \| 2 \|[^|]*\| ([\d.]+)", 1.0),
            ("dtensor, tensor 2 with sequence", r"^\| sft \| TP 2 \| 2 \|[^|]*\| ([\d.]+)", 0.64),
        ),
        gpus=2,
        higher_is_better=True,
    ),
}


def measure(measurement: Measurement) -> tuple[str, float]:
    """Run a benchmark; return its output and how many seconds it took."""
    began_s = time.monotonic()
    module, *options = measurement.arguments
    command = [sys.executable, "-m", f"tests.bench.{module}", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        output = done.stdout + (done.stderr[-2000:] if done.returncode else "")
    except subprocess.TimeoutExpired as error:
        output = f"{error.stdout or ''}\nended after {TIMEOUT_S} s"
    return output, time.monotonic() - began_s


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    asked = parser.parse_args()
    cards = query_gpus("name,driver_version")
    print(*cards, sep="; ")
    print(heading("figure", "now", "recorded", "now / recorded", "", "measured in, s"), flush=True)
    num_worse = 0
    for measurement in (MEASUREMENTS[name] for name in asked.only):
        if measurement.gpus > len(cards):
            continue
        output, seconds = measure(measurement)
        for name, pattern, recorded in measurement.figures:
            found = re.search(pattern, output, re.M)
            if found is None:
                num_worse += 1
                print(f"{name}: not measured\n{output[-2000:]}", flush=True)
                continue
            ratio = float(found[1]) / recorded
            is_worse = (1 / ratio if measurement.higher_is_better else ratio) > 1 + LIMIT
            num_worse += is_worse
            cells = found[1], recorded, f"{ratio:.3f}", "worse" if is_worse else "", f"{seconds:.0f}"
            print(markdown_row(name, *cells), flush=True)
    sys.exit(1 if num_worse else 0)


if __name__ == "__main__":
    main()
