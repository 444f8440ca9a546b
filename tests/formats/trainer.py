"""Trainer of the stored experiments: JSON lines of a curve, and a checkpoint that a next attempt resumes."""

import argparse
import json
import random
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--offset", type=float, required=True)
parser.add_argument("--step-s", type=float, required=True)
options = parser.parse_args()

options.folder.mkdir(parents=True, exist_ok=True)
rows = options.folder / "metrics.jsonl"
num_done = len(rows.read_text().splitlines()) if rows.is_file() else 0
with rows.open("a") as file:
    for step in range(num_done + 1, options.steps + 1):
        noise = random.Random(f"{options.seed} {step}").gauss(0, 0.01)
        reward = 1 - 0.8 * 0.8**step + noise + options.offset
        row = {"step": step, "reward": reward, "loss": 1 - reward, "peak": 2**30 + 2**20 * options.seed}
        print(json.dumps(row), file=file, flush=True)
        time.sleep(options.step_s)
