"""Stands in for a rank: `python -m tests.trainer.loop.rank DIRECTORY`. RANK_DOES says what it does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from abrun.processes import progress
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt

# torch's own wording
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


def hang(directory: Path) -> None:
    go_on = str(directory / "go-on")
    while True:
        if os.access(go_on, os.F_OK):  # no function of Python's, in which it could be found instead of here
            progress.report()
        time.sleep(0.1)


def main(directory: Path) -> None:
    if os.environ.get("PATIENCE_S"):
        progress.MIN_PATIENCE_S = float(os.environ["PATIENCE_S"])
    progress.report_to_agent()
    rank = os.environ["RANK"]
    does = json.loads(os.environ["RANK_DOES"]).get(rank, "wait")
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    if does == "orphan":  # a daemon in a session of its own, whose parent is gone
        code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}])"
        subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
        return
    if does == "daemons":
        for _ in range(20):
            subprocess.run(["sh", "-c", "sleep 0.1 &"], check=True)
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "abort":
        print(f"{WATCHDOG} ran for 5041 milliseconds before timing out.", flush=True)
        os.abort()
    if (directory / "config.json").exists():
        if rank == "0":
            begin_attempt(RunDir(directory))
        for _ in range(4):
            progress.report_step()
    progress.report("generation" if does == "hang" else "policy_training")
    hang(directory) if does == "hang" else time.sleep(300)


main(Path(sys.argv[1]))
