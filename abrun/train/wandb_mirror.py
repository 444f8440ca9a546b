"""Mirror of a run's metrics in wandb. The store is the truth: whatever wandb does, training goes on."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from abrun.recipe import OwnRunConfig
from abrun.redaction import without_secrets
from abrun.store import RunRecord


class WandbMirror:
    """One wandb run a run directory: group = experiment, job_type = arm, an id that a resume finds again.

    Without an API key it records offline, and says so. The broad `except` clauses are the point of this
    class.
    """

    def __init__(
        self, config: OwnRunConfig, record: RunRecord, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._run = self._start(config, record, directory, mode=None)
        if self._run is None:
            self._run = self._start(config, record, directory, mode="offline")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Mirror one step."""
        if self._run is None:
            return
        try:
            self._run.log(values, step=step)
        except Exception as error:
            self._run = None
            self._say(f"wandb: stopped mirroring: {_line(error)}")

    def finish(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._say(f"wandb: did not finish: {_line(error)}")

    def _start(self, config: OwnRunConfig, record: RunRecord, directory: Path, mode: Any) -> Any:
        assert config.wandb is not None
        run = record.name
        name = f"{run.arm}-s{run.seed}" + (f"-aa{run.rerun}" if run.rerun else "")
        place = f"{record.experiment}/{name}/{directory.resolve()}"
        try:
            import wandb

            return wandb.init(
                project=config.wandb.project,
                entity=config.wandb.entity,
                group=record.experiment,
                job_type=run.arm,
                name=name,
                id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow",
                dir=directory,
                config=without_secrets(config.model_dump(mode="json")),
                mode=mode,
            )
        except Exception as error:
            then = "goes on without a mirror" if mode else "is mirrored offline"
            self._say(f"wandb: {_line(error)} This run {then}.")
            return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
