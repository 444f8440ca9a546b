"""Slurm: submits a plan, checked by Slurm itself, completely or not at all; tracks and cancels its jobs.

Errors of Slurm's commands are raised as LaunchError, with Slurm's message in one line.
"""

import contextlib
import getpass
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan, PlannedRun, group_pairs
from abrun.experiment.preflight.checks import anywhere_refusals, separate_job_refusals
from abrun.launch.cluster import ACTIVE_STATUSES, ClusterJobs, LeftInQueueError
from abrun.launch.queue import LaunchQueue
from abrun.messages.codes import in_words
from abrun.messages.endings import OUT_OF_MEMORY
from abrun.messages.numbers import listed
from abrun.processes import MODULE_OPTIONS
from abrun.recipe.launcher import Slurm, parse_time_limit
from abrun.recipe.run import RunConfig
from abrun.runs.files import read_json_or_empty, write_file
from abrun.runs.layout import REPORT
from abrun.runs.records import Git
from abrun.runs.rundir import RunDir
from abrun.runs.schemas import Flag, Items, Texts, checked
from abrun.runs.state import RunState

TIMEOUT_S = 60.0
NOT_CONFIGURED = r"fatal: (Could not establish a configuration source|Unable to process configuration file)"
RUNNING_STATES = ("RUNNING", "COMPLETING", "STOPPED", "SUSPENDED")
ENDED_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE"),
    *("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """Slurm's state of a job, or of one task of a job array."""

    job: str
    index: int | None
    state: str  # PENDING, RUNNING, ...
    reason: str
    nodes: str
    submitted: str = ""  # when it was queued last, by this host's clock: 2026-01-31T23:59:59
    script: str = ""  # path of the submitted script

    @property
    def is_over(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def phase(self) -> str:
        """QUEUED, RUNNING, or the state in which the task ended."""
        if self.is_over:
            return self.state
        return "RUNNING" if self.state in RUNNING_STATES else "QUEUED"

    @property
    def name(self) -> str:
        return self.job if self.index is None else f"{self.job}_{self.index}"

    @property
    def queued_for(self) -> str:
        """Return how long it has been queued, such as ` for 12 min`; empty if that is unknown."""
        with contextlib.suppress(ValueError):
            minutes = int(time.time() - datetime.fromisoformat(self.submitted).timestamp()) // 60
            return f" for {minutes} min" if minutes > 0 else ""
        return ""


def find_refusal(options: Sequence[str]) -> str | None:
    """Return Slurm's message if no job with these options could ever run, or None."""
    process = _run("sbatch", "--test-only", *options, "--wrap=true")
    return None if process.returncode == 0 else _error_text(process.stderr)


def list_tasks(user: str) -> list[SlurmTask]:
    """Return all tasks of a user that Slurm still knows. It forgets ended ones after minutes."""
    # A query by id would fail for all tasks if one is forgotten.
    output = run_slurm("squeue", f"--user={user}", "-h", "-r", "-t", "all", "-o", "%F|%K|%T|%r|%N|%V|%o")
    tasks = []
    for line in output.splitlines():
        job, index, *texts = line.split("|", 6)
        fields = dict(zip(("state", "reason", "nodes", "submitted", "script"), texts, strict=True))
        tasks.append(SlurmTask(job=job, index=int(index) if index.isdigit() else None, **fields))
    return tasks


def release_job(job: str, in_s: int = 0) -> None:
    """Start a requeued job after `in_s` seconds, without Slurm's two-minute delay."""
    run_slurm("scontrol", "update", f"JobId={job}", f"StartTime=now{f'+{in_s}' if in_s else ''}")


class SlurmError(LaunchError):
    """Error of one of Slurm's commands. `answer`: what it printed."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(f"slurm: {command}: {answer}")
        self.answer = answer


def cancel_jobs(*argv: str) -> None:
    """Call scancel with options and job ids. Raises SlurmError if it prints one."""
    process = _run("scancel", "--quiet", *argv)
    if process.stderr:  # it fails silently for jobs that have ended or are in another state
        raise SlurmError("scancel", _error_text(process.stderr))


def run_slurm(*argv: str) -> str:
    process = _run(*argv)
    if process.returncode:
        raise SlurmError(argv[0], _error_text(process.stderr))
    return process.stdout


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        process = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        elsewhere = "launch on a login node, or use --launcher local"
        raise LaunchError(f"slurm: no command {argv[0]!r} on PATH; {elsewhere}") from None
    except subprocess.TimeoutExpired:
        silence = f"no answer for {TIMEOUT_S:.0f} s"
        raise LaunchError(f"slurm: {argv[0]}: {silence}; is the controller up?") from None
    except OSError as error:
        raise SlurmError(argv[0], str(error)) from None
    if process.returncode and re.search(NOT_CONFIGURED, process.stderr):
        answer = _error_text(process.stderr)[-200:]
        raise LaunchError(
            f"slurm: this host has Slurm's commands, but no cluster configuration (slurm.conf; {argv[0]}: "
            f"{answer}); launch on a login node, set SLURM_CONF, or use --launcher local"
        )
    return process


def _error_text(stderr: str) -> str:
    """Return the lines of an error message, without the command's name at their start."""
    lines = [re.sub(r"^(\w+: )?(error: |fatal: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "refused without a word"


FOLDER = "_slurm"  # folder in an experiment; no arm can have this name
RECORD = "jobs.json"
WARM_START_TASK = "warm-start"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """Resources for the runs of one allocation: the same nodes, with a share of every node for each run."""

    nodes: int
    runs: int
    cpus: int  # per run and node, for the largest run
    gpus: int  # per node, for all runs
    runs_per_gpu: int = 1

    def options(self) -> list[str]:
        gpus = [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        tasks = [f"--ntasks-per-node={self.runs}", f"--cpus-per-task={self.cpus}"]
        return [f"--nodes={self.nodes}", *tasks, *gpus]


def combine_requests(configs: Sequence[RunConfig], settings: Slurm) -> AllocationRequest | None:
    """Return the combined request of these runs, or None if their numbers of nodes differ.

    It is None, too, for commands that use several nodes by themselves, since they would use all GPUs there.
    """
    nodes = {config.cluster.nodes for config in configs}
    starts_steps = any(config.started_nodes < config.cluster.nodes for config in configs)
    if len(nodes) > 1 or (starts_steps and len(configs) > 1):
        return None
    cpus = max(config.devices_per_node for config in configs) * settings.cpus_per_rank
    gpus, runs_per_gpu = [gpus_per_node(config) for config in configs], configs[0].cluster.runs_per_gpu
    return AllocationRequest(
        nodes=nodes.pop(),
        runs=len(configs),
        cpus=cpus,
        gpus=max(*gpus, math.ceil(sum(gpus) / runs_per_gpu)) if runs_per_gpu > 1 else sum(gpus),
        runs_per_gpu=runs_per_gpu,
    )


def gpus_per_node(config: RunConfig) -> int:
    """Return the number of GPUs of a run on each of its nodes."""
    return config.devices_per_node if config.cluster.gpus_per_node else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """A script that is submitted as a job array; `tasks` are the names of each task's runs."""

    name: str
    need: AllocationRequest
    tasks: tuple[tuple[str, ...], ...]
    warm_start: bool = False


def group_into_tasks(runs: Sequence[PlannedRun], num_jobs: int | None = None) -> list[list[PlannedRun]]:
    """Group the arms of each seed, and further ones with them as long as all share the same GPUs.

    Reruns without a GPU to share are groups of their own. `num_jobs` limits the runs of a group.
    """
    tasks: list[list[PlannedRun]] = []
    for group in group_pairs(runs):
        runs_per_gpu = group[0].config.cluster.runs_per_gpu
        if tasks and len(tasks[-1]) + len(group) <= min(runs_per_gpu, num_jobs or runs_per_gpu):
            tasks[-1] += group
        else:
            tasks.append([*group])
    return tasks


def group_into_scripts(
    runs: Sequence[PlannedRun],
    settings: Slurm,
    fits: Mapping[AllocationRequest, bool],
    num_jobs: int | None = None,
) -> list[JobScript]:
    """Group runs into tasks of one allocation if `fits` allows it, or else one task per run."""
    tasks_by_request: dict[AllocationRequest, list[tuple[str, ...]]] = {}
    for group in group_into_tasks(runs, num_jobs):
        request = combine_requests([run.config for run in group], settings)
        fits_together = request is not None and fits.get(request, True)
        for task_runs in [group] if fits_together else [[run] for run in group]:
            request = combine_requests([run.config for run in task_runs], settings)
            assert request is not None
            tasks_by_request.setdefault(request, []).append(tuple(str(run.name) for run in task_runs))
    scripts = []
    for request, tasks in tasks_by_request.items():
        kind = "pairs" if request.runs > 1 else "runs"
        num_same_kind = sum(script.name.startswith(kind) for script in scripts)
        name = f"{kind}-{num_same_kind + 1}" if num_same_kind else kind
        scripts.append(JobScript(name=name, need=request, tasks=tuple(tasks)))
    return scripts


def render_script(
    script: JobScript, experiment_dir: Path, settings: Slurm, *, max_parallel: int | None = None
) -> str:
    options = [
        *script.need.options(),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{settings.save_s}",
        f"--output={_log_pattern(experiment_dir, script.name)}{'' if script.warm_start else '-%a'}.log",
    ]
    argv = [settings.python if settings.python and not settings.container else sys.executable]
    argv += [*MODULE_OPTIONS, "abrun.launch.slurm.allocation", str(experiment_dir)]
    if script.warm_start:
        lines = [f"exec {shlex.join([*argv, *script.tasks[0]])}"]
        return _render_lines(experiment_dir, script.name, options, settings, lines)
    if max_parallel and script.need.runs_per_gpu > 1:
        max_parallel = max(max_parallel // script.need.runs, 1)
    options.insert(0, f"--array=0-{len(script.tasks) - 1}{f'%{max_parallel}' if max_parallel else ''}")
    lines = ["# The runs of each task of the array: side by side, on the same nodes", "tasks=("]
    lines += [f"  {shlex.quote(' '.join(task))}  # {index}" for index, task in enumerate(script.tasks)]
    lines += [")", 'read -ra runs <<< "${tasks[$SLURM_ARRAY_TASK_ID]}"']
    lines += [f'exec {shlex.join(argv)} "${{runs[@]}}"']
    return _render_lines(experiment_dir, script.name, options, settings, lines)


def render_compare(experiment_dir: Path, settings: Slurm) -> str:
    """Return the text of the job that compares the arms once all others have ended."""
    options = ["--nodes=1", "--ntasks=1", "--open-mode=append"]
    options.append(f"--output={_log_pattern(experiment_dir, 'compare')}.log")
    report = str(experiment_dir / REPORT)
    argv = [sys.executable, *MODULE_OPTIONS, "abrun", "compare", str(experiment_dir), "--output", report]
    return _render_lines(experiment_dir, "compare", options, settings, [f"exec {shlex.join(argv)}"])


def cluster_options(settings: Slurm) -> list[str]:
    """Return the user's choice of account, partition and kinds of nodes as options of sbatch."""
    chosen = {name: getattr(settings, name) for name in ("account", "partition", "qos", "constraint", "time")}
    options = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    for name, value in settings.sbatch.items():
        if value is not False:
            options.append(f"--{name}" if value is True else f"--{name}={value}")
    return options


def _render_lines(
    experiment_dir: Path, name: str, options: Sequence[str], settings: Slurm, lines: Sequence[str]
) -> str:
    job_name = f"--job-name={experiment_dir.name}-{name}"
    header = [
        f"#SBATCH {_quote_option(option)}" for option in (job_name, *cluster_options(settings), *options)
    ]
    path = os.environ.get("PYTHONPATH")
    setup = [f"export PYTHONPATH={shlex.quote(path)}"] if path else []
    body = [f"cd {shlex.quote(os.getcwd())} || exit", *setup, *settings.setup, *lines]
    return "\n".join(["#!/bin/bash", *header, "", *body, ""])


def _log_pattern(experiment_dir: Path, name: str) -> str:
    """Return a log path without extension for --output, in which Slurm expands '%'."""
    return str(experiment_dir / FOLDER / name).replace("%", "%%")


def _quote_option(option: str) -> str:
    """Quote an option for an #SBATCH line, which takes double quotes."""
    name, equals, value = option.partition("=")
    return option if shlex.quote(value) in (value, "''") or not equals else f'{name}="{value}"'


# --- what was submitted ---


def script_path(experiment_dir: Path, name: str) -> str:
    """Return the path of a script, as given to Slurm and reported by it."""
    return os.path.realpath(experiment_dir / FOLDER / f"{name}.sh")


JobId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]  # cannot be mistaken for an option of scancel
Tasks = Items[Texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobsRecord:
    """Fields of the record."""

    jobs: Mapping[JobId, Tasks] = field(default_factory=dict)
    submitting: Mapping[str, Tasks] = field(default_factory=dict)
    compare: JobId | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    git: Git | None = None
    user: str = ""
    cancelled: Flag = False


def read_record(experiment_dir: Path) -> dict[str, Any]:
    """Return the record of submitted jobs, or {} if nothing was submitted. Raises StoreError if unreadable.

    `jobs`: for each job id, the runs of each task. `compare`: a job id. `submitting`: for each script that is
    being submitted, its tasks; removed once all have ids. Also `settings`, `git` and `user`.
    """
    path = experiment_dir / FOLDER / RECORD
    content = read_json_or_empty(path)
    checked(_JobsRecord, content, path)
    return content


# A job that starts right after its requeue is killed ("Job credential revoked").
RELEASE_AFTER_S = 10.0


class SlurmCluster(ClusterJobs):
    """The Slurm jobs of an experiment."""

    query_interval_s, cleared_fields = 5.0, {"jobs": {}, "compare": None}
    folder, record_name, read = FOLDER, RECORD, staticmethod(read_record)
    job_fields = ("jobs", "submitting")

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        super().__init__(experiment_dir, settings, num_jobs)
        self._fits: dict[AllocationRequest, bool] = {}
        self._jobs: dict[str, list[list[str]]] = {}
        self._compare: str | None = None
        self._held_since_s: dict[str, float] = {}  # time since which a task has been held back

    def load(self) -> None:
        super().load()
        self._jobs, self._compare = dict(self._record.get("jobs", {})), self._record.get("compare")

    # --- submission ---

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        """Return why no machine could run the plan or Slurm never would; notes if pairs fit an allocation."""
        reasons = [*anywhere_refusals(plan), *separate_job_refusals(plan)]
        time, save_s = self._settings.time, self._settings.save_s
        limit_s = parse_time_limit(time) if time else math.inf
        if save_s >= limit_s:  # every start would be asked to stop at once
            got = f"launcher.save_s: got {save_s}, but launcher.time {time!r} is only {limit_s:.0f} s"
            reasons.append(f"{got}; lower launcher.save_s, or ask for more time")
        return reasons or self._find_slurm_problems(plan)

    def render_scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """Return the text of every script that would be submitted, by name, in order.

        Call `find_problems` first.
        """
        folder, settings = self._experiment_dir, self._settings
        texts = {
            script.name: render_script(script, folder, settings, max_parallel=self._num_jobs)
            for script in self._scripts(plan)
        }
        return texts | ({"compare": render_compare(folder, settings)} if compare else {})

    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        """Submit every unfinished run, after its warm start, and the comparison; return the job ids.

        If Slurm refuses one of them, raises LaunchError and leaves no job in the queue.
        """
        experiment_dir, scripts = self._experiment_dir, self._scripts(plan)
        folder = experiment_dir / FOLDER
        for name, text in self.render_scripts(plan, compare=compare).items():
            write_file(folder / f"{name}.sh", text.encode(), mode=0o644)
        record: dict[str, Any] = {"settings": self._settings.model_dump(mode="json"), "git": git, "jobs": {}}
        record["user"] = getpass.getuser()
        # Written before the first job: if this process is killed, unrecorded jobs are found by their scripts.
        record["submitting"] = {script.name: [list(task) for task in script.tasks] for script in scripts}
        self.write(record)
        submitted: list[str] = []

        def add(name: str, after_jobs: list[str]) -> str:
            options = [f"--dependency=afterany:{':'.join(after_jobs)}"] if after_jobs else []
            printed = run_slurm("sbatch", "--parsable", *options, script_path(experiment_dir, name))
            submitted.append(printed.strip().partition(";")[0])
            return submitted[-1]

        try:
            warm_starts: list[str] = []
            for script in scripts:
                job = add(script.name, [] if script.warm_start else warm_starts)
                warm_starts += [job] if script.warm_start else []
                record["jobs"][job] = [list(task) for task in script.tasks]
                self.write(record)
            if compare:
                record["compare"] = add("compare", list(submitted))
            del record["submitting"]
            self.write(record)
        except BaseException as error:
            with contextlib.suppress(LaunchError):  # include a job that was just being submitted
                self.load()
                submitted += self.active_job_ids
            try:
                if jobs := list(dict.fromkeys(submitted)):
                    cancel_jobs(*jobs)
            except LaunchError as refused:  # the record still lists them
                raise LeftInQueueError(
                    f"{str(error) or type(error).__name__}; the jobs submitted before ({listed(jobs)}) are "
                    f"still in the queue ({refused}); cancel them: abrun stop {experiment_dir}"
                ) from error
            self.write({**record, "submitting": {}, **self.cleared_fields})
            raise
        return submitted

    def _scripts(self, plan: ExperimentPlan) -> list[JobScript]:
        queue = LaunchQueue(plan, self._experiment_dir)
        to_run = {job.label for job in queue.jobs if not (job.is_done or job.is_warm_start)}
        warm_starts = []
        for job in queue.jobs:
            if job.is_warm_start and not job.run.finished:
                need = combine_requests([job.config], self._settings)
                assert need is not None
                name, task = f"{WARM_START_TASK}-{len(warm_starts)}", f"{WARM_START_TASK}/{job.run.path.name}"
                warm_starts.append(JobScript(name=name, need=need, tasks=((task,),), warm_start=True))
        runs = [run for run in plan.runs if str(run.name) in to_run]
        return warm_starts + group_into_scripts(runs, self._settings, self._fits, self._num_jobs)

    def _find_slurm_problems(self, plan: ExperimentPlan) -> list[str]:
        container = self._settings.container
        if container:
            try:
                run_slurm("srun", f"--container-image={container.image}", "--help")
            except LaunchError as error:
                if not (isinstance(error, SlurmError) and "container-image" in error.answer):
                    return [str(error)]
                return [
                    f"launcher.container: got {container.image!r}, but Slurm has no pyxis plugin: {error}"
                ]
        options = cluster_options(self._settings)
        for group in group_into_tasks(plan.runs, self._num_jobs):
            configs = [run.config for run in group]
            together = combine_requests(configs, self._settings)
            if together is None or together in self._fits:
                continue
            self._fits[together] = find_refusal([*options, *together.options()]) is None
            for config in () if self._fits[together] else configs:
                alone = combine_requests([config], self._settings)
                assert alone is not None
                run_options = [*options, *alone.options()]
                refusal = None if self._fits.get(alone) else find_refusal(run_options)
                if refusal:
                    return [f"slurm: {refusal} (requested: {' '.join(run_options)})"]
                self._fits[alone] = True
        return []

    # --- state of the jobs ---

    @property
    def job_ids(self) -> list[str]:
        return [*self._jobs, *([self._compare] if self._compare else [])]

    def _adopt_unrecorded(self, tasks: Sequence[SlurmTask]) -> None:
        """Adopt jobs that a killed launcher has submitted but not recorded.

        While a launcher is still submitting, this may find a job before it is recorded; it is the same job.
        """
        recorded = [*self._jobs.values()]
        for name, names in self._record.get("submitting", {}).items():
            path = script_path(self._experiment_dir, name)
            job_ids = [task.job for task in tasks if task.script == path and not task.is_over]
            if job_ids and names not in recorded:
                self._jobs[job_ids[0]] = names
        path = script_path(self._experiment_dir, "compare")
        for task in tasks:
            if "submitting" in self._record and task.script == path and not task.is_over:
                self._compare = task.job

    @property
    def active_job_ids(self) -> list[str]:
        return sorted({task.job for task in self._query_cached().values() if not task.is_over}, key=int)

    def state_of(self, state: RunState) -> RunState:
        """Return a run's state, corrected if Slurm knows more than its directory."""
        if state.status == "finished":
            return state
        try:
            known_tasks = self._query_cached()  # which may also find jobs that were not recorded
        except LaunchError:  # no Slurm on this host, or its controller does not answer
            return state
        is_warm_start = state.name.arm == WARM_START_TASK
        name = f"{WARM_START_TASK}/{state.directory.name}" if is_warm_start else str(state.name)
        places = [
            (job, tasks.index(names)) for job, tasks in self._jobs.items() for names in tasks if name in names
        ]
        if not places:
            return state
        job, index = places[0]
        task = known_tasks.get((job, index)) or known_tasks.get((job, None))
        is_removed = not is_warm_start and not RunDir(state.directory).exists
        resume = "continue with --resume"
        ended = f"job {job} is no longer in Slurm's queue"
        if task:
            memory = OUT_OF_MEMORY if task.state == "OUT_OF_MEMORY" else ""
            ended = f"job {task.name} ended: {task.state}{memory}"

        match (task.phase if task else "FORGOTTEN", state.status):
            case ("QUEUED", _):
                status, reason = "waiting", f"job {task.name} is queued{task.queued_for}: {task.reason}"
            case ("RUNNING", "pending" | "interrupted") if is_removed:
                gone = f"{state.directory}: was removed while job {task.name} runs"
                status, reason = "failed", f"{gone}; create it again with --resume"
            case ("RUNNING", "pending" | "interrupted"):
                status, reason = "waiting", f"job {task.name} is starting or ending on {task.nodes}"
            case (phase, status) if phase == "RUNNING" or status not in ACTIVE_STATUSES:
                return state
            case ("FORGOTTEN", "pending") if self._record.get("cancelled"):
                status, reason = "interrupted", f"job {job} was cancelled while it waited; {resume}"
            case ("CANCELLED", _):
                status, reason = "interrupted", f"{ended}; {resume}"
            case (_, "pending"):
                folder = self._experiment_dir / FOLDER
                nothing = f"wrote nothing to {state.directory} (do the nodes share it?)"
                look = f"look into {folder}, and run: scontrol show job {job}"
                status, reason = "failed", f"{ended}, and {nothing}; {look}"
            case ("FAILED", _):
                status, reason = "failed", f"{ended}, and its run wrote no result (disk full?)"
            case _:
                status, reason = "failed", ended
        return replace(state, status=status, reason=in_words(reason))

    def stop_jobs(self) -> None:
        self._query_cached()
        cancel_jobs("--state=PENDING", *self.job_ids)
        cancel_jobs("--batch", "--signal=TERM", "--state=RUNNING", *self.job_ids)

    def query_jobs(self) -> dict[tuple[str, int | None], SlurmTask]:
        all_tasks = list_tasks(self._record.get("user", ""))
        self._adopt_unrecorded(all_tasks)
        tasks = {(task.job, task.index): task for task in all_tasks if task.job in self.job_ids}
        self._release_held(tasks.values(), time.monotonic())
        return tasks

    def _release_held(self, tasks: Iterable[SlurmTask], now: float) -> None:
        """Start requeued jobs, once their nodes have cleaned up after the previous start."""
        for task in tasks:
            if task.state != "PENDING" or task.reason != "BeginTime":
                self._held_since_s.pop(task.name, None)
            elif now - self._held_since_s.setdefault(task.name, now) >= RELEASE_AFTER_S:
                with contextlib.suppress(LaunchError):  # another user's job
                    release_job(task.name)
