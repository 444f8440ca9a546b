"""Names of runs and of the files in a run directory. Only abrun.runs reads and writes these files."""

import re
from dataclasses import dataclass
from pathlib import Path

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # names of experiments and arms, which are folders

REPORT, VERDICT = "report", "verdict.json"  # folder of an experiment's report, and the verdict in it
EXPERIMENT = "experiment.json"  # in an experiment's directory; the files below are in a run's
CONFIG = "config.json"
ATTEMPTS = "attempts"
LAUNCH = "launch.json"
ENVIRONMENT = "environment.json"
HEARTBEAT = "heartbeat.json"
NODES = "nodes"
RESULT = "result.json"
INITIAL_SKETCH = "initial-sketch.safetensors"
FINAL_SKETCH = "final-sketch.safetensors"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
VALIDATION = "validation.jsonl"
SAMPLES = "samples.jsonl"
ROLLOUTS = "rollouts"  # folder with a file for each step
LOG = "stdout.log"
CHECKPOINTS = "checkpoints"
WANDB = "wandb.json"

RUN_FILES = (
    *(CONFIG, ATTEMPTS, LAUNCH, ENVIRONMENT, HEARTBEAT, NODES, RESULT, INITIAL_SKETCH, FINAL_SKETCH),
    *(METRICS, EVENTS, VALIDATION, SAMPLES, ROLLOUTS, LOG, CHECKPOINTS, WANDB),
)


def engine_log_name(number: int) -> str:
    """Return the name of a rollout engine's log, for runs with devices reserved for rollout engines."""
    return f"engine-{number}.log"


def node_log_name(node: int) -> str:
    """Return the name of the log of a command on a node other than the first."""
    return f"stdout-node-{node}.log"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RunName:
    """Identity of a run in an experiment: `rerun` 0 is the run, j > 0 its j-th A/A rerun (same seed)."""

    arm: str
    seed: int
    rerun: int = 0

    def __str__(self) -> str:
        return f"{self.arm}/seed-{self.seed}" + (f"-aa{self.rerun}" if self.rerun else "")


def parse_run_folder(folder: Path) -> RunName | None:
    """Return the run that a folder is named after, such as `treatment/seed-1`; None for another name."""
    match = re.fullmatch(r"seed-(\d{1,10})(?:-aa(\d{1,9}))?", folder.name, re.ASCII)
    if match is None or not re.fullmatch(NAME_PATTERN, folder.parent.name):
        return None
    return RunName(arm=folder.parent.name, seed=int(match[1]), rerun=int(match[2] or 0))
