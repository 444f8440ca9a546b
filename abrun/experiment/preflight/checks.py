"""All checks of a plan against a machine before its runs start; needs no torch.

`abrun launch`, its dry run, cluster launchers and the nodes of their jobs go through CHECKS, in this order.
"""

import importlib.machinery
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from abrun.errors import LaunchError, StoreError
from abrun.experiment.plan import ExperimentPlan, PlannedRun
from abrun.experiment.preflight.machine import Machine
from abrun.experiment.preflight.model_files import folder_refusal, hub_model_refusal, model_shape
from abrun.experiment.preflight.settings import SETTINGS
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import count_text, plural
from abrun.recipe.command import SCRIPT_SUFFIXES, CommandRunConfig, build_invocation, unset_variables
from abrun.recipe.extras import installed_packages, is_imported, missing_package, untested_version
from abrun.recipe.families import dtensor_misfit, family_refusal, megatron_misfit, stream_misfit, vllm_misfit
from abrun.recipe.implementations import TASK_CHECK, load_implementation
from abrun.recipe.policy import Megatron
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig, RunConfig, unsupported_settings
from abrun.runs.files import is_file

INTERPRETERS = re.compile(r"python[\d.]*|bash|sh")
TRAINER_PACKAGES = ("torch", "transformers", "triton", "liger-kernel")  # Megatron and vLLM are refused


@dataclass(frozen=True, slots=True)
class Check:
    """Check of runs of one kind; `find` yields reasons why a machine cannot run one of them."""

    runs: type[RunConfig]
    find: Callable[[Any, Machine], Iterable[str | Reason]]
    # What has to change: the recipe (also checked on a login node), a file that it names, or the machine.
    cause: Literal["recipe", "file", "machine"] = "machine"


def _find_model_misfits(config: OwnRunConfig, _: Machine) -> Iterator[str]:
    """Yield why no machine can train the model with these settings, judging by its configuration."""
    backend, shape = config.policy.backend, model_shape(config.model)
    if obstacle := family_refusal(shape):
        yield (
            f"model.path: got {config.model.path!r}, {obstacle}; use a causal language model of another "
            "family"
        )
    elif isinstance(backend, Megatron):
        yield from filter(None, [megatron_misfit(shape, backend)])
    else:
        yield from filter(None, [dtensor_misfit(shape, backend), stream_misfit(shape, config.policy)])


def _find_missing_command(config: CommandRunConfig, _: Machine) -> Iterator[str]:
    """Yield a reason if the command, or an interpreter's script that is the same for all runs, is missing."""
    filled = build_invocation(
        config, experiment="{experiment}", arm="{arm}", seed="{seed}", rerun="{rerun}", run_dir="{run_dir}"
    )
    command, *words = filled.argv
    if shutil.which(command, path=filled.env.get("PATH", os.environ.get("PATH"))) is None:
        yield (
            f"trainer.argv.0: got {command!r}, which is not on PATH; install it, or give the path of an "
            "executable file"
        )
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    script = next(iter(words[len(options) :]), "")
    # Others may change the folder, and after -c or -m the word is an argument
    is_read = INTERPRETERS.fullmatch(Path(command).name) and not {"c", "m"} & {*"".join(options)}
    if is_read and script.endswith(SCRIPT_SUFFIXES) and not ("{" in script or os.path.isfile(script)):
        beside = f", or write {{recipe_dir}}/{Path(script).name} for a script beside the recipe"
        hint = "" if os.path.isabs(script) else beside
        yield (
            f"trainer.argv: got {script!r}, which does not exist here; give its path from the folder where "
            f"abrun is started{hint}"
        )


def _find_missing_extras(config: OwnRunConfig, machine: Machine) -> Iterator[str]:
    extras = ["train", *(["wandb"] if config.wandb else [])]
    yield from filter(None, (missing_package(extra, machine.packages) for extra in extras))


def _find_unsupported_settings(config: OwnRunConfig, machine: Machine) -> Iterator[str]:
    """Yield settings whose package, version or device the machine lacks."""
    on_gpu = config.cluster.gpus_per_node > 0
    for (field, value), refusal in SETTINGS.items():
        if field.startswith("launcher.") or attrgetter(field)(config) != value:
            continue
        if field != "rollout.engine":
            problem = refusal(machine.packages, on_gpu)
        else:
            problem = config.samples_completions and (
                refusal(machine.packages, on_gpu)
                or vllm_misfit(model_shape(config.model), config.rollout.tensor_parallel)
                or config.rollout.support_refusal(machine.packages)
            )
        yield from [problem] if problem else []


