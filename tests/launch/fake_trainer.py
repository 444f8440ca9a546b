"""Stands in for `python -m abrun.trainer RUN_DIR`: the same files and signals, without torch.

FAKE_TRAINER in the environment is JSON: {"step_s": seconds, "engine": true, "runs": {"arm/seed-0": what}}.
With an engine, a process that the trainer needs at every step runs below it.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from abrun.messages.codes import Code
from abrun.processes import progress
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt

ENGINE = "import time; time.sleep(600)  # engine"
asked_to_stop = False


def stop(*_: object) -> None:
    global asked_to_stop
    asked_to_stop = True


def main(directory: Path) -> None:
    progress.report_to_agent()
    asked = json.loads(os.environ.get("FAKE_TRAINER", "{}"))
    run = RunDir(directory)
    record = run.record()
    label, num_steps = str(record.name), record.config["steps"]
    behaviour = asked.get("runs", {}).get(label, "")
    if behaviour == "silent":
        sys.exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else stop)
    if os.environ.get("RANK", "0") != "0":
        while not (run.finished or asked_to_stop):
            time.sleep(0.01)
        return
    writer = begin_attempt(run)
    print(
        f"{label} attempt {writer.attempt}: CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}",
        flush=True,
    )
    if run.initial_weights:
        assert run.initial_weights.is_dir(), f"no initial weights at {run.initial_weights}"
    done = [row["step"] for row in run.metrics_reader().read()]
    first = max(done, default=0) + 1
    writer.event("resumed" if done else "started", step=first)
    if behaviour == "fail":
        writer.fail(Code.FOREIGN_TEXT(text="the planned failure"), exit_code=3)
        sys.exit(3)
    if behaviour == "crash":
        raise ValueError("the planned crash")
    if behaviour == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "no-result":
        return
    engine = subprocess.Popen([sys.executable, "-c", ENGINE]) if asked.get("engine") else None
    for step in range(first, num_steps + 1):
        time.sleep(asked.get("step_s", 0.0))
        if engine and engine.poll() is not None:
            writer.fail(Code.FOREIGN_TEXT(text="the engine is gone"), exit_code=2)
            sys.exit(2)
        writer.metrics(
            step,
            {
                "train/reward": 1 - math.exp(-step / 20) + 0.02 * math.sin(step * (1 + record.name.seed)),
                "train/token_mult_prob_error": 1.0002,
                "train/grad_norm": 0.5 + 1 / step,
                "timing/train/total_step_time_s": asked.get("step_s", 0.0) + 0.01,
                "memory/forward_backward/peak_live_tensor_bytes": 84_000_000,
            },
        )
        writer.heartbeat(step)
        if behaviour == "killed-later" and writer.attempt == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked_to_stop:
            writer.interrupt(exit_code=1, step=step)
            sys.exit(1)
    run.final_weights.mkdir(parents=True, exist_ok=True)
    if engine:
        engine.kill()
        engine.wait()
    writer.finish(num_steps)


main(Path(sys.argv[1]))
