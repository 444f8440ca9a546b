"""What a plan needs, what this machine has, and why the one cannot run on the other; found without torch."""

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.errors import LaunchError, RecipeError, StoreError
from abrun.experiment.plan import Plan, PlannedRun
from abrun.experiment.preflight.hub import hub_refusal
from abrun.experiment.preflight.model_folder import config_of, folder_damage
from abrun.extras import installed_version, is_imported, lacking, untested_version
from abrun.messages.numbers import count_text
from abrun.reasons import Code, Reason
from abrun.recipe.command import CommandRunConfig, invocation, unset_variables
from abrun.recipe.dtensor import dtensor_misfit
from abrun.recipe.families import family_refusal, stream_misfit
from abrun.recipe.megatron import megatron_misfit, megatron_refusal
from abrun.recipe.policy import Dtensor, Megatron, Model
from abrun.recipe.reading import dotted
from abrun.recipe.run import OwnRunConfig, RunConfig, not_built
from abrun.recipe.tasks import GENERATED, ReasoningGym, Validation
from abrun.recipe.vllm import vllm_misfit, vllm_refusal
from abrun.regular_files import is_directory, is_file
from abrun.tasks import hold_out

if TYPE_CHECKING:
    from abrun.tasks.problems import FileConfig

TRAINER_PACKAGES = ("torch", "transformers", "triton", "liger-kernel")  # Megatron and vLLM are refused
# Variables by which a run looks for a hub and what was fetched from it elsewhere
ASKS_OTHERWISE = re.compile(r"(HF|HUGGINGFACE|TRANSFORMERS|XDG)_|HOME$|.*_proxy$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The devices that runs may occupy: GPUs as CUDA_VISIBLE_DEVICES names them, and CPU cores."""

    gpus: tuple[str, ...]
    cores: int

    def __str__(self) -> str:
        return f"{count_text(len(self.gpus), 'GPU')} and {count_text(self.cores, 'usable CPU core')}"


def this_machine() -> Machine:
    return Machine(gpus=find_gpus(), cores=usable_cores())


def find_gpus() -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, or all that nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA itself reads the list up to its first invalid entry; -1 and an empty one are invalid.
        stop = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:stop])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    num_gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(str(index) for index in range(num_gpus))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores this process may use: its affinity, within its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def refusals(plan: Plan, machine: Machine, num_jobs: int | None) -> list[Reason]:
    """Return why this machine cannot run the plan; first what no machine could run."""
    configs = {run.name.arm: run.config for run in plan.runs}
    arms_of: dict[Reason, list[str]] = {}
    missing = partial(_missing, ask=cache(hub_refusal))  # once a model, whichever arms have it
    for check in (
        _unbuilt,
        _model_misfits,
        missing,
        partial(_too_large, machine=machine, num_jobs=num_jobs),
    ):
        for arm, config in configs.items():
            for reason in check(config):
                arms_of.setdefault(reason, []).append(arm)
    reasons = [Code.ARMS_CANNOT_RUN(arms=arms, problem=reason) for reason, arms in arms_of.items()]
    return reasons + reference_refusals(plan)


def foreign_refusals(plan: Plan) -> list[Reason]:
    """Why a cluster's jobs could not run the foreign trainers of the plan."""
    return [
        Code.ARMS_CANNOT_RUN(
            arms=[run.name.arm], problem=Code.COMMAND_NEEDS_ONE_NODE(nodes=run.config.cluster.nodes)
        )
        for run in plan.runs
        if isinstance(run.config, CommandRunConfig) and run.config.cluster.nodes > 1
    ]


def anywhere_refusals(plan: Plan) -> list[Reason]:
    """What no machine could run: all that a login node can say of nodes that it does not know."""
    configs = {run.name.arm: run.config for run in plan.runs}
    reasons = [
        Code.ARMS_CANNOT_RUN(arms=[arm], problem=reason)
        for arm, config in configs.items()
        for check in (_unbuilt, _model_misfits)
        for reason in check(config)
    ]
    return reasons + reference_refusals(plan)


def untested_packages(plan: Plan) -> list[Reason]:
    """Return a reason for each package that abrun's trainer imports in a version that was not tested."""
    configs = [run.config for run in plan.runs if isinstance(run.config, OwnRunConfig)]
    values = [dotted(config.model_dump(mode="json")) for config in configs]
    imported = [name for name in TRAINER_PACKAGES if any(is_imported(name, config) for config in values)]
    return list(filter(None, (untested_version(name, installed_version(name)) for name in imported)))


def is_refused_for_its_model(plan: Plan) -> bool:
    """Return True if an arm's model is a folder that does not load, or cannot be trained as the arm says."""
    configs = [run.config for run in plan.runs if isinstance(run.config, OwnRunConfig)]
    models = {config.model.path for config in configs}
    return any(path and _is_folder(path) and _unloadable_folder(path) for path in models) or any(
        any(_model_misfits(config)) for config in configs
    )