def _find_missing_verifier(config: OwnRunConfig, _: Machine) -> Iterator[str]:
    """Yield a reason if a verifier's module is not on the trainer's path; only the trainer imports it."""
    verifier = getattr(config.task, "verifier", None)
    package = (verifier or "").partition(":")[0].partition(".")[0]
    if not verifier or package in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is None:
        yield (
            f"task.verifier: got {verifier!r}, but module {package} does not exist here; name an installed "
            "module, or one in the directory where abrun is started"
        )


def _find_bad_checkpoint(config: OwnRunConfig, _: Machine) -> Iterator[str]:
    from abrun.runs.records import read_saved_state

    if (folder := config.checkpoint.start_from) is None:
        return
    path = Path(folder).expanduser()
    try:
        state = read_saved_state(path)
        _check_sizes(path, state.files)
    except StoreError as error:
        yield (
            f"checkpoint.start_from: got {folder!r}, which is not a checkpoint ({error}); give a folder such "
            "as runs/EXPERIMENT/ARM/seed-0/checkpoints/step-000050"
        )
        return
    if state.step >= config.steps:
        yield (
            f"checkpoint.start_from: got {folder!r} of step {state.step}, but steps is {config.steps} and "
            f"counts from the start of that run; use steps: {state.step + 1} or more"
        )


