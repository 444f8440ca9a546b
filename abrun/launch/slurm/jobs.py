"""Slurm jobs of an experiment: which runs share one, their scripts, and the record of submitted jobs."""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from abrun.experiment.plan import PlannedRun, group_pairs
from abrun.processes import MODULE_OPTIONS
from abrun.recipe.launcher import Slurm
from abrun.recipe.run import RunConfig
from abrun.runs.files import read_json_or_empty, write_json
from abrun.runs.layout import REPORT
from abrun.runs.records import Git
from abrun.runs.schemas import Flag, Items, Texts, checked

FOLDER = "_slurm"  # folder in an experiment; no arm can have this name
RECORD = "jobs.json"
WARM_START = "warm-start"


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
    """Return the combined request of these runs, or None if their numbers of nodes differ."""
    nodes = {config.cluster.nodes for config in configs}
    if len(nodes) > 1:
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


def write_record(experiment_dir: Path, content: Mapping[str, Any]) -> None:
    write_json(experiment_dir / FOLDER / RECORD, content)


def read_record(experiment_dir: Path) -> dict[str, Any]:
    """Return the record of submitted jobs, or {} if nothing was submitted. Raises StoreError if unreadable.

    `jobs`: for each job id, the runs of each task. `compare`: a job id. `submitting`: for each script that is
    being submitted, its tasks; removed once all have ids. Also `settings`, `git` and `user`.
    """
    path = experiment_dir / FOLDER / RECORD
    content = read_json_or_empty(path)
    checked(_JobsRecord, content, path)
    return content
