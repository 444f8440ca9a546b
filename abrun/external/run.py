"""One run of a foreign trainer from its config.json to its result.json."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import AbrunError, LaunchError
from abrun.external.environment import describe
from abrun.external.follower import Follower
from abrun.external.process import command, ending_of, stop, stopping_signals, wait
from abrun.external.recorder import FencedError, Recorder
from abrun.recipe import CommandRun, invocation, stored_run

POLL_S = 1.0
GRACE_S = 30.0  # launchers wait 35 s before they kill
INTERRUPTED = 3  # exit code, as of abrun.train
PYTHON_ERROR = r"^[\w.]+(?:Error|Exception|Interrupt)\b.*"


def run(directory: Path) -> int:
    """Train to the end, or until SIGTERM; returns an exit code. What happened stands in events.jsonl.

    Raises an AbrunError where that cannot be written, or the run directory is not a foreign trainer's.
    """
    record = store.read_json(directory / "config.json")
    config = stored_run(record.get("config"), str(directory / "config.json"))
    if not isinstance(config, CommandRun):
        raise LaunchError(
            f"{directory}: trainer.type: got 'abrun'; run it with: python -m abrun.train {directory}"
        )
    recorder = Recorder(directory)
    try:
        return _Run(directory, config, record, recorder).run()
    except FencedError:
        raise
    except AbrunError as error:
        recorder.event("failed", message=str(error))
        return 1


class _Run:
    """The parts of one run that its phases share."""

    def __init__(
        self, directory: Path, config: CommandRun, record: Mapping[str, Any], recorder: Recorder
    ) -> None:
        identity = {key: record.get(key) for key in ("experiment", "arm", "seed", "rerun")}
        run_dir = os.path.abspath(directory)
        self._filled = invocation(config, **identity, run_dir=run_dir)
        self._directory = directory
        self._config = config
        self._recorder = recorder
        self._log = directory / "stdout.log"
        self._log_start = _size(self._log)
        self._follower = Follower(
            config.trainer.metrics, Path(self._filled.metrics_path), config.trainer.aliases
        )
        self._env = {
            **os.environ,
            **self._filled.env,
            "ABRUN_SEED": str(identity["seed"]),
            "ABRUN_ARM": str(identity["arm"]),
            "ABRUN_RUN_DIR": run_dir,
            "ABRUN_ATTEMPT": str(recorder.attempt),
        }
        self._last_sign: object = None

    def run(self) -> int:
        filled, trainer = self._filled, self._config.trainer
        self._follower.skip(store.read_lines(self._directory / "metrics.jsonl"))
        cores = self._config.cluster.cpu_ranks
        self._recorder.environment(
            describe(filled.argv, trainer.python, trainer.versions_of, self._env, cores)
        )
        with stopping_signals() as stopped, command(filled.argv, self._env) as process:
            started = "resumed" if self._recorder.attempt > 1 else "started"
            self._recorder.event(started, step=self._follower.last_step, command=shlex.join(filled.argv))
            while (status := wait(process, POLL_S, lambda: stopped)) is None and not stopped:
                self._copy_metrics()
            if status is None:
                stop(process, GRACE_S)
        self._copy_metrics(ended=True)
        if status is None:
            self._recorder.event("interrupted", step=self._follower.last_step, signal=stopped[0])
            return INTERRUPTED
        return self._conclude(status)

    def _copy_metrics(self, *, ended: bool = False) -> None:
        self._recorder.check_fence()
        for step, row in self._follower.new_rows(ended=ended):
            self._recorder.metrics(step, row)
        sign = (self._follower.last_step, _size(self._log))
        if sign != self._last_sign:  # a sign of life, which a trainer that hangs does not give
            self._last_sign = sign
            self._recorder.heartbeat(self._follower.last_step)

    def _conclude(self, status: int) -> int:
        step = self._follower.last_step
        if status:
            words, code = ending_of(status)
            errors = re.findall(PYTHON_ERROR, _tail(self._log, self._log_start), re.MULTILINE)
            why = f" ({errors[-1]})" if errors else ""
            self._recorder.event("failed", step=step, message=f"{words}{why}; see {self._log}")
            return code
        if not self._follower.found:
            metrics = self._config.trainer.metrics
            problem = self._follower.problem or "; ".join(self._follower.notes) or "it holds no numbers"
            self._recorder.event(
                "failed",
                step=step,
                message=f"no metrics: trainer.metrics: {metrics.format} at {self._filled.metrics_path}: "
                f"{problem}; mend format or path, or look into {self._log}",
            )
            return 1
        if self._follower.problem:
            self._recorder.event("failed", step=step, message=f"metrics: {self._follower.problem}")
            return 1
        notes = [f"no metric {name!r}, which aliases name" for name in self._follower.never_logged]
        if step < self._config.steps:
            notes.append(f"the metrics end at step {step} of {self._config.steps}")
        self._recorder.finish(step, **({"message": "; ".join(notes)} if notes else {}))
        return 0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, start: int, most: int = 1 << 20) -> str:
    """The end of what this attempt has printed."""
    try:
        with file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - most))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
