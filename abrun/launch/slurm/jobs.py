"""Which runs share a job of Slurm, the job's script, and what an experiment's directory says of its jobs."""

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
from abrun.runs.records import Git
from abrun.runs.schemas import Flag, Items, Texts, checked

FOLDER = "_slurm"  # of an experiment; no arm can be called so
RECORD = "jobs.json"
WARM_START = "warm-start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the runs of one allocation take: the same nodes, on each of which every run has its share."""

    nodes: int
    runs: int
    cpus: int  # of a run on a node; the largest of them
    gpus: int  # of all runs on a node

    def options(self) -> list[str]:
        gpus = [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        tasks = [f"--ntasks-per-node={self.runs}", f"--cpus-per-task={self.cpus}"]
        return [f"--nodes={self.nodes}", *tasks, *gpus]


def need_of(configs: Sequence[RunConfig], settings: Slurm) -> Need | None:
    """What runs take together; None where they do not take the same number of nodes."""
    nodes = {config.cluster.nodes for config in configs}
    if len(nodes) > 1:
        return None
    cpus = max(config.devices_per_node for config in configs) * settings.cpus_per_rank
    gpus = sum(gpus_of(config) for config in configs)
    return Need(nodes=nodes.pop(), runs=len(configs), cpus=cpus, gpus=gpus)


def gpus_of(config: RunConfig) -> int:
    """The GPUs of a run on each of its nodes."""
    return config.devices_per_node if config.cluster.gpus_per_node else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, submitted as an array: of each task the names of the runs that it trains."""

    name: str
    need: Need
    tasks: tuple[tuple[str, ...], ...]
    warm_start: bool = False


def grouped(runs: Sequence[PlannedRun], settings: Slurm, fits: "Mapping[Need, bool]") -> list[Script]:
    """The arms of each seed in one task where `fits` says so, else each run in its own; reruns alone."""
    by_need: dict[Need, list[tuple[str, ...]]] = {}
    for group in group_pairs(runs):
        need = need_of([run.config for run in group], settings)
        together = need is not None and fits.get(need, True)
        for part in [group] if together else [[run] for run in group]:
            need = need_of([run.config for run in part], settings)
            assert need is not None
            by_need.setdefault(need, []).append(tuple(str(run.name) for run in part))
    scripts = []
    for need, tasks in by_need.items():
        kind = "pairs" if need.runs > 1 else "runs"
        same = sum(script.name.startswith(kind) for script in scripts)
        name = f"{kind}-{same + 1}" if same else kind
        scripts.append(Script(name=name, need=need, tasks=tuple(tasks)))
    return scripts


def render(script: Script, experiment_dir: Path, settings: Slurm, *, at_once: int | None = None) -> str:
    """The text of a job script, for sbatch and for people."""
    options = [
        *script.need.options(),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{settings.save_s}",
        f"--output={_log(experiment_dir, script.name)}{'' if script.warm_start else '-%a'}.log",
    ]
    argv = [settings.python if settings.python and not settings.container else sys.executable]
    argv += [*MODULE_OPTIONS, "abrun.launch.slurm.allocation", str(experiment_dir)]
    if script.warm_start:
        return _script(
            experiment_dir, script.name, options, settings, [f"exec {shlex.join([*argv, *script.tasks[0]])}"]
        )
    options.insert(0, f"--array=0-{len(script.tasks) - 1}{f'%{at_once}' if at_once else ''}")
    lines = ["# The runs of each task of the array: side by side, on the same nodes", "tasks=("]
    lines += [f"  {shlex.quote(' '.join(task))}  # {index}" for index, task in enumerate(script.tasks)]
    lines += [")", 'read -ra runs <<< "${tasks[$SLURM_ARRAY_TASK_ID]}"']
    lines += [f'exec {shlex.join(argv)} "${{runs[@]}}"']
    return _script(experiment_dir, script.name, options, settings, lines)


def render_compare(experiment_dir: Path, settings: Slurm) -> str:
    """The text of the job that compares the arms once all others have ended."""
    options = ["--nodes=1", "--ntasks=1", "--open-mode=append"]
    options.append(f"--output={_log(experiment_dir, 'compare')}.log")
    argv = [sys.executable, *MODULE_OPTIONS, "abrun", "compare", str(experiment_dir)]
    return _script(experiment_dir, "compare", options, settings, [f"exec {shlex.join(argv)}"])


def cluster_options(settings: Slurm) -> list[str]:
    """What a user chose among a cluster's accounts, partitions and kinds of nodes, as options of sbatch."""
    named = {name: getattr(settings, name) for name in ("account", "partition", "qos", "constraint", "time")}
    options = [f"--{name}={value}" for name, value in named.items() if value is not None]
    for name, value in settings.sbatch.items():
        if value is not False:
            options.append(f"--{name}" if value is True else f"--{name}={value}")
    return options


def _script(
    experiment_dir: Path, name: str, options: Sequence[str], settings: Slurm, lines: Sequence[str]
) -> str:
    named = f"--job-name={experiment_dir.name}-{name}"
    header = [f"#SBATCH {_quoted(each)}" for each in (named, *cluster_options(settings), *options)]
    path = os.environ.get("PYTHONPATH")
    setup = [f"export PYTHONPATH={shlex.quote(path)}"] if path else []
    body = [f"cd {shlex.quote(os.getcwd())} || exit", *setup, *settings.setup, *lines]
    return "\n".join(["#!/bin/bash", *header, "", *body, ""])


def _log(experiment_dir: Path, name: str) -> str:
    """A log without its ending, for --output, where Slurm replaces what follows a '%'."""
    return str(experiment_dir / FOLDER / name).replace("%", "%%")


def _quoted(option: str) -> str:
    """For a line of #SBATCH, which takes double quotes."""
    name, equals, value = option.partition("=")
    return option if shlex.quote(value) in (value, "''") or not equals else f'{name}="{value}"'


# --- what was submitted ---


def script_path(experiment_dir: Path, name: str) -> str:
    """Where a script lies, as Slurm is told, and tells again of its job."""
    return os.path.realpath(experiment_dir / FOLDER / f"{name}.sh")


JobId = Annotated[str, Field(pattern="^[0-9]{1,18}$")]  # which is no option of scancel
Tasks = Items[Texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submitted:
    """The fields of the record."""

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
    """`jobs`: by id, the names of the runs of each task; `compare`: an id; `settings`, `git`, `user`.

    `submitting`: by script, the tasks of what is being submitted; gone once all of that has an id.
    Empty where nothing was submitted. Raises StoreError where it does not read.
    """
    path = experiment_dir / FOLDER / RECORD
    content = read_json_or_empty(path)
    checked(_Submitted, content, path)
    return content
