"""One run of a foreign trainer, from its config.json to its result.json."""

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from abrun.errors import AbrunError, LaunchError
from abrun.external.environment import describe_environment
from abrun.external.follower import MetricsFollower
from abrun.processes import (
    RUN_DIR_VARIABLE,
    PauseDetector,
    Popen,
    StopRequests,
    adopt_orphans,
    catch_stop_signals,
    count_oom_kills,
    end_group,
    ending_reason,
    find_descendants,
    find_run_processes,
    kill_all,
    reap_orphans,
    shell_exit_code,
    start_process,
    wait_for_exit,
)
from abrun.processes.capture import capture_output
from abrun.processes.progress import MAX_STEPS, hang_timeout_s
from abrun.reasons import Code, Reason
from abrun.recipe.command import CommandRunConfig, build_invocation, referenced_values
from abrun.recipe.experiment import parse_stored_run
from abrun.redaction import current_mask, hide_secrets_of, hide_values
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from abrun.runs.writer import FencedError, RunWriter

POLL_S = 1.0
# Launchers wait 35 s before they kill.
GRACE_S = 30.0
# A command counts as hanging after this multiple of its longest step so far.
STALL_FACTOR = 10
LIMITS = (Code.TIME_LIMIT_REACHED, Code.STALL_LIMIT_REACHED)
# Exit codes, the same as those of abrun.train and its agent.
FAILED, INTERRUPTED, TIMED_OUT = 1, 3, 124


def run(directory: Path) -> int:
    """Train to the end or until SIGTERM, record the outcome in the run directory, and return an exit code.

    Raises an AbrunError if the run directory cannot be written or is not a foreign trainer's.
    """
    run_dir = RunDir(directory)
    record = run_dir.record()
    config = parse_stored_run(record.config, str(directory))
    if not isinstance(config, CommandRunConfig):
        raise LaunchError(
            f"{directory}: trainer.type: got 'abrun'; run it with: python -m abrun.train {directory}"
        )
    hide_secrets_of(os.environ)
    hide_values(referenced_values(config, os.environ))
    writer = run_dir.begin_attempt()
    try:
        return _Run(run_dir, config, record, writer).run()
    except FencedError:
        raise
    except AbrunError as error:
        writer.fail(error.reason, exit_code=FAILED)
        return FAILED


