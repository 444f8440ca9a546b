"""One run of a foreign trainer, from its config.json to its result.json."""

import contextlib
import difflib
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from abrun import processes
from abrun.errors import AbrunError, LaunchError, StoreError
from abrun.experiment.command import node_variables
from abrun.experiment.preflight.machine import cpu_name
from abrun.logs import read_log
from abrun.logs.aliases import FRAMEWORKS, rename_metrics
from abrun.messages.codes import Code, Reason, in_words
from abrun.processes.capture import capture_output
from abrun.processes.progress import MAX_STEPS, hang_timeout_s
from abrun.recipe.command import SCRIPT_SUFFIXES as SUFFIXES
from abrun.recipe.command import (
    CommandRunConfig,
    Invocation,
    MetricsLog,
    build_invocation,
    referenced_values,
)
from abrun.recipe.experiment import parse_stored_run
from abrun.runs.files import fingerprint, is_file
from abrun.runs.launches import write_ending
from abrun.runs.lines import NON_METRIC_KEYS
from abrun.runs.records import RunRecord, TextValues
from abrun.runs.redaction import current_mask, hide_secrets_of, hide_values
from abrun.runs.rundir import RunDir
from abrun.runs.writer import FencedError, LostRowsError, RunWriter, begin_attempt

RAY_NODE = Path(__file__).with_name("ray_node.py")
POLL_S = processes.poll_interval(1.0)
# Launchers wait 35 s before they kill.
GRACE_S = 30.0
# A command counts as hanging after this multiple of its longest step so far.
STALL_FACTOR = 10
# Between questions to Slurm about the job of `sbatch --wait`, which prints this line.
ASK_SLURM_S = processes.poll_interval(10.0)
SUBMITTED = r"^Submitted batch job (\d+)"
LIMITS = (Code.TIME_LIMIT_REACHED, Code.START_LIMIT_REACHED, Code.STALL_LIMIT_REACHED)
# Exit codes, the same as those of abrun.trainer and its agent.
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
            f"{directory}: trainer.type: got 'abrun'; run it with: python -m abrun.trainer {directory}"
        )
    hide_secrets_of(os.environ)
    hide_values(referenced_values(config, os.environ))
    if node := int(os.environ.get("ABRUN_NODE_RANK", "0")):
        return _run_on_other_node(run_dir, config, record, node)
    writer = begin_attempt(run_dir)
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
        self._call, self._env = _fill_command(run_dir, config, record, writer.attempt)
        self._run_dir, self._config, self._writer = run_dir, config, writer
        self._log_start, self._oom_kills = 0, processes.count_oom_kills()
        self._follower = MetricsFollower(
            config.trainer.metrics, Path(self._call.metrics_path), config.trainer.aliases, run_dir
        )
        self._started_s = self._last_step_s = time.monotonic()
        self._step, self._longest_step_s = 0, 0.0
        self._steps_s: list[float] = []
        self._ask_slurm_s, self._was_queued = 0.0, False
        self._pauses = processes.PauseDetector()

    def run(self) -> int:
        call, trainer, writer = self._call, self._config.trainer, self._writer
        self._follower.mark_written(self._run_dir.metrics_reader().read())
        cores = self._config.cluster.cpu_ranks
        packages = trainer.versions_of
        environment = describe_environment(call.argv, trainer.python, packages, self._env, cores)
        words = [word for word in call.argv if word.endswith(SUFFIXES) and os.access(word, os.R_OK)]
        hashes = {word: fingerprint(Path(word))["sha256"][:8] for word in words if is_file(word)}
        scripts = {word.removeprefix(f"{trainer.recipe_dir}/"): text for word, text in hashes.items()}
        writer.environment({**environment, "scripts": scripts})
        started = "resumed" if writer.attempt > 1 else "started"
        writer.event(started, step=self._follower.last_step, command=shlex.join(call.argv))
        # From here on, the log is the command's output.
        self._log_start = self._run_dir.log_size()
        log, log_bytes = self._run_dir.log, int(self._config.limits.log_mib * 2**20)
        with (
            processes.catch_stop_signals() as requests,
            capture_output(log, log_bytes, current_mask().hide_bytes),
            _running(self._config, call, self._env, self._run_dir) as process,
        ):
            self._report_progress()
            status, stop_reason = self._follow(process, requests)
            if status is None:
                processes.end_group(process, GRACE_S, lambda: requests.is_forced)
        self._copy_metrics(has_ended=True)
        if status is not None:
            return self._record_end(status)
        step = self._follower.last_step
        if stop_reason:
            exit_code = TIMED_OUT if stop_reason.code in LIMITS else FAILED
            return self._fail(stop_reason, exit_code)
        writer.interrupt(exit_code=INTERRUPTED, step=step, signal=requests.first_signal)
        return INTERRUPTED

    def _follow(
        self, process: processes.Popen, requests: processes.StopRequests
    ) -> tuple[int | None, Reason | None]:
        """Copy metrics while the command runs. Return its exit status, or else the reason to end it."""
        while (
            status := processes.wait_for_exit(process, POLL_S, lambda: requests.first_signal)
        ) is None and requests.first_signal is None:
            processes.reap_orphans({process.pid})
            self._copy_metrics()
            problem = self._find_exceeded_limit() or self._follower.mistaken_alias
            if problem:
                return None, problem
        return status, None

    @property
    def _stall_limit_s(self) -> float:
        if not self._step and (start_s := self._config.limits.start_s):
            return start_s
        return max(self._config.stalled_s, STALL_FACTOR * self._longest_step_s)

    def _wait_in_queue(self, now: float) -> None:
        """Count the command's time from now on while a Slurm job that it has submitted is queued."""
        if self._longest_step_s or now < self._ask_slurm_s:
            return
        self._ask_slurm_s = now + ASK_SLURM_S
        jobs = re.findall(SUBMITTED, self._run_dir.read_log(self._log_start), re.MULTILINE)
        query = ("squeue", "--noheader", f"--jobs={jobs[-1]}", "--format=%T") if jobs else ()
        if query and {*_ask(*query).split()} == {"PENDING"}:
            self._started_s = self._last_step_s = now
            text = f"Slurm job {jobs[-1]} is queued"
            step, patience_s = self._follower.last_step, self._stall_limit_s
            self._writer.heartbeat(step, patience_s=patience_s, activity=text)
            self._was_queued = True
        elif self._was_queued:
            self._was_queued = False
            self._report_progress()

    def _find_exceeded_limit(self) -> Reason | None:
        """Return the limit that the command has exceeded, or None."""
        limits, now = self._config.limits, time.monotonic()
        self._wait_in_queue(now)
        if limits.run_s and now - self._started_s > limits.run_s:
            return Code.TIME_LIMIT_REACHED(limit_s=limits.run_s)
        silent_s = now - max(self._last_step_s, self._pauses.running_since_s())
        if silent_s > self._stall_limit_s:
            step = self._follower.last_step
            if limits.start_s and not self._step:
                return Code.START_LIMIT_REACHED(limit_s=limits.start_s)
            return Code.STALL_LIMIT_REACHED(silence=Code.NO_NEW_STEP(step=step, silent_s=round(silent_s)))
        return None

    def _copy_metrics(self, *, has_ended: bool = False) -> None:
        self._writer.check_fence()
        with contextlib.suppress(LostRowsError):
            for step, row in self._follower.new_rows(has_ended=has_ended):
                self._writer.metrics(step, row)
        if self._writer.has_lost_rows:
            self._writer.rewrite_metrics(self._follower.rows)  # the new ones are among them
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

    def _fail(self, reason: Reason, exit_code: int) -> int:
        if self._config.started_nodes > 1:  # so that other nodes, which end with it, do not seem the cause
            cause = reason["ending"] if reason.code == Code.SEE_LOG else reason
            _write_node_ending(self._run_dir, 0, self._writer.attempt - 1, cause)
        self._writer.fail(reason, exit_code=exit_code, step=self._follower.last_step)
        return exit_code

    def _record_end(self, status: int) -> int:
        step = self._follower.last_step
        problem = self._find_problem(status)
        if problem:
            return self._fail(problem, processes.shell_exit_code(status) or FAILED)
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
            ending = processes.ending_reason(status, printed, self._oom_kills)
            return Code.SEE_LOG(ending=ending, log=self._run_dir.log)
        if not self._follower.rows:
            metrics = self._config.trainer.metrics
            why = self._follower.problem or "; ".join(self._follower.notes) or "it holds no numbers"
            remedy = f"correct format or path, or read {self._run_dir.log}"
            place = f"{metrics.format} at {self._call.metrics_path}"
            return in_words(f"no metrics: trainer.metrics: {place}: {why}; {remedy}")
        problem = self._follower.problem
        return in_words(f"metrics: {problem}") if problem else None


