"""A foreign trainer: it imports nothing of abrun and writes metrics in a format of its own.

python foreign_trainer.py --out FILE --format csv|jsonl --steps N --seed S --lr X [--behaviour B] [--step-s T]
"""

import argparse
import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

asked = argparse.ArgumentParser()
asked.add_argument("--out", type=Path, required=True)
asked.add_argument("--format", default="jsonl")
asked.add_argument("--steps", type=int, default=5)
asked.add_argument("--seed", type=int, default=0)
asked.add_argument("--lr", type=float, default=0.1)
asked.add_argument("--step-s", type=float, default=0.0)
asked.add_argument("--behaviour", default="")
asked.add_argument("--label", default="")
args = asked.parse_args()


class Log:
    """JSON lines (`it`, as floats and NaN come), or a CSV file whose header is known."""

    def __init__(self) -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        self.file = args.out.open("a" if args.behaviour == "resumes" else "w", newline="")
        self.table = csv.writer(self.file)
        if args.format == "csv":
            self.table.writerow(["step", "score", "objective/loss"])

    def write(self, step: int, **values: float | str) -> None:
        if args.format == "csv":
            self.table.writerow([step, values["score"], values.get("loss", "")])
        else:
            row = {"step": step, "score": values.get("score"), "objective/loss": values.get("loss")}
            self.file.write(
                json.dumps({key: value for key, value in row.items() if value is not None}) + "\n"
            )
        self.file.flush()


def steps_done() -> int:
    """What a trainer with checkpoints knows of an earlier attempt."""
    state = args.out.parent / "checkpoint.txt"
    return int(state.read_text()) if args.behaviour == "resumes" and state.is_file() else 0


if args.behaviour == "mute":
    sys.exit(7)
print(
    f"seed {args.seed}, {os.environ.get('ABRUN_ARM')}, attempt {os.environ.get('ABRUN_ATTEMPT')}", flush=True
)
if args.behaviour == "crash":
    raise ValueError("no such model: the planned crash")
if args.behaviour == "code":
    sys.exit(7)
if args.behaviour == "sigkill":
    os.kill(os.getpid(), signal.SIGKILL)
if args.behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.behaviour == "daemons":
    for _ in range(20):
        subprocess.run(["sh", "-c", "sleep 0.1 &"], check=True)
if args.behaviour == "silent":
    sys.exit(0)
noise = random.Random(args.seed)
first = steps_done() + 1
log = Log()
for step in range(1, args.steps + 1):
    score = 1 - math.exp(-args.lr * (step - 1)) + 0.01 * noise.random()
    if step < first:
        continue
    shown = "n/a" if args.behaviour == "text" and step >= args.steps - 1 else score
    log.write(step, score=shown, loss=float("nan") if args.behaviour == "nan" and step == 2 else 1 - score)
    while args.behaviour == "babbles" and step == 3:  # works on nothing any more
        print("Root Cause " * 1000, flush=True)
        time.sleep(0.001)
    if args.behaviour == "resumes":
        partial = args.out.parent / "checkpoint.partial"  # a signal may come while it is written
        partial.write_text(str(step))
        partial.replace(args.out.parent / "checkpoint.txt")
    if args.behaviour == "late" and step > 2:
        log.write(step - 2, loss=-1.0)  # known only two steps later
    time.sleep(args.step_s)
if args.behaviour == "torn":
    log.file.write('{"step": 99, "sco')
if args.behaviour == "orphans" and os.fork() == 0:
    (args.out.parent / "child.pid").write_text(str(os.getpid()))
    time.sleep(60)
