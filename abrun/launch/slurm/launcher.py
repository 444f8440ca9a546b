"""A plan on its way to Slurm: checked by Slurm itself, submitted whole or not at all, followed, cancelled."""

import contextlib
import getpass
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan, group_pairs
from abrun.experiment.preflight.checks import anywhere_refusals
from abrun.launch.cluster import AT_WORK, Cluster, LeftInQueueError
from abrun.launch.queue import Queue
from abrun.launch.slurm import commands, jobs
from abrun.launch.slurm.jobs import Need, Script
from abrun.reasons import Code, Reason
from abrun.recipe.launcher import parse_time_limit
from abrun.runs.files import write_file
from abrun.runs.records import RunState
from abrun.runs.rundir import RunDir

RELEASE_AFTER_S = 10.0  # a start in the second of the requeue is killed: "Job credential revoked"


class SlurmCluster(Cluster):
    """Jobs of Slurm, and what it knows of them."""

    ask_every_s, folder, forgotten = 5.0, jobs.FOLDER, {"jobs": {}, "compare": None}
    read, write = staticmethod(jobs.read_record), staticmethod(jobs.write_record)

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        super().__init__(experiment_dir, settings, num_jobs)
        self._fits: dict[Need, bool] = {}
        self._jobs: dict[str, list[list[str]]] = {}
        self._compare: str | None = None
        self._kept_back_s: dict[str, float] = {}  # since when this has seen a task so

    def load(self) -> None:
        super().load()
        self._jobs, self._compare = dict(self._record.get("jobs", {})), self._record.get("compare")

    @property
    def is_handed_over(self) -> bool:
        return bool(self._record.get("jobs") or self._record.get("submitting"))

    # --- handing over ---

    def refusals(self, plan: ExperimentPlan) -> list[Reason]:
        """Why no machine could run the plan, or Slurm never would; finds whether pairs fit an allocation."""
        reasons = anywhere_refusals(plan)
        time, save_s = self._settings.time, self._settings.save_s
        if time and save_s >= parse_time_limit(
            time
        ):  # it would be told to stop as it begins, again and again
            reasons.append(Code.SAVE_TIME_TOO_LONG(save_s=save_s, time=time, limit_s=parse_time_limit(time)))
        return reasons or self._refused_by_slurm(plan)

    def scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """The text of every script that would be submitted, by name, in order. After `refusals`."""
        texts = {
            script.name: jobs.render(script, self._experiment_dir, self._settings, at_once=self._num_jobs)
            for script in self._scripts(plan)
        }
        if compare:
            texts["compare"] = jobs.render_compare(self._experiment_dir, self._settings)
        return texts

    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        """Submit every unfinished run, each after its warm start, and what compares them; returns the jobs.

        Raises LaunchError with nothing left in the queue where Slurm refuses one of them.
        """
        experiment_dir, scripts = self._experiment_dir, self._scripts(plan)
        folder = experiment_dir / jobs.FOLDER
        for name, text in self.scripts(plan, compare=compare).items():
            write_file(folder / f"{name}.sh", text.encode(), mode=0o644)
        record: dict[str, Any] = {"settings": self._settings.model_dump(mode="json"), "git": git, "jobs": {}}
        record["user"] = getpass.getuser()
        # Before there is a job: should this process be killed, those that it could not record are found by it
        record["submitting"] = {script.name: [list(task) for task in script.tasks] for script in scripts}
        jobs.write_record(experiment_dir, record)
        submitted: list[str] = []

        def add(name: str, after: list[str]) -> str:
            options = [f"--dependency=afterany:{':'.join(after)}"] if after else []
            submitted.append(commands.submit(jobs.script_path(experiment_dir, name), *options))
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
            with contextlib.suppress(LaunchError):  # one that was being submitted
                self.load()
                submitted += self.busy
            try:
                if submitted:
                    commands.withdraw(list(dict.fromkeys(submitted)))
            except LaunchError as refused:  # the record still has them
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

    def _scripts(self, plan: ExperimentPlan) -> list[Script]:
        queue = Queue(plan, self._experiment_dir)
        to_run = {job.label for job in queue.jobs if not (job.done or job.shared)}
        warm_starts = []
        for job in queue.jobs:
            if job.shared and not job.run.finished:
                need = jobs.need_of([job.config], self._settings)
                assert need is not None
                name, task = f"{jobs.WARM_START}-{len(warm_starts)}", f"{jobs.WARM_START}/{job.run.path.name}"
                warm_starts.append(Script(name=name, need=need, tasks=((task,),), warm_start=True))
        runs = [run for run in plan.runs if str(run.name) in to_run]
        return warm_starts + jobs.grouped(runs, self._settings, self._fits)

    def _refused_by_slurm(self, plan: ExperimentPlan) -> list[Reason]:
        container = self._settings.container
        if container:
            try:
                commands.slurm("srun", f"--container-image={container.image}", "--help")
            except LaunchError as error:
                if "container-image" not in error.reason.values.get("answer", ""):
                    return [error.reason]
                return [Code.PYXIS_MISSING(image=container.image, problem=error.reason)]
        asked = jobs.cluster_options(self._settings)
        for group in group_pairs(plan.runs):
            configs = [run.config for run in group]
            together = jobs.need_of(configs, self._settings)
            if together is None or self._fits.get(together) is False:
                continue
            if together not in self._fits:
                self._fits[together] = commands.would_run([*asked, *together.options()]) is None
            if self._fits[together]:
                continue
            for config in configs:
                alone = jobs.need_of([config], self._settings)
                assert alone is not None
                wrong = None if self._fits.get(alone) else commands.would_run([*asked, *alone.options()])
                if wrong:
                    options = " ".join([*asked, *alone.options()])
                    return [Code.SLURM_REFUSES_JOB(answer=wrong, options=options)]
                self._fits[alone] = True
        return []

    # --- what became of them ---

    @property
    def ids(self) -> list[str]:
        return [*self._jobs, *([self._compare] if self._compare else [])]

    def _adopt(self, listed: Sequence[commands.Task]) -> None:
        """Take for its own what a launcher has submitted and was killed before it could say so.

        Of one that is at work this may see a job before its record has it: it is the same one.
        """
        recorded = [*self._jobs.values()]
        for name, names in self._record.get("submitting", {}).items():
            path = jobs.script_path(self._experiment_dir, name)
            found = [task.job for task in listed if task.script == path and not task.over]
            if found and names not in recorded:
                self._jobs[found[0]] = names
        path = jobs.script_path(self._experiment_dir, "compare")
        for task in listed:
            if "submitting" in self._record and task.script == path and not task.over:
                self._compare = task.job

    @property
    def busy(self) -> list[str]:
        """The jobs that wait or work."""
        return sorted({task.job for task in self._known().values() if not task.over}, key=int)

    def state_of(self, state: RunState) -> RunState:
        """A run's state, where Slurm knows better than its directory."""
        warm_start = state.name.arm == jobs.WARM_START
        name = f"{jobs.WARM_START}/{state.directory.name}" if warm_start else str(state.name)
        if state.status == "finished":
            return state
        try:
            known = self._known()
        except LaunchError:  # this host has no Slurm, or its controller does not answer
            return state
        tasks = ((job, index, names) for job, of in self._jobs.items() for index, names in enumerate(of))
        job, index = next(((job, index) for job, index, names in tasks if name in names), (None, None))
        if job is None:
            return state
        task = known.get((job, index)) or known.get((job, None))
        if task and not task.over:
            if task.state in ("RUNNING", "COMPLETING", "STOPPED", "SUSPENDED"):
                if state.status not in ("pending", "interrupted"):
                    return state
                if not warm_start and not RunDir(state.directory).exists:
                    gone = Code.RUN_REMOVED(directory=state.directory, job=task.name)
                    return replace(state, status="failed", reason=gone)
                reason = Code.JOB_BEGINS_OR_ENDS(job=task.name, nodes=task.nodes)
            else:
                reason = Code.JOB_WAITS(job=task.name, why=task.reason)
            return replace(state, status="waiting", reason=reason)
        if state.status not in AT_WORK:
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

    def end(self) -> None:
        self._known()
        commands.cancel(self.ids)

    def ask(self) -> dict[tuple[str, int | None], commands.Task]:
        listed = commands.tasks(self._record.get("user", ""))
        self._adopt(listed)
        tasks = {(task.job, task.index): task for task in listed if task.job in self.ids}
        self._release(tasks.values(), time.monotonic())
        return tasks

    def _release(self, tasks: Iterable[commands.Task], now: float) -> None:
        """Let what Slurm has queued again begin, once its nodes have forgotten the start before."""
        for task in tasks:
            if task.state != "PENDING" or task.reason != "BeginTime":
                self._kept_back_s.pop(task.name, None)
            elif now - self._kept_back_s.setdefault(task.name, now) >= RELEASE_AFTER_S:
                with contextlib.suppress(LaunchError):  # another user's
                    commands.release(task.name)