def _ask(*argv: str, env: Mapping[str, str] = os.environ, timeout_s: float = 60.0) -> str:
    """Return what a program prints; nothing if it is missing, fails or does not answer in time."""
    try:
        process = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: it prints no text
        return ""
    return process.stdout


def _fill_command(
    run_dir: RunDir, config: CommandRunConfig, record: RunRecord, attempt: int
) -> tuple[Invocation, dict[str, str]]:
    """Return a run's command on this node and its environment variables."""
    name, run_path = record.name, os.path.abspath(run_dir.path)
    environment = {**node_variables(config), **os.environ}  # the launcher's count; there are none by hand
    call = build_invocation(
        config,
        experiment=record.experiment,
        arm=name.arm,
        seed=name.seed,
        rerun=name.rerun,
        run_dir=run_path,
        environment=environment,
    )
    return call, {
        **environment,
        **call.env,
        "ABRUN_SEED": str(name.seed),
        "ABRUN_ARM": name.arm,
        processes.RUN_DIR_VARIABLE: os.path.realpath(run_path),
        "ABRUN_ATTEMPT": str(attempt),
    }


@contextlib.contextmanager
def _running(
    config: CommandRunConfig, call: Invocation, env: Mapping[str, str], run_dir: RunDir
) -> Iterator[processes.Popen]:
    """Run this node's process in its own process group; kill everything that is left of it at the end.

    It is the command, or with `trainer.ray` what starts Ray here, and on the first node then the command.
    """
    processes.adopt_orphans()
    with contextlib.ExitStack() as stack:
        argv = call.argv
        if config.trainer.ray:
            # Where Ray's defaults are, a cluster of this machine's may have its own
            folder = tempfile.TemporaryDirectory(prefix="abrun-ray-", ignore_cleanup_errors=True)
            head = f"{env['ABRUN_HEAD_ADDRESS']}:{env['ABRUN_PORT']}"
            argv = [call.python, str(RAY_NODE), head, stack.enter_context(folder), *argv]
        try:
            process = processes.start_process(argv, env, death_signal=signal.SIGKILL, process_group=0)
        except OSError as error:
            field = "python" if config.trainer.ray else "argv"
            raise LaunchError(
                f"trainer.{field}: got {argv[0]!r}, which cannot be started: {error.strerror}; give the path "
                "of an executable file"
            ) from None
        try:
            yield process
        finally:
            processes.kill_run(run_dir.path, os.getpid())
            process.wait()


