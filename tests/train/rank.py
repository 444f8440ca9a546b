"""Stands in for a rank: `python -m tests.train.rank DIRECTORY`. RANK_DOES says what it does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from abrun import progress

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


def hang() -> None:
    time.sleep(300)


def main(directory: Path) -> None:
    progress.join()
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
    if does == "fail":
        sys.exit(7)
    progress.beat("generation" if does == "hang" else "policy_training")
    hang() if does == "hang" else time.sleep(300)


main(Path(sys.argv[1]))
