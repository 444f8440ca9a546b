"""Submits a plan to Slurm, checked by Slurm itself, completely or not at all; tracks and cancels its jobs."""

import contextlib
import getpass
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import anywhere_refusals, separate_job_refusals
from abrun.launch.cluster import ACTIVE_STATUSES, ClusterJobs, LeftInQueueError
from abrun.launch.queue import LaunchQueue
from abrun.launch.slurm import commands, jobs
from abrun.launch.slurm.jobs import AllocationRequest, JobScript
from abrun.messages.codes import Code
from abrun.recipe.launcher import parse_time_limit
from abrun.runs.files import write_file
from abrun.runs.records import RunState
from abrun.runs.rundir import RunDir

# A job that starts right after its requeue is killed ("Job credential revoked").
RELEASE_AFTER_S = 10.0


class SlurmCluster(ClusterJobs):
    """The Slurm jobs of an experiment."""

    query_interval_s, folder, cleared_fields = 5.0, jobs.FOLDER, {"jobs": {}, "compare": None}
    read, write = staticmethod(jobs.read_record), staticmethod(jobs.write_record)

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        super().__init__(experiment_dir, settings, num_jobs)
        self._fits: dict[AllocationRequest, bool] = {}
        self._jobs: dict[str, list[list[str]]] = {}
        self._compare: str | None = None
        self._held_since_s: dict[str, float] = {}  # time since which a task has been held back

    def load(self) -> None:
        super().load()
        self._jobs, self._compare = dict(self._record.get("jobs", {})), self._record.get("compare")

    @property
    def is_submitted(self) -> bool:
        return bool(self._record.get("jobs") or self._record.get("submitting"))

    # --- submission ---

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        """Return why no machine could run the plan or Slurm never would; notes if pairs fit an allocation."""
        reasons = [*anywhere_refusals(plan), *separate_job_refusals(plan)]
        time, save_s = self._settings.time, self._settings.save_s
        if time and save_s >= parse_time_limit(time):  # every start would be asked to stop at once
            reasons.append(
                f"launcher.save_s: got {save_s}, but launcher.time {time!r} is only "
                f"{parse_time_limit(time):.0f} s; lower launcher.save_s, or ask for more time"
            )
        return reasons or self._find_slurm_problems(plan)

    def render_scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """Return the text of every script that would be submitted, by name, in order.

        Call `find_problems` first.
        """
        texts = {
            script.name: jobs.render_script(
                script, self._experiment_dir, self._settings, max_parallel=self._num_jobs
            )
            for script in self._scripts(plan)
        }
        if compare:
            texts["compare"] = jobs.render_compare(self._experiment_dir, self._settings)
        return texts

    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        """Submit every unfinished run, after its warm start, and the comparison; return the job ids.

        If Slurm refuses one of them, raises LaunchError and leaves no job in the queue.
        """
        experiment_dir, scripts = self._experiment_dir, self._scripts(plan)
        folder = experiment_dir / jobs.FOLDER
        for name, text in self.render_scripts(plan, compare=compare).items():
            write_file(folder / f"{name}.sh", text.encode(), mode=0o644)
        record: dict[str, Any] = {"settings": self._settings.model_dump(mode="json"), "git": git, "jobs": {}}
        record["user"] = getpass.getuser()
        # Written before the first job: if this process is killed, unrecorded jobs are found by their scripts.
        record["submitting"] = {script.name: [list(task) for task in script.tasks] for script in scripts}
        jobs.write_record(experiment_dir, record)
        submitted: list[str] = []

        def add(name: str, after_jobs: list[str]) -> str:
            options = [f"--dependency=afterany:{':'.join(after_jobs)}"] if after_jobs else []
            submitted.append(commands.submit_script(jobs.script_path(experiment_dir, name), *options))
            return submitted[-1]

        try:
            warm_starts: list[str] = []
            for script in scripts:
                job = add(script.name, [] if script.warm_start else warm_starts)
                warm_starts += [job] if script.warm_start else []
                record["jobs"][job] = [list(task) for task in script.tasks]
                jobs.write_record(experiment_dir, record)
            if compare:
                record["compare"] = add("compare", list(submitted))
            del record["submitting"]
            jobs.write_record(experiment_dir, record)
        except BaseException as error:
            with contextlib.suppress(LaunchError):  # include a job that was just being submitted
                self.load()
                submitted += self.active_job_ids
            try:
                if submitted:
                    commands.kill_jobs(list(dict.fromkeys(submitted)))
            except LaunchError as refused:  # the record still lists them
                raise LeftInQueueError(
                    Code.JOBS_LEFT_IN_QUEUE(
                        error=str(error) or type(error).__name__,
                        jobs=[*dict.fromkeys(submitted)],
                        problem=refused.reason,
                        directory=experiment_dir,
                    )
                ) from error
            jobs.write_record(experiment_dir, {**record, "submitting": {}, "jobs": {}, "compare": None})
            raise
        return submitted

    def _scripts(self, plan: ExperimentPlan) -> list[JobScript]:
        queue = LaunchQueue(plan, self._experiment_dir)
        to_run = {job.label for job in queue.jobs if not (job.is_done or job.is_warm_start)}
        warm_starts = []
        for job in queue.jobs:
            if job.is_warm_start and not job.run.finished:
                need = jobs.combine_requests([job.config], self._settings)
                assert need is not None
                name, task = f"{jobs.WARM_START}-{len(warm_starts)}", f"{jobs.WARM_START}/{job.run.path.name}"
                warm_starts.append(JobScript(name=name, need=need, tasks=((task,),), warm_start=True))
        runs = [run for run in plan.runs if str(run.name) in to_run]
        return warm_starts + jobs.group_into_scripts(runs, self._settings, self._fits, self._num_jobs)

    def _find_slurm_problems(self, plan: ExperimentPlan) -> list[str]:
        container = self._settings.container
        if container:
            try:
                commands.run_slurm("srun", f"--container-image={container.image}", "--help")
            except LaunchError as error:
                if "container-image" not in error.reason.values.get("answer", ""):
                    return [str(error)]
                return [
                    f"launcher.container: got {container.image!r}, but Slurm has no pyxis plugin: {error}"
                ]
        cluster_options = jobs.cluster_options(self._settings)
        for group in jobs.group_into_tasks(plan.runs, self._num_jobs):
            configs = [run.config for run in group]
            pair_request = jobs.combine_requests(configs, self._settings)
            if pair_request is None or self._fits.get(pair_request) is False:
                continue
            if pair_request not in self._fits:
                self._fits[pair_request] = (
                    commands.find_refusal([*cluster_options, *pair_request.options()]) is None
                )
            if self._fits[pair_request]:
                continue
            for config in configs:
                run_request = jobs.combine_requests([config], self._settings)
                assert run_request is not None
                refusal = (
                    None
                    if self._fits.get(run_request)
                    else commands.find_refusal([*cluster_options, *run_request.options()])
                )
                if refusal:
                    command_options = " ".join([*cluster_options, *run_request.options()])
                    return [f"slurm: {refusal} (requested: {command_options})"]
                self._fits[run_request] = True
        return []

    # --- state of the jobs ---

    @property
    def job_ids(self) -> list[str]:
        return [*self._jobs, *([self._compare] if self._compare else [])]

    def _adopt_unrecorded(self, tasks: Sequence[commands.SlurmTask]) -> None:
        """Adopt jobs that a killed launcher has submitted but not recorded.

        While a launcher is still submitting, this may find a job before it is recorded; it is the same job.
        """
        recorded = [*self._jobs.values()]
        for name, names in self._record.get("submitting", {}).items():
            path = jobs.script_path(self._experiment_dir, name)
            job_ids = [task.job for task in tasks if task.script == path and not task.is_over]
            if job_ids and names not in recorded:
                self._jobs[job_ids[0]] = names
        path = jobs.script_path(self._experiment_dir, "compare")
        for task in tasks:
            if "submitting" in self._record and task.script == path and not task.is_over:
                self._compare = task.job

    @property
    def active_job_ids(self) -> list[str]:
        return sorted({task.job for task in self._query_cached().values() if not task.is_over}, key=int)

    def state_of(self, state: RunState) -> RunState:
        """Return a run's state, corrected if Slurm knows more than its directory."""
        warm_start = state.name.arm == jobs.WARM_START
        name = f"{jobs.WARM_START}/{state.directory.name}" if warm_start else str(state.name)
        if state.status == "finished":
            return state
        try:
            known_tasks = self._query_cached()
        except LaunchError:  # no Slurm on this host, or its controller does not answer
            return state
        tasks = (
            (job, index, names)
            for job, job_tasks in self._jobs.items()
            for index, names in enumerate(job_tasks)
        )
        job, index = next(((job, index) for job, index, names in tasks if name in names), (None, None))
        if job is None:
            return state
        task = known_tasks.get((job, index)) or known_tasks.get((job, None))
        if task and not task.is_over:
            if task.state in ("RUNNING", "COMPLETING", "STOPPED", "SUSPENDED"):
                if state.status not in ("pending", "interrupted"):
                    return state
                if not warm_start and not RunDir(state.directory).exists:
                    run_removed = Code.RUN_REMOVED(directory=state.directory, job=task.name)
                    return replace(state, status="failed", reason=run_removed)
                reason = Code.JOB_BEGINS_OR_ENDS(job=task.name, nodes=task.nodes)
            else:
                reason = Code.JOB_WAITS(job=task.name, why=task.reason)
            return replace(state, status="waiting", reason=reason)
        if state.status not in ACTIVE_STATUSES:
            return state
        if task is None and state.status == "pending" and self._record.get("cancelled"):
            return replace(state, status="interrupted", reason=Code.JOB_CANCELLED(job=job))
        ended = Code.JOB_ENDED(job=task.name, state=task.state) if task else Code.JOB_NOT_IN_QUEUE(job=job)
        if task and task.state == "CANCELLED":
            return replace(state, status="interrupted", reason=Code.RESUMABLE(ending=ended))
        if state.status == "pending":
            folder = self._experiment_dir / jobs.FOLDER
            ended = Code.JOB_LEFT_NOTHING(ending=ended, directory=state.directory, folder=folder, job=job)
        elif task and task.state == "FAILED":
            ended = Code.JOB_RUN_SILENT(ending=ended)
        return replace(state, status="failed", reason=ended)

    def stop_jobs(self) -> None:
        self._query_cached()
        commands.cancel_jobs(self.job_ids)

    def query_jobs(self) -> dict[tuple[str, int | None], commands.SlurmTask]:
        all_tasks = commands.list_tasks(self._record.get("user", ""))
        self._adopt_unrecorded(all_tasks)
        tasks = {(task.job, task.index): task for task in all_tasks if task.job in self.job_ids}
        self._release_held(tasks.values(), time.monotonic())
        return tasks

    def _release_held(self, tasks: Iterable[commands.SlurmTask], now: float) -> None:
        """Start requeued jobs, once their nodes have cleaned up after the previous start."""
        for task in tasks:
            if task.state != "PENDING" or task.reason != "BeginTime":
                self._held_since_s.pop(task.name, None)
            elif now - self._held_since_s.setdefault(task.name, now) >= RELEASE_AFTER_S:
                with contextlib.suppress(LaunchError):  # another user's job
                    commands.release_job(task.name)