def _check_sizes(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise StoreError for a missing or truncated file; the trainer verifies the checksums."""
    for name, recorded in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise StoreError(f"{name} cannot be read: {error.strerror}") from None
        if size != recorded.get("bytes"):
            expected = recorded.get("bytes")
            raise StoreError(f"{name} has {size} bytes, but {expected} were written")


def _find_missing_devices(config: RunConfig, machine: Machine) -> Iterator[str]:
    cluster, engines, count = config.cluster, config.engine_devices, config.devices_per_node
    ranks, gpus = cluster.ranks_per_node, len(machine.gpus)
    if cluster.nodes > 1:
        yield (
            f"cluster.nodes: got {cluster.nodes}, but the local launcher has only this machine; use "
            "launcher: slurm or ray, or nodes: 1"
        )
    devices, in_total = f"{ranks}", ""
    if engines:
        devices, in_total = f"{ranks} and rollout.devices {engines}", " in total"
    if cluster.gpus_per_node and count > gpus:
        remedy = f"use at most {gpus}{in_total}" if gpus else "use a machine with GPUs"
        yield (
            f"cluster.gpus_per_node: got {devices}, but this machine has {count_text(gpus, 'visible GPU')}; "
            f"{remedy} (0 trains on CPU cores)"
        )
    if not cluster.gpus_per_node and count > machine.cores:
        yield (
            f"cluster.cpu_ranks: got {devices}, but this machine has "
            f"{count_text(machine.cores, 'usable CPU core')}; use at most {machine.cores}{in_total}"
        )


CHECKS = (
    Check(OwnRunConfig, lambda config, _: unsupported_settings(config), cause="recipe"),
    Check(OwnRunConfig, _find_model_misfits, cause="recipe"),
    Check(CommandRunConfig, _find_missing_command),
    Check(OwnRunConfig, _find_missing_extras),
    Check(OwnRunConfig, lambda config, _: filter(None, [folder_refusal(config.model)]), cause="file"),
    Check(OwnRunConfig, lambda config, machine: filter(None, [hub_model_refusal(config, machine.ask_hub)])),
    # The trainer reads the files of task and validation
    Check(OwnRunConfig, lambda config, _: load_implementation(TASK_CHECK)(config), cause="file"),
    Check(OwnRunConfig, _find_missing_verifier),
    Check(OwnRunConfig, _find_bad_checkpoint),
    Check(OwnRunConfig, _find_unsupported_settings),
    Check(RunConfig, _find_missing_devices),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """Problem that prevents arms of a plan from running on a machine."""

    text: str
    is_final: bool  # another machine would not help


def find_problems(
    plan: ExperimentPlan, machine: Machine, num_jobs: int | None = None, checks: Iterable[Check] = CHECKS
) -> list[PlanProblem]:
    """Return why a machine cannot run the plan, `num_jobs` runs at once; first what no machine could run."""
    configs = {run.name.arm: run.config for run in plan.runs}
    arms_of: dict[tuple[str, bool], list[str]] = {}
    for check in checks:
        for arm, config in configs.items():
            for problem in check.find(config, machine) if isinstance(config, check.runs) else ():
                # Another machine may have a task's file that cannot be read here
                code = problem.code if isinstance(problem, Reason) else None
                is_final = check.cause != "machine" and code is not Code.PROBLEMS_UNREADABLE
                arms_of.setdefault((str(problem), is_final), []).append(arm)
    for arm, config in configs.items():
        count, gpus, shared_by = config.devices_per_node, len(machine.gpus), config.cluster.runs_per_gpu
        if num_jobs and config.cluster.gpus_per_node and count <= gpus < count * num_jobs / shared_by:
            shared = f" and {shared_by} runs to a GPU" if shared_by > 1 else ""
            problem = (
                f"--jobs: got {num_jobs} runs at once with {count_text(count, 'GPU')} each{shared}, but this "
                f"machine has {gpus}; use at most {gpus * shared_by // count}"
            )
            arms_of.setdefault((problem, False), []).append(arm)
    problems = [
        PlanProblem(text=f"{plural(arms, 'arm')} {', '.join(arms)}: {problem}", is_final=is_final)
        for (problem, is_final), arms in arms_of.items()
    ]
    reference = plan.recipe.compare.reference
    if reference and not is_file(Path(reference).expanduser()):
        missing = f"compare.reference: got {reference!r}, which is not a file here"
        text = f"{missing}; make one with abrun reference save"
        problems.append(PlanProblem(text=text, is_final=False))
    return problems


def separate_job_refusals(plan: ExperimentPlan) -> list[str]:
    """Return why runs cannot be separate jobs: none waits for another run's rollouts."""
    recorders = filter(None, (run.trains_on(plan.recipe.arms) for run in plan.runs))
    return [
        f"rollout.from: got {name.arm!r}, an arm of the recipe, but separate jobs do not wait for each "
        "other; launch the recording arms first, and give the path of their experiment"
        for name in itertools.islice(recorders, 1)
    ]


def anywhere_refusals(plan: ExperimentPlan) -> list[str]:
    """Return what no machine could run: all that a login node can say of nodes that it does not know."""
    nowhere = Machine(gpus=(), cores=0, packages={}, ask_hub=lambda _: None)
    checks = [check for check in CHECKS if check.cause == "recipe"]
    return [problem.text for problem in find_problems(plan, nowhere, checks=checks)]


def lone_command_refusal(config: RunConfig) -> str | None:
    """Return why only Slurm can start a run, if that is so: elsewhere a command reaches no other node."""
    if config.started_nodes == config.cluster.nodes:
        return None
    return (
        f"cluster.nodes: got {config.cluster.nodes} with trainer.start 'once', but only Slurm's srun reaches "
        "the other nodes; use launcher: slurm, trainer.ray: true (Ray drivers) or start: every_node"
    )


def node_refusals(config: RunConfig, machine: Machine) -> list[str]:
    """Return why a machine cannot be one of the nodes of a run."""
    node = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": 1})})
    return [
        str(problem)
        for check in CHECKS
        if isinstance(node, check.runs)
        for problem in check.find(node, machine)
    ]


def untested_packages(plan: ExperimentPlan, packages: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each package that abrun's trainer imports in a version that was not tested."""
    packages = installed_packages() if packages is None else packages
    configs = [run.config for run in plan.runs if isinstance(run.config, OwnRunConfig)]
    values = [dotted(config.model_dump(mode="json")) for config in configs]
    imported = [name for name in TRAINER_PACKAGES if any(is_imported(name, config) for config in values)]
    return list(filter(None, (untested_version(name, packages.get(name)) for name in imported)))


def refuse_unset_variables(runs: Iterable[PlannedRun]) -> None:
    """Raises LaunchError where a run's `env` refers to a variable that the launcher does not have."""
    for run in runs:
        unset = unset_variables(run.config, os.environ) if isinstance(run.config, CommandRunConfig) else []
        if unset:
            raise LaunchError(f"arms.{run.name.arm}: {unset[0]}")
