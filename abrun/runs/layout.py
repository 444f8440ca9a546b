"""Which run a directory is of, and what lies in it, by name: abrun.runs alone reads and writes it."""

from dataclasses import dataclass

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # of experiments and arms, which are folders

EXPERIMENT = "experiment.json"  # of an experiment; what follows, of a run
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
LOG = "stdout.log"
CHECKPOINTS = "checkpoints"
WANDB = "wandb.json"

RUN_FILES = (
    CONFIG,
    ATTEMPTS,
    LAUNCH,
    ENVIRONMENT,
    HEARTBEAT,
    NODES,
    RESULT,
    INITIAL_SKETCH,
    FINAL_SKETCH,
    METRICS,
    EVENTS,
    VALIDATION,
    SAMPLES,
    LOG,
    CHECKPOINTS,
    WANDB,
)


def engine_log_name(number: int) -> str:
    """What a rollout engine's process prints, where a run has devices for them alone."""
    return f"engine-{number}.log"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RunName:
    """Which run of an experiment: `rerun` 0 is the run itself, j > 0 its j-th same-seed repetition (A/A)."""

    arm: str
    seed: int
    rerun: int = 0

    def __str__(self) -> str:
        return f"{self.arm}/seed-{self.seed}" + (f"-aa{self.rerun}" if self.rerun else "")