def _run_on_other_node(run_dir: RunDir, config: CommandRunConfig, record: RunRecord, node: int) -> int:
    """Run the command on a node that is not the first, until it ends or the first node has recorded the end.

    Only a failure is recorded here. Returns 0 after a stop, so that Slurm lets the first node save.
    """
    before = max((launch.attempts for launch in run_dir.launches()), default=0)
    call, env = _fill_command(run_dir, config, record, before + 1)
    log, log_start, oom_kills = run_dir.node_log(node), run_dir.log_size(node), processes.count_oom_kills()
    end_s, has_ray = math.inf, config.trainer.ray
    with (
        processes.catch_stop_signals() as requests,
        capture_output(log, int(config.limits.log_mib * 2**20), current_mask().hide_bytes),
        _running(config, call, env, run_dir) as process,
    ):
        while (
            status := processes.wait_for_exit(process, POLL_S, lambda: requests.first_signal and not has_ray)
        ) is None and time.monotonic() < end_s:
            processes.reap_orphans({process.pid})
            first, now = run_dir.attempt(), time.monotonic()
            if first.number > before and first.status != "running":  # the end of Ray's head is no failure
                if has_ray:
                    break
                end_s = min(end_s, now + GRACE_S)
            elif requests.first_signal:  # Ray's nodes stay until its driver has saved
                end_s = min(end_s, now + GRACE_S if has_ray else now)
        if status is None and not has_ray:  # a node of Ray would wait for its tasks
            processes.end_group(process, GRACE_S, lambda: requests.is_forced)
    if not status:
        return 0
    printed = run_dir.read_log(log_start, node=node)
    cause = Code.SEE_LOG(ending=processes.ending_reason(status, printed, oom_kills), log=log)
    _write_node_ending(run_dir, node, before, cause)
    return processes.shell_exit_code(status)


