"""One run of a foreign trainer from its config.json to its result.json."""

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.external.environment import describe
from abrun.external.follower import Follower
from abrun.processes import (
    RUN_DIR,
    Awake,
    Popen,
    StopRequests,
    adopt_orphans,
    below,
    end_all,
    end_group,
    ending_of,
    oom_kills,
    processes_of,
    reap_adopted,
    shell_code,
    start,
    stopping_signals,
    wait,
)
from abrun.processes.capture import capped
from abrun.processes.progress import LAST_STEPS, patience
from abrun.reasons import Code, Reason
from abrun.recipe.command import CommandRunConfig, invocation, values_of
from abrun.recipe.experiment import stored_run
from abrun.redaction import current_mask, hide_secrets_of, hide_values
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from abrun.runs.writer import FencedError, RunWriter

POLL_S = 1.0
GRACE_S = 30.0  # launchers wait 35 s before they kill
PATIENCE = 10  # times the longest step so far, before a command counts as hanging
LIMITS = (Code.TIME_LIMIT_REACHED, Code.STALL_LIMIT_REACHED)
FAILED, INTERRUPTED, TIMED_OUT = 1, 3, 124  # exit codes, as of abrun.train and its agent


def run(directory: Path) -> int:
    """Train to the end, or until SIGTERM; returns an exit code. What happened stands in the run directory.

    Raises an AbrunError where that cannot be written, or the run directory is not a foreign trainer's.
    """
    here = RunDir(directory)
    record = here.record()
    config = stored_run(record.config, str(directory))
    if not isinstance(config, CommandRunConfig):
        raise LaunchError(
            f"{directory}: trainer.type: got 'abrun'; run it with: python -m abrun.train {directory}"
        )
    hide_secrets_of(os.environ)
    hide_values(values_of(config, os.environ))
    writer = here.begin_attempt()
    try:
        return _Run(here, config, record, writer).run()
    except FencedError:
        raise
    except AbrunError as error:
        writer.fail(error.reason, exit_code=FAILED)
        return FAILED


