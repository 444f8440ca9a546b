"""An experiment that is disturbed in the jobs of a cluster, and what is measured of it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from abrun.launch.cluster import find_cluster_jobs
from abrun.runs.experiment import read_run_state
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState

ROOT = Path(__file__).parents[2]
ARMS = ("baseline", "treatment")
SHORT = (
    "seeds=[0]",
    "warm_start=null",
    "controls.aa_reruns=0",
    "compare.claims=[]",
    "checkpoint.every=5",
    "algorithm.prompts_per_step=8",
)
DRIVER = f"""
name: gang
steps: 12
trainer:
  type: command
  ray: true
  argv: ["{{python}}", {ROOT}/tests/external/ray_driver.py, "{{num_nodes}}", "{{steps}}",
         "{{run_dir}}/m.jsonl", "{{rate}}"]
  parameters: {{rate: 0.02}}
  metrics: {{format: jsonl, path: "{{run_dir}}/m.jsonl"}}
cluster: {{nodes: 2}}
arms: {{baseline: {{}}, treatment: {{trainer.parameters.rate: 0.0201}}}}
seeds: [0, 1]
compare: {{claims: [{{metric: train/loss, window: last 50%, margin: 0.5, climbs: false}}]}}
"""
WATCHED: dict[tuple[Path, int], Any] = {}  # one view of each experiment's jobs, as a watching abrun has
WHATEVER_ELSE = ("timing/", "performance/", "memory/")


def sh(*argv: str | Path, **env: str) -> str:
    done = subprocess.run(
        [*map(str, argv)], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def abrun(*argv: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "abrun", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(runs_dir: Path, name: str, steps: int, *more: str) -> str:
    """Launch by a command for which every verdict on a few steps will do."""
    settings = [word for each in (*SHORT, f"steps={steps}") for word in ("--set", each)]
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    return abrun(
        "launch", recipe, f"--runs-dir={runs_dir}", f"--name={name}", *settings, "--exit-zero", *more
    )


def state(experiment_dir: Path, arm: str = "baseline") -> RunState:
    found = read_run_state(experiment_dir, RunName(arm=arm, seed=0))
    (record,) = experiment_dir.glob("_*/job*.json")
    submitted = record.stat().st_mtime_ns
    if (experiment_dir, submitted) not in WATCHED:
        WATCHED[experiment_dir, submitted] = find_cluster_jobs(experiment_dir)
    return WATCHED[experiment_dir, submitted].state_of(found)


def seconds_until(happened: Callable[[], Any], within_s: float) -> float:
    began = time.monotonic()
    while not happened():
        took_s = time.monotonic() - began
        assert took_s < within_s, f"not within {within_s} s"
        time.sleep(0.3)
    return time.monotonic() - began


def run(experiment_dir: Path, arm: str = "baseline") -> RunDir:
    return RunDir(experiment_dir / arm / "seed-0")


def rows(experiment_dir: Path, arm: str) -> dict[int, dict[str, Any]]:
    """Of each step the last attempt's row, without what is measured rather than computed."""
    found = {row["step"]: row for row in run(experiment_dir, arm).metrics_reader().read()}
    return {
        step: {
            key: value
            for key, value in row.items()
            if key not in ("time_s", "attempt") and not key.startswith(WHATEVER_ELSE)
        }
        for step, row in found.items()
    }


def verdict(experiment_dir: Path) -> dict[str, Any]:
    report = experiment_dir / "report" / "verdict.json"
    if not report.exists():
        abrun("compare", str(experiment_dir), "--allow-inconclusive", "--output", str(report.parent))
    content = json.loads(report.read_text())
    evidence = [part for part in content["evidence"] if part["kind"] in ("step one", "divergence")]
    return {"evidence": evidence, **{key: content[key] for key in ("verdict", "reasons", "num_pairs")}}


def check_end(experiment_dir: Path, reference: Path) -> None:
    """Every run has finished, with the numbers of the undisturbed ones; so has the comparison."""
    jobs = find_cluster_jobs(experiment_dir)
    assert jobs is not None
    seconds_until(lambda: not find_cluster_jobs(experiment_dir).active_job_ids, within_s=400)  # pyright: ignore
    for arm in ARMS:
        assert state(experiment_dir, arm).status == "finished"
        assert rows(experiment_dir, arm) == rows(reference, arm)
    assert verdict(experiment_dir) == verdict(reference)


def lost_steps(experiment_dir: Path, reached: dict[str, int]) -> int:
    """The most steps that a run did again: from the checkpoint that it went on from."""
    lost = 0
    for arm in ARMS:
        events = run(experiment_dir, arm).events()
        resumed = [event["step"] for event in events if event["event"] == "resumed"]
        began_again = run(experiment_dir, arm).last_attempt > 1
        lost = max(lost, reached[arm] - (resumed[0] if resumed else 0) if began_again else 0)
    return lost


def at_step(experiment_dir: Path, step: int) -> dict[str, int]:
    """Wait until both runs have come that far; how far each is."""
    seconds_until(
        lambda: all(run(experiment_dir, arm).heartbeat().step >= step for arm in ARMS), within_s=400
    )
    return {arm: run(experiment_dir, arm).heartbeat().step for arm in ARMS}


def is_past(experiment_dir: Path, reached: dict[str, int]) -> bool:
    """Whether a later attempt has made a step that none had made before; looks on as `abrun watch` does."""
    state(experiment_dir)
    return run(experiment_dir).last_attempt > 1 and run(experiment_dir).heartbeat().step > reached["baseline"]


def marked(experiment_dir: Path, words: bytes = b"") -> list[int]:
    """Every process of the experiment's runs, on whichever node; those with these words in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and f"ABRUN_RUN_DIR={experiment_dir}/".encode() in (entry / "environ").read_bytes()
                and words in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def is_over(experiment_dir: Path) -> bool:
    return not find_cluster_jobs(experiment_dir).active_job_ids  # pyright: ignore


def ranks_of(directory: Path, rank: int) -> list[int]:
    """The processes of one rank of a run, on whichever node: all are processes of this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if f"ABRUN_RUN_DIR={directory}".encode() in environ and f"RANK={rank}".encode() in environ:
                found.append(int(entry.name))
    return found


def check_resumed(
    fault: str, experiment_dir: Path, reference: Path, reached: dict[str, int], began: float, noticed_s: float
) -> int:
    """Wait until a disturbed experiment is past what it had reached, and check its end; the steps it lost."""
    seconds_until(lambda: is_past(experiment_dir, reached), within_s=400)
    resumed_s = time.monotonic() - began
    check_end(experiment_dir, reference)
    lost = lost_steps(experiment_dir, reached)
    table_row(fault, noticed_s, resumed_s, lost)
    return lost


def table_row(fault: str, noticed_s: float, resumed_s: float, lost: int) -> None:
    print(f"\n| {fault} | {noticed_s:.0f} s | {resumed_s:.0f} s | {lost} |")