def _write_node_ending(run_dir: RunDir, node: int, previous_attempt: int, cause: Reason) -> None:
    reason = Code.NODE_FAILED(node=node, host=socket.gethostname(), cause=cause)
    write_ending(run_dir, f"node-{node:04d}", previous_attempt, reason)


VERSION_SCRIPT = """
import sys
sys.path.sort(key=lambda folder: folder == "")  # a module of the working directory shadows none
import importlib.metadata, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = sys.argv[1:]
print(json.dumps({"python": platform.python_version(), "versions": {name: version(name) for name in names}}))
"""


def describe_environment(
    argv: Sequence[str], python: str | None, packages: Sequence[str], env: Mapping[str, str], num_cores: int
) -> dict[str, Any]:
    """Return the content of environment.json. Unknown values are None, never guessed.

    `python`: the command's interpreter, if it is not the first word of `argv`.
    """
    interpreter = argv[0] if re.fullmatch(r"python[\d.]*", Path(argv[0]).name) else None
    answer = query_interpreter(python or interpreter, packages, env)
    return {
        "python": answer.get("python"),
        "versions": {name: answer.get("versions", {}).get(name) for name in packages},
        "devices": _list_gpus(env) or [cpu_name()] * num_cores,
        "hosts": env["ABRUN_NODE_LIST"].split(","),
        "dtype": None,
        "prompts_sha256": None,
    }


