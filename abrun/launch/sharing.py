"""Decides `cluster.runs_per_gpu: auto`: how many runs of an experiment share each GPU.

As many as fit by their predicted peaks, or a measured one, each with an equal share of the memory. Runs do
not share where nothing can be predicted, or where sharing would change what is compared.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.machine import find_gpus, usable_cores
from abrun.memory.cells import GIB
from abrun.memory.predict import PeakPrediction, predict_steps, resolve_device_memory
from abrun.metric_names import is_clock
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import RUNS_PER_GPU, CommandRecipe, Recipe
from abrun.recipe.policy import COLOCATED_MEMORY_SHARE
from abrun.recipe.run import CONTEXT_BYTES, OwnRunConfig, RunConfig

# MPS serves 48 processes (docs.nvidia.com/deploy/mps), and a GPU full of small runs gains nothing from more
MAX_RUNS_PER_GPU = 16
# Share of its memory that a run leaves free, in addition to the error of a prediction, for fragmentation
FREE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingLimits:
    """Limits on the number of runs on a GPU, apart from its memory."""

    num_runs: int  # of the experiment
    num_jobs: int | None  # maximum number of parallel runs
    num_gpus: int | None  # of this machine; None: of a cluster
    num_cores: int | None

    def apply(self, number: int, gpus_per_run: int) -> tuple[int, str]:
        """Return the number of runs that may share a GPU if `number` fit into its memory, and why."""
        num_gpus = max(self.num_gpus or gpus_per_run, gpus_per_run)
        limits = [
            (number, "by memory"),
            (math.ceil(self.num_runs * gpus_per_run / num_gpus), f"of the experiment's {self.num_runs} runs"),
            (MAX_RUNS_PER_GPU, "at most"),
        ]
        if gpus_per_run > 1:  # their ranks wait for each other, and keep the GPUs busy meanwhile
            limits.append((number // gpus_per_run, f"by memory, divided by the {gpus_per_run} GPUs of a run"))
        if self.num_jobs:
            limits.append((math.ceil(self.num_jobs * gpus_per_run / num_gpus), f"by --jobs {self.num_jobs}"))
        if self.num_cores:
            limits.append((self.num_cores // num_gpus, f"by {self.num_cores} CPU cores"))
        smallest, reason = min(limits, key=lambda limit: limit[0])
        return max(smallest, 1), reason


def decide_sharing(
    plan: ExperimentPlan,
    options: LaunchOptions,
    decided: Mapping[str, Mapping[str, Any]],
    *,
    is_local: bool,
    say: Callable[[str], object],
) -> dict[str, dict[str, Any]]:
    """Return the decision, as experiment.json keeps it. `is_local`: the plan runs on this machine.

    `plan` has all other values of `auto`, and `decided` their decisions.
    """
    device_bytes = None
    if options.device_memory is not None or is_local:
        device_bytes = resolve_device_memory(options.device_memory)
    limits = SharingLimits(
        num_runs=len(plan.runs),
        num_jobs=options.jobs if is_local else None,
        num_gpus=len(find_gpus()) if is_local else None,
        num_cores=usable_cores() if is_local else None,
    )
    candidates = next((decision["candidates"] for decision in decided.values()), None)
    measured = candidates[-1]["measured"] if candidates else None
    number, why = decide_runs_per_gpu(plan, device_bytes, limits, measured, say=say)
    decision = {"asked": "auto", "value": number, "why": why, "device_bytes": device_bytes}
    decision["candidates"] = []  # only one number is tried
    return {RUNS_PER_GPU: decision}


def drop_jobs_limit(recipe: Recipe | CommandRecipe, problems: list[Reason]) -> list[Reason]:
    """Return a draft's problems, without that of more --jobs than GPUs if runs may come to share them."""
    if RUNS_PER_GPU not in recipe.auto_keys:
        return problems
    return [
        problem
        for problem in problems
        if not any(reason.code is Code.TOO_MANY_JOBS for reason in problem.walk())
    ]