class _Run:
    """State that the phases of one run share."""

    def __init__(
        self, run_dir: RunDir, config: CommandRunConfig, record: RunRecord, writer: RunWriter
    ) -> None:
        name, run_path = record.name, os.path.abspath(run_dir.path)
        self._call = build_invocation(
            config,
            experiment=record.experiment,
            arm=name.arm,
            seed=name.seed,
            rerun=name.rerun,
            run_dir=run_path,
            environment=os.environ,
        )
        self._run_dir = run_dir
        self._config = config
        self._writer = writer
        self._log_start = 0
        self._oom_kills = count_oom_kills()
        self._follower = MetricsFollower(
            config.trainer.metrics, Path(self._call.metrics_path), config.trainer.aliases, run_dir
        )
        self._env = {
            **os.environ,
            **self._call.env,
            "ABRUN_SEED": str(name.seed),
            "ABRUN_ARM": name.arm,
            RUN_DIR_VARIABLE: os.path.realpath(run_path),
            "ABRUN_ATTEMPT": str(writer.attempt),
        }
        self._started_s = self._last_step_s = time.monotonic()
        self._step, self._longest_step_s = 0, 0.0
        self._steps_s: list[float] = []
        self._pauses = PauseDetector()

    def run(self) -> int:
        call, trainer, writer = self._call, self._config.trainer, self._writer
        self._follower.mark_written(self._run_dir.metrics_reader().read())
        cores = self._config.cluster.cpu_ranks
        packages = trainer.versions_of
        writer.environment(describe_environment(call.argv, trainer.python, packages, self._env, cores))
        started = "resumed" if writer.attempt > 1 else "started"
        writer.event(started, step=self._follower.last_step, command=shlex.join(call.argv))
        # From here on, the log is the command's output.
        self._log_start = self._run_dir.log_size()
        log, log_bytes = self._run_dir.log, int(self._config.limits.log_mib * 2**20)
        with (
            catch_stop_signals() as requests,
            capture_output(log, log_bytes, current_mask().hide_bytes),
            self._run_command() as process,
        ):
            self._report_progress()
            status, stop_reason = self._follow(process, requests)
            if status is None:
                end_group(process, GRACE_S, lambda: requests.is_forced)
        self._copy_metrics(has_ended=True)
        if status is not None:
            return self._record_end(status)
        step = self._follower.last_step
        if stop_reason:
            exit_code = TIMED_OUT if stop_reason.code in LIMITS else FAILED
            writer.fail(stop_reason, exit_code=exit_code, step=step)
            return exit_code
        writer.interrupt(exit_code=INTERRUPTED, step=step, signal=requests.first_signal)
        return INTERRUPTED

    def _follow(self, process: Popen, requests: StopRequests) -> tuple[int | None, Reason | None]:
        """Copy metrics while the command runs. Return its exit status, or else the reason to end it."""
        while (
            status := wait_for_exit(process, POLL_S, lambda: requests.first_signal)
        ) is None and requests.first_signal is None:
            reap_orphans({process.pid})
            self._copy_metrics()
            problem = self._find_exceeded_limit() or self._follower.mistaken_alias
            if problem:
                return None, problem
        return status, None

    @property
    def _stall_limit_s(self) -> float:
        return max(self._config.stalled_s, STALL_FACTOR * self._longest_step_s)

    def _find_exceeded_limit(self) -> Reason | None:
        """Return the limit that the command has exceeded, or None."""
        limits, now = self._config.limits, time.monotonic()
        if limits.run_s and now - self._started_s > limits.run_s:
            return Code.TIME_LIMIT_REACHED(limit_s=limits.run_s)
        silent_s = now - max(self._last_step_s, self._pauses.running_since_s())
        if silent_s > self._stall_limit_s:
            step = self._follower.last_step
            return Code.STALL_LIMIT_REACHED(silence=Code.NO_NEW_STEP(step=step, silent_s=round(silent_s)))
        return None

    @contextlib.contextmanager
    def _run_command(self) -> Iterator[Popen]:
        """Run the trainer in its own process group; kill everything that is left of it at the end."""
        adopt_orphans()
        try:
            process = start_process(self._call.argv, self._env, death_signal=signal.SIGKILL, process_group=0)
        except OSError as error:
            command = self._call.argv[0]
            raise LaunchError(Code.COMMAND_NOT_STARTED(command=command, error=str(error.strerror))) from None
        try:
            yield process
        finally:
            kill_all(lambda: find_descendants(os.getpid()) | find_run_processes(self._run_dir.path))
            process.wait()

    def _copy_metrics(self, *, has_ended: bool = False) -> None:
        self._writer.check_fence()
        if self._writer.has_lost_rows:
            self._writer.rewrite_metrics(self._follower.rows)
        for step, row in self._follower.new_rows(has_ended=has_ended):
            self._writer.metrics(step, row)
        step = self._follower.last_step
        # Only a new step counts as progress, not a growing log.
        if step > self._step:
            now = time.monotonic()
            if self._step:
                step_time_s = now - max(self._last_step_s, self._pauses.running_since_s())
                self._longest_step_s = max(self._longest_step_s, step_time_s)
                self._steps_s = [*self._steps_s[1 - MAX_STEPS :], step_time_s]
            self._step, self._last_step_s = step, now
            self._report_progress()

    def _report_progress(self) -> None:
        # A command does not report validation or saving, so its longest step may include either.
        patience_s = max(hang_timeout_s(self._steps_s), 2 * self._longest_step_s)
        limit_s = self._stall_limit_s
        self._writer.heartbeat(self._follower.last_step, patience_s=min(patience_s, limit_s), limit_s=limit_s)

    def _record_end(self, status: int) -> int:
        step = self._follower.last_step
        problem = self._find_problem(status)
        if problem:
            exit_code = shell_exit_code(status) or FAILED
            self._writer.fail(problem, exit_code=exit_code, step=step)
            return exit_code
        notes = [f"aliases: the log has no metric {name!r}" for name in self._follower.never_logged]
        if step < self._config.steps:
            notes.append(f"the metrics end at step {step} of {self._config.steps}")
        texts = {metric: asdict(values) for metric, values in self._follower.text_values.items()}
        content = {"text_values": texts} if texts else None
        self._writer.finish(step, content, **({"message": "; ".join(notes)} if notes else {}))
        return 0

    def _find_problem(self, status: int) -> Reason | None:
        """Return why a command that has ended did not produce a complete run, or None."""
        if status:
            printed = self._run_dir.read_log(self._log_start)
            ending = ending_reason(status, printed, self._oom_kills)
            return Code.SEE_LOG(ending=ending, log=self._run_dir.log)
        if not self._follower.has_metrics:
            metrics = self._config.trainer.metrics
            return Code.NO_METRICS(
                format=metrics.format,
                path=self._call.metrics_path,
                problem=self._follower.problem,
                notes=self._follower.notes,
                log=self._run_dir.log,
            )
        problem = self._follower.problem
        return Code.METRICS_UNREADABLE(problem=problem) if problem else None