def query_interpreter(python: str | None, packages: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the command's own interpreter reports about itself, or {} if there is none to ask."""
    program = python and shutil.which(python, path=env.get("PATH"))
    printed = _ask(program, "-c", VERSION_SCRIPT, *packages, env=env, timeout_s=120.0) if program else ""
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(printed.splitlines()[-1])
        return answer if isinstance(answer, dict) else {}
    return {}


def _list_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that the command may use."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    chosen = ("-i", visible) if visible else ()
    query = ("nvidia-smi", *chosen, "--query-gpu=name", "--format=csv,noheader")
    printed = "" if visible == "" else _ask(*query)
    return [line.strip() for line in printed.splitlines() if line.strip()]


Row = dict[str, float]

# By this many logged steps, a trainer has logged every training metric at least once.
ALIAS_CHECK_STEPS = 20
VALIDATION_NAMES = r"val|eval|test|held"
MAX_NAMED = 12
# Share of time spent on reading: a log that takes long to read is read less often.
MAX_READING_SHARE = 0.05


class MetricsFollower:
    """Rereads a growing log whenever its files have changed, and returns new or changed steps.

    Steps that the run directory already has, from this attempt or an earlier one, are not returned again: a
    trainer that resumes from a checkpoint appends to its log, one that starts over may repeat it.
    """

    def __init__(self, log: MetricsLog, path: Path, aliases: str | Mapping[str, str], run: RunDir) -> None:
        self._log, self._path, self._run = log, path, run
        self._declared_aliases: Mapping[str, str] = {} if isinstance(aliases, str) else aliases
        self._aliases = FRAMEWORKS[aliases] if isinstance(aliases, str) else aliases
        self._written: dict[int, Row] = {}
        self._last_fingerprint: object = None
        self._next_read_s = 0.0
        self._max_step = 0  # highest step seen in the log so far
        self.problem: Reason | None = None  # why the last read failed
        self.notes: tuple[str, ...] = ()  # choices made while reading
        self.never_logged: list[str] = []  # metrics of declared aliases that the log lacks
        self.text_values: dict[str, TextValues] = {}  # by metric
        self._logged: list[str] = []

    def mark_written(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mark rows of the run directory as written, so that they are not returned again."""
        for row in rows:
            values = {key: value for key, value in row.items() if key not in NON_METRIC_KEYS}
            self._written.setdefault(row["step"], {}).update(values)

    @property
    def rows(self) -> Mapping[int, Row]:
        """Rows of the run directory by step, written by this attempt or earlier ones."""
        return self._written

    @property
    def last_step(self) -> int:
        return max(self._written, default=0)

    @property
    def mistaken_alias(self) -> Reason | None:
        """Return the first alias whose metric should have been logged by now, or None.

        Metrics of validation may come later and are not checked.
        """
        if len(self._written) < ALIAS_CHECK_STEPS:
            return None
        for ours, theirs in self._declared_aliases.items():
            is_rare = re.search(VALIDATION_NAMES, f"{ours} {theirs}", re.IGNORECASE)
            if theirs in self.never_logged and not is_rare:
                close = difflib.get_close_matches(theirs, self._logged, 1)
                return Code.ALIAS_NOT_LOGGED(
                    name=ours,
                    metric=theirs,
                    num_steps=ALIAS_CHECK_STEPS,
                    logged=self._logged[:MAX_NAMED],
                    num_more=max(0, len(self._logged) - MAX_NAMED),
                    close=close[0] if close else None,
                )
        return None

    def new_rows(self, *, has_ended: bool = False) -> list[tuple[int, Row]]:
        """Return complete steps that are new or have new values, in order.

        A step is complete once a later one exists or the command has ended.
        """
        now = time.monotonic()
        if now < self._next_read_s and not has_ended:
            return []
        fingerprint = _fingerprint_files(self._path)
        if fingerprint == self._last_fingerprint and not has_ended:
            return []
        self._last_fingerprint = fingerprint
        try:
            # The recipe's path does not name a run file, but a link may lead to one.
            if self._run.is_run_file(self._path):
                target = os.path.realpath(self._path)
                raise StoreError(
                    f"{self._path}: points to {target}, which is reserved for abrun; write to a file of your "
                    "own"
                )
            rows = self._read()
        except AbrunError as error:  # perhaps a half-written file that the next read finds complete
            self.problem = error.reason
            return []
        last_step = max(rows, default=0)
        self._max_step = max(last_step, self._max_step)
        self.problem = None
        if last_step < self._max_step:
            self.problem = in_words(
                f"{self._path}: lost its rows up to step {self._max_step} while the command ran; train again "
                "with --resume, and remove the trainer's checkpoints if it would continue from them"
            )
        read_time_s = time.monotonic() - now
        self._next_read_s = now + max(POLL_S, read_time_s / MAX_READING_SHARE)
        changed_rows = [
            (step, rows[step])
            for step in sorted(rows)
            if (step < last_step or has_ended) and not _is_written(rows[step], self._written.get(step, {}))
        ]
        for step, row in changed_rows:
            self._written[step] = row
        return changed_rows

    def _read(self) -> dict[int, Row]:
        log = read_log(self._path, self._log.format, step_column=self._log.step_column)
        self.notes = tuple(log.notes)
        columns = {column: column for column in log.dropped if column not in self._aliases.values()}
        columns |= {ours: theirs for ours, theirs in self._aliases.items() if theirs in log.dropped}
        self.text_values = {
            name: TextValues(at=log.unread[theirs], steps=log.dropped[theirs])
            for name, theirs in columns.items()
            if theirs in log.unread and name not in NON_METRIC_KEYS
        }
        self._logged = sorted(log.metrics)
        self.never_logged = sorted(set(self._declared_aliases.values()) - set(log.metrics))
        rows: dict[int, Row] = {}
        for name, series in rename_metrics(log.metrics, self._aliases).items():
            if name in NON_METRIC_KEYS:
                continue
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                rows.setdefault(step, {})[name] = value
        return rows


def _is_written(row: Row, written: Row) -> bool:
    """Return True if all values of a row are already written. NaN equals NaN."""
    return all(
        name in written and (value == written[name] or (math.isnan(value) and math.isnan(written[name])))
        for name, value in row.items()
    )


def _fingerprint_files(path: Path) -> object:
    """Return a value that changes whenever a file of the log changes."""
    files_below = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    states = []
    for file in [path] if is_file(path) else sorted(files_below):
        with contextlib.suppress(OSError):  # just removed
            state = file.stat()
            states.append((file, state.st_size, state.st_mtime_ns))
    return states