def decide_runs_per_gpu(
    plan: ExperimentPlan,
    device_bytes: int | None,
    limits: SharingLimits,
    measured: Mapping[str, Any] | None = None,
    *,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[int, str]:
    """Return the number of runs that share a GPU, and why.

    `plan`: with all other `auto` values decided. `measured`: the measured peak of an arm, see
    abrun.launch.auto; None if there is none.
    """
    configs = {run.name.arm: run.config for run in plan.runs if run.name.arm in plan.recipe.arms}
    obstacle = _find_obstacle(plan, configs)
    if device_bytes is None:
        obstacle = obstacle or "the memory of a GPU is unknown (--device-memory)"
    if obstacle or device_bytes is None:
        return 1, f"auto resolves to 1: {obstacle}"
    own_configs = {arm: config for arm, config in configs.items() if isinstance(config, OwnRunConfig)}
    say(f"{RUNS_PER_GPU}: auto: predicting the peaks of {', '.join(own_configs)}")
    try:
        predictions = predict_steps(own_configs, device_bytes)
    except LaunchError as error:
        return 1, f"auto resolves to 1: no memory prediction: {error}"
    for prediction in predictions:
        if prediction.engine_bytes is not None and prediction.engine_cache_bytes is None:
            return 1, f"auto resolves to 1: vLLM takes a share of the GPU in arm {prediction.arm}"
    needs = {prediction.arm: _bytes_needed(prediction, measured) for prediction in predictions}
    arm, needed = max(needs.items(), key=lambda item: item[1])
    fitting = device_bytes // (needed + CONTEXT_BYTES)
    gpus_per_run = max(config.cluster.gpus_per_node for config in own_configs.values())
    number, limit = limits.apply(fitting, gpus_per_run)
    return number, (
        f"auto resolves to {number}, {limit}: {needed / GIB:.1f} GiB for a run (the largest: {arm}) and "
        f"{CONTEXT_BYTES / GIB:.2f} GiB for its CUDA context fit {fitting} times into "
        f"{device_bytes / GIB:.1f} GiB"
    )


def _find_obstacle(plan: ExperimentPlan, configs: Mapping[str, RunConfig]) -> str | None:
    """Return why the runs of a plan cannot share GPUs, or why nothing is known of their memory."""
    compare = plan.recipe.compare
    times: Iterable[str] = (claim.metric for claim in compare.claims if is_clock(claim.metric))
    if metric := next(iter(times), compare.guards.step_time_ratio and "guards.step_time_ratio"):
        return f"{metric} limits or claims a time, which would depend on other runs"
    for arm, config in configs.items():
        if not isinstance(config, OwnRunConfig):
            return f"the memory of arm {arm}, an external trainer, is unknown"
        if not config.cluster.gpus_per_node:
            return f"arm {arm} trains on CPU cores"
        if config.cluster.nodes > 1:
            return f"arm {arm} trains on several nodes"
        if config.engine_devices:
            return f"the engines of arm {arm} take whole GPUs (rollout.devices)"
        if config.policy.backend.type != "dtensor":
            return f"the memory of arm {arm} on {config.policy.backend.type} cannot be predicted"
    return None


def _bytes_needed(prediction: PeakPrediction, measured: Mapping[str, Any] | None) -> int:
    """Return the share of a GPU that a run needs; with it, no engine's cache is smaller than alone."""
    free_share = prediction.max_underestimate + FREE_SHARE
    training_bytes = prediction.training_bytes / (1 - free_share)
    if measured and measured["arm"] == prediction.arm and measured["out_of_memory"] is None:
        training_bytes = (measured["peak_bytes"] + prediction.asleep_bytes) / (1 - FREE_SHARE)
    # An engine may be a process of its own (abrun.launch.hosts)
    context_bytes = 0 if prediction.engine_bytes is None else CONTEXT_BYTES
    sampling_bytes = prediction.sampling_bytes / (1 - free_share)
    cache_share_bytes = (prediction.engine_cache_bytes or 0) / COLOCATED_MEMORY_SHARE
    return math.ceil(max(training_bytes, sampling_bytes, cache_share_bytes)) + context_bytes