class _Run:
    """The parts of one run that its phases share."""

    def __init__(self, here: RunDir, config: CommandRunConfig, record: RunRecord, writer: RunWriter) -> None:
        name, run_dir = record.name, os.path.abspath(here.path)
        self._filled = invocation(
            config,
            experiment=record.experiment,
            arm=name.arm,
            seed=name.seed,
            rerun=name.rerun,
            run_dir=run_dir,
            environment=os.environ,
        )
        self._here = here
        self._config = config
        self._writer = writer
        self._log_start = 0
        self._oom_kills = oom_kills()
        self._follower = Follower(
            config.trainer.metrics, Path(self._filled.metrics_path), config.trainer.aliases, here
        )
        self._env = {
            **os.environ,
            **self._filled.env,
            "ABRUN_SEED": str(name.seed),
            "ABRUN_ARM": name.arm,
            RUN_DIR: os.path.realpath(run_dir),
            "ABRUN_ATTEMPT": str(writer.attempt),
        }
        self._began_s = self._stepped_s = time.monotonic()
        self._step, self._longest_step_s = 0, 0.0
        self._steps_s: list[float] = []
        self._awake = Awake()

    def run(self) -> int:
        filled, trainer, writer = self._filled, self._config.trainer, self._writer
        self._follower.skip(self._here.metrics_reader().read())
        cores = self._config.cluster.cpu_ranks
        writer.environment(describe(filled.argv, trainer.python, trainer.versions_of, self._env, cores))
        started = "resumed" if writer.attempt > 1 else "started"
        writer.event(started, step=self._follower.last_step, command=shlex.join(filled.argv))
        self._log_start = self._here.log_size()  # what comes now is the command's
        with (
            stopping_signals() as requests,
            capped(
                self._here.log, int(self._config.limits.log_mib * 2**20), current_mask().hide_bytes
            ) as pass_on,
            self._command() as process,
        ):
            pass_on()
            status, ended_for = self._follow(process, requests)
            if status is None:
                end_group(process, GRACE_S, lambda: requests.insisted)
        self._copy_metrics(ended=True)
        if status is not None:
            return self._conclude(status)
        step = self._follower.last_step
        if ended_for:
            exit_code = TIMED_OUT if ended_for.code in LIMITS else FAILED
            writer.fail(ended_for, exit_code=exit_code, step=step)
            return exit_code
        writer.interrupt(exit_code=INTERRUPTED, step=step, signal=requests.first)
        return INTERRUPTED

    def _follow(self, process: Popen, requests: StopRequests) -> tuple[int | None, Reason | None]:
        """Copy metrics while the command runs; its exit status, or else why it is ended."""
        while (status := wait(process, POLL_S, lambda: requests.first)) is None and requests.first is None:
            reap_adopted({process.pid})
            self._copy_metrics()
            problem = self._overdue() or self._follower.mistaken_alias
            if problem:
                return None, problem
        return status, None

    def _overdue(self) -> Reason | None:
        """Which limit the command has passed."""
        limits, now = self._config.limits, time.monotonic()
        if limits.run_s and now - self._began_s > limits.run_s:
            return Code.TIME_LIMIT_REACHED(limit_s=limits.run_s)
        silent_s = now - max(self._stepped_s, self._awake.since_s())
        if silent_s > max(self._config.stalled_s, PATIENCE * self._longest_step_s):
            step = self._follower.last_step
            return Code.STALL_LIMIT_REACHED(silence=Code.NO_NEW_STEP(step=step, silent_s=round(silent_s)))
        return None

    @contextlib.contextmanager
    def _command(self) -> Iterator[Popen]:
        """The trainer in a process group of its own; at the end nothing is left of it."""
        adopt_orphans()
        try:
            process = start(self._filled.argv, self._env, dies_by=signal.SIGKILL, process_group=0)
        except OSError as error:
            command = self._filled.argv[0]
            raise LaunchError(Code.COMMAND_NOT_STARTED(command=command, error=str(error.strerror))) from None
        try:
            yield process
        finally:
            end_all(lambda: below(os.getpid()) | processes_of(self._here.path))
            process.wait()

    def _copy_metrics(self, *, ended: bool = False) -> None:
        self._writer.check_fence()
        if self._writer.has_lost_rows:
            self._writer.rewrite_metrics(self._follower.rows)
        for step, row in self._follower.new_rows(ended=ended):
            self._writer.metrics(step, row)
        step = self._follower.last_step
        if step > self._step:  # a sign of life; a log that grows is none
            now = time.monotonic()
            if self._step:
                took_s = now - max(self._stepped_s, self._awake.since_s())
                self._longest_step_s = max(self._longest_step_s, took_s)
                self._steps_s = [*self._steps_s[1 - LAST_STEPS :], took_s]
            self._step, self._stepped_s = step, now
            # What a command validates or saves, it does not say: its longest step may have had some of that
            patience_s = max(patience(self._steps_s), 2 * self._longest_step_s)
            self._writer.heartbeat(step, min(patience_s, self._config.stalled_s))

    def _conclude(self, status: int) -> int:
        step = self._follower.last_step
        problem = self._problem(status)
        if problem:
            exit_code = shell_code(status) or FAILED
            self._writer.fail(problem, exit_code=exit_code, step=step)
            return exit_code
        notes = [f"no metric {name!r}, which aliases name" for name in self._follower.never_logged]
        if step < self._config.steps:
            notes.append(f"the metrics end at step {step} of {self._config.steps}")
        texts = {metric: asdict(values) for metric, values in self._follower.text_values.items()}
        content = {"text_values": texts} if texts else None
        self._writer.finish(step, content, **({"message": "; ".join(notes)} if notes else {}))
        return 0

    def _problem(self, status: int) -> Reason | None:
        """Why a command that has ended did not make a run."""
        if status:
            printed = self._here.read_log(self._log_start)
            ending = ending_of(status, printed, self._oom_kills)
            return Code.SEE_LOG(ending=ending, log=self._here.log)
        if not self._follower.found:
            metrics = self._config.trainer.metrics
            return Code.NO_METRICS(
                format=metrics.format,
                path=self._filled.metrics_path,
                problem=self._follower.problem,
                notes=self._follower.notes,
                log=self._here.log,
            )
        problem = self._follower.problem
        return Code.METRICS_UNREADABLE(problem=problem) if problem else None
