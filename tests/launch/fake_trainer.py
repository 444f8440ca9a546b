"""Stands in for `python -m abrun.train RUN_DIR`: the same files and signals, without torch.

FAKE_TRAINER in the environment is JSON: {"step_s": seconds, "runs": {"arm/seed-0": behaviour}}.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from abrun import store

asked_to_stop = False


def stop(*_: object) -> None:
    global asked_to_stop
    asked_to_stop = True


def main(directory: Path) -> None:
    asked = json.loads(os.environ.get("FAKE_TRAINER", "{}"))
    run = store.read_json(directory / "config.json")
    label = f"{run['arm']}/seed-{run['seed']}" + (f"-aa{run['rerun']}" if run["rerun"] else "")
    behaviour = asked.get("runs", {}).get(label, "")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else stop)
    attempt = store.current_attempt(directory)
    metrics = store.LineWriter(directory / "metrics.jsonl")
    events = store.LineWriter(directory / "events.jsonl")
    print(
        f"{label} attempt {attempt}: CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}", flush=True
    )
    if run["initial_weights"]:
        weights = directory / run["initial_weights"]
        assert weights.is_dir(), f"no initial weights at {weights}"
    done = [row["step"] for row in store.read_lines(directory / "metrics.jsonl")]
    first = max(done, default=0) + 1
    events.write({"event": "resumed" if done else "started", "step": first})
    if behaviour == "fail":
        events.write({"event": "failed", "message": "the planned failure"})
        sys.exit(3)
    if behaviour == "crash":
        raise ValueError("the planned crash")
    if behaviour == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "no-result":
        return
    for step in range(first, run["config"]["steps"] + 1):
        time.sleep(asked.get("step_s", 0.0))
        metrics.write(
            {
                "step": step,
                "attempt": attempt,
                "time_s": time.time(),
                "train/reward": 1 - math.exp(-step / 20) + 0.02 * math.sin(step * (1 + run["seed"])),
                "train/token_mult_prob_error": 1.0002,
                "train/grad_norm": 0.5 + 1 / step,
                "timing/train/total_step_time_s": asked.get("step_s", 0.0) + 0.01,
                "memory/forward_backward/peak_live_tensor_bytes": 84_000_000,
            }
        )
        store.write_json(
            directory / "heartbeat.json",
            {"time_s": time.time(), "step": step, "pid": os.getpid(), "attempt": attempt},
        )
        if asked_to_stop:
            events.write({"event": "interrupted", "step": step})
            sys.exit(1)
    (directory / "checkpoints" / "final").mkdir(parents=True, exist_ok=True)
    store.write_json(directory / "result.json", {"steps": run["config"]["steps"]})


main(Path(sys.argv[1]))
