"""One run of wandb for one run directory: group = experiment, job type = arm, an id that is found again."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.reasons import Code, Reason
from abrun.recipe.run import Wandb
from abrun.redaction import printable, without_secrets
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir

INIT_S = 30.0  # for a server to answer at all
STEP = "step"  # what wandb draws metrics over
OWN = ("step", "attempt", "time_s")  # of a row, besides its metrics
Say = Callable[[Reason], object]


class WandbRun:
    """A run directory's run in wandb: begun, or gone on with where wandb has it already.

    Where `mode` is None it is WANDB_MODE's, else online, and offline where that fails. `say` hears what goes
    wrong; nothing is raised.
    """

    def __init__(
        self, run: RunDir, record: RunRecord, settings: Wandb, say: Say, *, mode: str | None = None
    ) -> None:
        self._directory, self._say = run, say
        self._through = -1  # the last step that wandb has
        self._run = self._begin(record, settings, mode)
        if self._run is None and mode is None:
            self._run = self._begin(record, settings, "offline")

    @property
    def alive(self) -> bool:
        return self._run is not None

    @property
    def url(self) -> str | None:
        """Where it is seen; None offline, and where there is none."""
        return getattr(self._run, "url", None)

    def log(self, step: int, values: Mapping[str, float]) -> bool:
        """Mirror one step; False where wandb has it already, or there is no mirror."""
        if self._run is None or step <= self._through:
            return False
        try:
            self._run.log({STEP: step, **values}, step=step)
        except Exception as error:
            self._run = None
            self._say(Code.MIRROR_STOPPED(error=line_of(error)))
            return False
        self._through = step
        return True

    def finish(self, *, failed: bool = False) -> None:
        """Let wandb take the rest, however long that is."""
        if self._run is None:
            return
        try:
            self._run.finish(int(failed))
        except Exception as error:
            self._say(Code.MIRROR_NOT_ENDED(error=line_of(error)))

    def _begin(self, record: RunRecord, settings: Wandb, mode: Any) -> Any:
        try:
            import wandb

            known, name = self._directory.wandb_location(), run_name(record)
            run = wandb.init(
                project=known.get("project") or settings.project,
                entity=known.get("entity") or settings.entity,
                group=record.experiment,
                job_type=record.name.arm,
                name=name,
                id=known.get("id") or new_id(record, self._directory.path),
                resume="allow",
                dir=self._directory.path,
                config=without_secrets(record.config),
                mode=mode,
                settings=wandb.Settings(init_timeout=INIT_S),
            )
            run.define_metric(STEP, hidden=True)
            run.define_metric("*", step_metric=STEP)
            offline = run.url is None
            self._through = last_offline_step(self._directory, run.id) if offline else run.starting_step - 1
            place = {"id": run.id, "project": run.project, "entity": run.entity, "url": run.url}
            self._directory.write_wandb_location(known | {key: text for key, text in place.items() if text})
            return run
        except Exception as error:
            self._say(Code.MIRROR_NOT_BEGUN(error=line_of(error), offline=not mode))
            return None


def run_name(record: RunRecord) -> str:
    run = record.name
    return f"{run.arm}-s{run.seed}" + (f"-aa{run.rerun}" if run.rerun else "")


def new_id(record: RunRecord, directory: Path) -> str:
    """The same for every start of a run; another for one of the same name in another folder."""
    place = f"{record.experiment}/{run_name(record)}/{directory.resolve()}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def last_offline_step(run: RunDir, run_id: str) -> int:
    """The last step that earlier starts of this run have recorded offline; -1 without any."""
    from abrun.logs.wandb_files import read_wandb_files

    last = -1
    for path in sorted((run.path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        try:
            metrics = read_wandb_files([path], run_id).metrics
        except StoreError:
            continue
        last = max([last, *(int(series.steps[-1]) for series in metrics.values() if len(series))])
    return last


class Rows:
    """A run's rows as they come, by step: of what several attempts recorded the newest."""

    def __init__(self, run: RunDir) -> None:
        self._rows, self._attempt = run.metrics_reader(), run.last_attempt
        self._before: dict[int, dict[str, float]] = {}  # of older attempts, until this one is past them

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """What the newest attempt has recorded, each after the steps that it began after."""
        for row in self._rows.read():
            if row.get("attempt", 1) < self._attempt:
                self._before[row["step"]] = values_of(row)
                continue
            yield from self.rest(row["step"] - 1)
            yield row["step"], values_of(row)

    def rest(self, last: int | None = None) -> Iterator[tuple[int, dict[str, float]]]:
        """What older attempts have recorded up to the step `last`, or all of it."""
        for step in sorted(self._before):
            if last is None or step <= last:
                yield step, self._before[step]
        self._before = {}


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row, with NaN and infinities as numbers."""
    values = {}
    for key, value in row.items():
        if key not in OWN and not isinstance(value, bool):
            try:
                values[key] = float(value)
            except (TypeError, ValueError):
                continue
    return values


def line_of(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:500]) or type(error).__name__