def node_refusals(config: RunConfig, machine: Machine) -> list[Reason]:
    """Why a machine cannot be one of the nodes of a run."""
    one = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": 1})})
    return [*_model_misfits(config), *_missing(config), *_too_large(one, machine, None)]


def reference_refusals(plan: Plan) -> list[Reason]:
    reference = plan.recipe.compare.reference
    if reference and not is_file(Path(reference).expanduser()):
        return [Code.SETTING_REFUSED(field="compare.reference", got=repr(reference))]
    return []


def refuse_unset_variables(runs: Iterable[PlannedRun]) -> None:
    """Raises LaunchError where a run's `env` refers to a variable that the launcher does not have."""
    for run in runs:
        unset = unset_variables(run.config, os.environ) if isinstance(run.config, CommandRunConfig) else []
        if unset:
            raise LaunchError(Code.OF_SUBJECT(subject=f"arms.{run.name.arm}", problem=unset[0]))


def _unbuilt(config: RunConfig) -> Iterable[Reason]:
    return not_built(config) if isinstance(config, OwnRunConfig) else ()


def _missing(config: RunConfig, ask: Callable[[str], Reason | None] = hub_refusal) -> Iterator[Reason]:
    """What a run needs besides devices and is not on this machine; `ask`: of a hub's model."""
    if isinstance(config, CommandRunConfig):
        yield from _missing_command(config)
    elif isinstance(config, OwnRunConfig):
        yield from filter(None, [lacking("train"), lacking("wandb") if config.wandb else None])
        yield from _missing_model(config, ask)
        yield from _missing_files(config)
        yield from _missing_kernel(config)
        if isinstance(config.policy.backend, Megatron) and (wrong := megatron_refusal()):
            yield wrong
        if config.samples and config.rollout.engine == "vllm":
            wrong = vllm_refusal(on_gpu=config.cluster.gpus_per_node > 0)
            wrong = wrong or vllm_misfit(shape_of(config.model), config.rollout.tensor_parallel)
            wrong = wrong or config.rollout.support_refusal
            if wrong:
                yield wrong


def _too_large(config: RunConfig, machine: Machine, num_jobs: int | None) -> Iterator[Reason]:
    cluster, engines, count = config.cluster, config.engine_devices, config.devices_per_node
    ranks, gpus = cluster.ranks_per_node, len(machine.gpus)
    if cluster.nodes > 1:
        yield Code.SETTING_REFUSED(field="cluster.nodes", got=cluster.nodes)
    if cluster.gpus_per_node and count > gpus:
        yield Code.TOO_FEW_GPUS(ranks=ranks, engines=engines, gpus=gpus)
    elif cluster.gpus_per_node and num_jobs and count * num_jobs > gpus:
        yield Code.TOO_MANY_JOBS(jobs=num_jobs, gpus_per_run=count, gpus=gpus)
    if not cluster.gpus_per_node and count > machine.cores:
        yield Code.TOO_FEW_CORES(ranks=ranks, engines=engines, cores=machine.cores)


def _missing_command(config: CommandRunConfig) -> Iterator[Reason]:
    """A command that cannot be found; neither an arm nor a seed changes where it is looked for."""
    filled = invocation(config, experiment="experiment", arm="arm", seed=0, rerun=0, run_dir="run_dir")
    path = filled.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(filled.argv[0], path=path) is None:
        yield Code.SETTING_REFUSED(field="trainer.argv.0", got=repr(filled.argv[0]))


def _missing_files(config: OwnRunConfig) -> Iterator[Reason]:
    """Files of the recipe, but the model's, that are not on this machine, or not as the recipe needs them."""
    task = config.task
    try:
        if isinstance(task, ReasoningGym):
            if importlib.util.find_spec("reasoning_gym") is None:
                yield Code.REASONING_GYM_MISSING()
        elif not isinstance(task, GENERATED):
            _look_at_problems(task, config.validation)
        elif config.validation:
            hold_out(task, config.validation)
    except RecipeError as error:
        yield error.reason
    yield from _missing_verifier(getattr(task, "verifier", None))
    if config.checkpoint.start_from is not None:
        yield from _not_to_start_from(config.checkpoint.start_from, config.steps)


def _missing_model(config: OwnRunConfig, ask: Callable[[str], Reason | None]) -> Iterator[Reason]:
    weights = config.model.path
    wrong = _unloadable_folder(weights) if weights and _is_folder(weights) else missing_of_hub(config, ask)
    yield from [wrong] if wrong else []


def missing_of_hub(config: OwnRunConfig, ask: Callable[[str], Reason | None]) -> Reason | None:
    """Why a hub's model cannot be had here; None: it can, or the run looks for it in other ways."""
    weights = config.model.path
    if not weights or _is_folder(weights) or any(map(ASKS_OTHERWISE.match, config.trainer.env)):
        return None
    problem = ask(weights)
    return problem and Code.MODEL_NOT_ON_HUB(path=weights, problem=problem)


