"""One wandb run for one run directory: group = experiment, job type = arm, and a stable id."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.messages.codes import Code, Reason, in_words
from abrun.recipe.run import Wandb
from abrun.runs.launches import write_wandb_location
from abrun.runs.records import RunRecord
from abrun.runs.redaction import printable, without_secrets
from abrun.runs.rundir import RunDir

INIT_TIMEOUT_S = 30.0
STEP_KEY = "step"  # the x-axis of metrics in wandb
NON_METRIC_KEYS = ("step", "attempt", "time_s")  # keys of a row that are not metrics
Say = Callable[[Reason], object]


class WandbRun:
    """The wandb run of a run directory, started or resumed.

    If `mode` is None it is taken from WANDB_MODE, else online, and offline if that fails. Errors are reported
    through `say` and never raised.
    """

    def __init__(
        self, run: RunDir, record: RunRecord, settings: Wandb, say: Say, *, mode: str | None = None
    ) -> None:
        self._directory, self._say = run, say
        self._last_sent_step = -1
        self._run = self._begin(record, settings, mode)
        if self._run is None and mode is None:
            self._run = self._begin(record, settings, "offline")

    @property
    def is_alive(self) -> bool:
        return self._run is not None

    @property
    def url(self) -> str | None:
        """URL of the run; None if offline or without a wandb run."""
        return getattr(self._run, "url", None)

    def log(self, step: int, values: Mapping[str, float]) -> bool:
        """Send one step. Return False if wandb has it already or mirroring has stopped."""
        if self._run is None or step <= self._last_sent_step:
            return False
        try:
            self._run.log({STEP_KEY: step, **values}, step=step)
        except Exception as error:
            self._run = None
            self._say(in_words(f"wandb stopped: {error_line(error)}"))
            return False
        self._last_sent_step = step
        return True

    def finish(self, exit_code: int = 0) -> None:
        """Wait until wandb has sent the rest, however long that takes. A nonzero exit code is a failure."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code)
        except Exception as error:
            self._say(in_words(f"did not finish: {error_line(error)}"))

    def _begin(self, record: RunRecord, settings: Wandb, mode: Any) -> Any:
        try:
            import wandb

            recorded, name = self._directory.wandb_location(), run_name(record)
            run = wandb.init(
                project=recorded.get("project") or settings.project,
                entity=recorded.get("entity") or settings.entity,
                group=record.experiment,
                job_type=record.name.arm,
                name=name,
                id=recorded.get("id") or new_id(record, self._directory.path),
                resume="allow",
                dir=self._directory.path,
                config=without_secrets(record.config),
                mode=mode,
                settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S),
            )
            run.define_metric(STEP_KEY, hidden=True)
            run.define_metric("*", step_metric=STEP_KEY)
            self._last_sent_step = run.starting_step - 1
            if run.url is None:
                self._last_sent_step = last_offline_step(self._directory, run.id)
            location = {"id": run.id, "project": run.project, "entity": run.entity, "url": run.url}
            known = {key: text for key, text in location.items() if text}
            write_wandb_location(self._directory, recorded | known)
            return run
        except Exception as error:
            self._say(Code.MIRROR_NOT_BEGUN(error=error_line(error), offline=not mode))
            return None


def run_name(record: RunRecord) -> str:
    run = record.name
    return f"{run.arm}-s{run.seed}" + (f"-aa{run.rerun}" if run.rerun else "")


def new_id(record: RunRecord, directory: Path) -> str:
    """Return an id: the same for every start of a run, another for a run of this name elsewhere."""
    identity = f"{record.experiment}/{run_name(record)}/{directory.resolve()}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def last_offline_step(run: RunDir, run_id: str) -> int:
    """Return the last step that earlier starts of this run recorded offline, or -1."""
    from abrun.logs.wandb_files import read_wandb_files

    last_step = -1
    for path in sorted((run.path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        try:
            metrics = read_wandb_files([path], run_id).metrics
        except StoreError:
            continue
        last_step = max([last_step, *(int(series.steps[-1]) for series in metrics.values() if len(series))])
    return last_step


class AttemptRows:
    """A run's rows by step as they arrive; of several attempts, the newest row of a step wins."""

    def __init__(self, run: RunDir) -> None:
        self._rows, self._attempt = run.metrics_reader(), run.last_attempt
        # Metrics of older attempts by step, until the newest attempt has passed that step.
        self._older_rows: dict[int, dict[str, float]] = {}

    def read_new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield new rows of the newest attempt, preceded by the older steps that it started after."""
        for row in self._rows.read():
            if row.get("attempt", 1) < self._attempt:
                self._older_rows[row["step"]] = row_metrics(row)
                continue
            yield from self.take_older(row["step"] - 1)
            yield row["step"], row_metrics(row)

    def take_older(self, last_step: int | None = None) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield rows of older attempts up to `last_step`, or all, and forget them."""
        for step in sorted(self._older_rows):
            if last_step is None or step <= last_step:
                yield step, self._older_rows[step]
        self._older_rows = {}


def row_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row, with NaN and infinities as floats."""
    values = {}
    for key, value in row.items():
        if key not in NON_METRIC_KEYS and not isinstance(value, bool):
            try:
                values[key] = float(value)
            except (TypeError, ValueError):
                continue
    return values


def error_line(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:500]) or type(error).__name__