def _is_folder(weights: str) -> bool:
    """Where no such folder is here, NAME and OWNER/NAME are a hub's."""
    return weights[0] in "/.~" or weights.count("/") > 1 or is_directory(Path(weights))


def _unloadable_folder(weights: str) -> Reason | None:
    folder = Path(weights).expanduser()
    if not is_directory(folder):
        return Code.SETTING_REFUSED(field="model.path", got=repr(weights))
    damage = folder_damage(folder)
    return damage and Code.MODEL_FOLDER_DAMAGED(path=weights, problem=damage)


def _not_to_start_from(folder: str, num_steps: int) -> Iterator[Reason]:
    from abrun.runs.saved import saved_state

    path = Path(folder).expanduser()
    try:
        state = saved_state(path)
        _check_sizes(path, state.files)
    except StoreError as error:
        yield Code.START_NOT_A_CHECKPOINT(folder=folder, problem=error.reason)
        return
    if (step := state.step) >= num_steps:
        yield Code.START_AFTER_LAST_STEP(folder=folder, step=step, steps=num_steps)


def _check_sizes(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises StoreError for a file that is not there or was cut off; checksums are the trainer's to read."""
    for name, recorded in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise StoreError(Code.CHECKPOINT_FILE_UNREADABLE(file=name, error=error.strerror)) from None
        if size != recorded.get("bytes"):
            expected = recorded.get("bytes")
            raise StoreError(Code.CHECKPOINT_FILE_TRUNCATED(file=name, bytes=size, expected=expected))


def _model_misfits(config: RunConfig) -> Iterator[Reason]:
    """Yield why no machine can train a model as the recipe says, as far as its configuration shows."""
    if not isinstance(config, OwnRunConfig):
        return
    backend, shape = config.policy.backend, shape_of(config.model)
    if obstacle := family_refusal(shape):
        yield Code.MODEL_FAMILY_NOT_TRAINED(path=config.model.path, obstacle=obstacle)
    elif isinstance(backend, Megatron):
        yield from filter(None, [megatron_misfit(shape, backend)])
    elif isinstance(backend, Dtensor):
        yield from filter(None, [dtensor_misfit(shape, backend), stream_misfit(shape, config.policy)])


def shape_of(model: Model) -> Mapping[str, Any]:
    """What is known of a model: the fields of a preset's or a folder's configuration; of the hub's, none."""
    if model.preset:
        return model.architecture
    try:
        return config_of(Path(model.path or "").expanduser())
    except (OSError, ValueError):  # which is said with what else is wrong with the folder, or by the trainer
        return {}


def _look_at_problems(task: "FileConfig", validation: Validation | None) -> None:
    """Raises RecipeError for files that runs would refuse; of long ones, as far as their first lines tell."""
    from abrun.tasks.problems import look_at_problems

    trained = look_at_problems(task, task.path, "task.path")
    if validation:
        path = validation.path
        source = look_at_problems(task, path, "validation.path") if path else trained
        held_out = source.held_out(validation.num_prompts) if source else []
        if trained:
            trained.without(frozenset(example.prompt for example in held_out))


def _missing_verifier(verifier: str | None) -> Iterator[Reason]:
    """A user's module that is not where the trainer looks for it; importing it is the trainer's."""
    package = (verifier or "").partition(":")[0].partition(".")[0]
    if not verifier or package in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is None:
        yield Code.VERIFIER_NOT_FOUND(verifier=verifier, package=package)


def _missing_kernel(config: OwnRunConfig) -> Iterator[Reason]:
    """Why the Triton kernels cannot run here, said before a trainer asks the kernels themselves."""
    if config.policy.liger:
        if config.cluster.gpus_per_node == 0:
            yield Code.LIGER_NEEDS_GPU()
        elif importlib.util.find_spec("liger_kernel") is None:
            yield Code.SETTING_NEEDS_PACKAGE(
                field="policy.liger",
                got=True,
                package="liger-kernel",
                install="pip install 'abrun[liger]'",
                instead="liger: false",
            )
    if config.policy.logprobs.impl == "triton":
        wrong = triton_refusal(on_gpu=config.cluster.gpus_per_node > 0)
        yield from [wrong] if wrong else []


def triton_refusal(*, on_gpu: bool) -> Reason | None:
    """Why this environment cannot run `policy.logprobs: {impl: triton}`, in a line; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return Code.SETTING_NEEDS_PACKAGE(
            field="policy.logprobs.impl",
            got="triton",
            package="triton",
            install="pip install 'abrun[triton]'",
            instead="impl: chunked",
        )
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        return Code.TRITON_NEEDS_GPU()
    return None
