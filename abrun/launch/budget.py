"""Estimate of a launch's wall time and device time, from earlier runs of the same configurations.

Nothing is assumed: without an earlier run on the same kind of device there is no estimate.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from abrun.errors import AbrunError
from abrun.experiment.designs import PairCost
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.machine import Machine, cpu_name, gpu_names, this_machine
from abrun.launch.engine import Devices
from abrun.launch.local import Slots
from abrun.messages.records import encode_reasons
from abrun.reasons import Code, Reason
from abrun.recipe.experiment import parse_stored_run
from abrun.recipe.reading import dotted
from abrun.recipe.run import RunConfig, can_change_numbers
from abrun.regular_files import is_directory
from abrun.runs.experiment import WARM_STARTS, list_experiments, planned_runs, run_dir
from abrun.runs.files import wrap_read_errors
from abrun.runs.rundir import RunDir

MAX_EXPERIMENTS = 50  # searched for earlier runs, the newest first
MAX_RUNS = 8  # of one configuration, whose times are averaged
TIMING_KEYS = ("cluster.runs_per_gpu",)  # cannot change a recorded number, but do change its time

ConfigKey = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Mean seconds of earlier runs of one configuration."""

    step_s: float
    start_up_s: float  # 0 if the trainer logs no step times: its steps then include it
    end_s: float  # checkpoints, validation, and the time after the last step
    num_runs: int
    experiment: str  # in which they were measured
    device: str

    def run_s(self, num_steps: int) -> float:
        return self.start_up_s + num_steps * self.step_s + self.end_s


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A run or warm start of a plan, with its expected seconds."""

    warm_start: str | None  # its key; None for a run
    after: str | None  # key of the warm start that a run waits for
    config: RunConfig
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Expected cost of a launch."""

    wall_s: float | None  # None on a cluster: nobody knows how long jobs will wait
    device: str  # "GPU" or "CPU core"
    device_s: float  # device seconds that the launch holds
    num_runs: int
    paces: Mapping[str, Pace]  # by arm
    without_runs: tuple[str, ...]  # arms without earlier runs, which get the pace of the first arm with some
    not_counted: int  # warm starts without an earlier one

    @property
    def reason(self) -> Reason:
        first_pace = next(iter(self.paces.values()))
        return Code.BUDGET(
            wall_s=self.wall_s,
            device=self.device,
            device_s=self.device_s,
            num_runs=self.num_runs,
            paces={arm: [pace.step_s, pace.start_up_s] for arm, pace in self.paces.items()},
            without_runs=self.without_runs,
            not_counted=self.not_counted,
            experiment=first_pace.experiment,
            measured_on=first_pace.device,
        )


def estimate_budget(
    plan: ExperimentPlan, runs_dir: Path, machine: Machine | None, num_jobs: int | None = None
) -> Budget | Reason:
    """Return the expected cost of a plan, or why it is unknown. `machine`: None on a cluster."""
    configs: dict[str, RunConfig] = {run.name.arm: run.config for run in plan.runs}
    warm_starts = {
        key: config
        for key, config in plan.warm_starts.items()
        if not RunDir(runs_dir / WARM_STARTS / key).finished
    }
    paces_by_key = find_paces(runs_dir, [*configs.values(), *warm_starts.values()], machine)
    paces = {arm: paces_by_key[key] for arm in configs if (key := config_key(configs[arm])) in paces_by_key}
    if not paces:
        return Code.NO_BUDGET()
    first_pace = next(iter(paces.values()))
    jobs = []
    for key, config in warm_starts.items():
        pace = paces_by_key.get(config_key(config))
        jobs.append(PlannedJob(key, None, config, pace.run_s(config.steps) if pace else 0.0))
    for run in plan.runs:
        warm_start = run.warm_start if run.warm_start in warm_starts else None
        seconds = paces.get(run.name.arm, first_pace).run_s(run.config.steps)
        jobs.append(PlannedJob(None, warm_start, run.config, seconds))
    device_s, wall_s = sum(job.seconds * _num_devices(job.config) for job in jobs), None
    if machine is not None:
        wall_s, num_held = simulate_launch(jobs, Slots(machine, num_jobs))
        device_s = max(device_s, wall_s * num_held)
    return Budget(
        wall_s=wall_s,
        device="GPU" if any(job.config.cluster.gpus_per_node for job in jobs) else "CPU core",
        device_s=device_s,
        num_runs=len(plan.runs),
        paces=paces,
        without_runs=tuple(arm for arm in configs if arm not in paces),
        not_counted=sum(not job.seconds for job in jobs),
    )


def estimate_pair_cost(plan: ExperimentPlan, runs_dir: Path) -> PairCost | None:
    """Return the device time of a pair, without idle devices and warm starts; None without an earlier run."""
    machine = None if plan.recipe.launcher else this_machine()
    configs: dict[str, RunConfig] = {run.name.arm: run.config for run in plan.runs}
    paces = find_paces(runs_dir, [*configs.values()], machine)
    known = [paces[key] for config in configs.values() if (key := config_key(config)) in paces]
    if not known:
        return None
    device_s = sum(
        paces.get(config_key(run.config), known[0]).run_s(run.config.steps) * _num_devices(run.config)
        for run in plan.runs
    )
    on_gpus = any(config.cluster.gpus_per_node for config in configs.values())
    return PairCost(device_s / len(plan.recipe.seeds), "GPU" if on_gpus else "CPU core")


def _num_devices(config: RunConfig) -> float:
    """Return the devices of a run; one that N runs share counts as 1/N."""
    return config.cluster.nodes * config.devices_per_node / config.cluster.runs_per_gpu


def simulate_launch(jobs: Sequence[PlannedJob], slots: Slots) -> tuple[float, int]:
    """Return the seconds until the last job ends, and how many devices the launch takes in all.

    Jobs start in order as devices come free, each after its warm start, as in abrun.launch.queue.
    """
    now, pending, running, ended = 0.0, [*jobs], list[tuple[float, int, PlannedJob, Devices]](), set[str]()
    gpus, num_cores = set[str](), 0
    while pending or running:
        for job in list(pending):
            if job.after is not None and job.after not in ended:
                continue
            if (devices := slots.find_devices(job.config)) is None:
                break
            slots.take(devices)
            pending.remove(job)
            heapq.heappush(running, (now + job.seconds, len(pending), job, devices))
        in_use = [device for *_, devices in running for device in devices]
        gpus |= {*in_use} - {"cpu"}
        num_cores = max(num_cores, in_use.count("cpu"))
        if not running:
            break  # the rest fits nowhere, and the preview says so
        now = running[0][0]
        while running and running[0][0] <= now:
            *_, job, devices = heapq.heappop(running)
            slots.release(devices)
            ended |= {job.warm_start} - {None}
    return now, len(gpus) or num_cores


# --- earlier runs ---


def config_key(config: RunConfig) -> ConfigKey:
    """Return what identifies runs of the same pace: the configuration apart from its number of steps."""
    return repr(
        sorted(
            (key, repr(value))
            for key, value in dotted(config.model_dump(mode="json")).items()
            if key != "steps" and (can_change_numbers(key) or key in TIMING_KEYS)
        )
    )


def find_paces(runs_dir: Path, configs: list[RunConfig], machine: Machine | None) -> dict[ConfigKey, Pace]:
    """Return the pace of each configuration of which the newest experiments have finished runs."""
    wanted, paces = {config_key(config) for config in configs}, dict[ConfigKey, Pace]()
    if not is_directory(runs_dir):
        return paces
    kinds = {True: gpu_names(), False: (cpu_name(),)} if machine else {}
    for folder, directories in _list_runs(runs_dir):
        measured: dict[ConfigKey, list[Pace]] = {}
        for run in map(RunDir, directories):
            with suppress(AbrunError, OSError), wrap_read_errors(run.path):  # a damaged run hides no other
                if not (run.finished and run.exists):
                    continue
                key = config_key(parse_stored_run(run.record().config))
                if key in wanted - paces.keys() and len(measured.get(key, ())) < MAX_RUNS:
                    measured.setdefault(key, []).extend(_measure_pace(run, folder, kinds))
        paces |= {key: _mean_pace(key_paces) for key, key_paces in measured.items() if key_paces}
        if wanted <= paces.keys():
            break
    return paces


def _list_runs(runs_dir: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield name and run directories of each experiment, the newest first, and then the warm starts."""
    ages: dict[Path, float] = {}
    for experiment_dir in list_experiments(runs_dir):
        with suppress(OSError):  # removed meanwhile
            ages[experiment_dir] = experiment_dir.stat().st_mtime
    experiments = sorted(ages, key=ages.__getitem__, reverse=True)
    for experiment_dir in experiments[:MAX_EXPERIMENTS]:
        with suppress(AbrunError):
            names = planned_runs(experiment_dir)
            yield experiment_dir.name, [run_dir(experiment_dir, name) for name in names]
    with suppress(OSError):
        yield WARM_STARTS, sorted((runs_dir / WARM_STARTS).iterdir())


def _measure_pace(run: RunDir, experiment: str, kinds: Mapping[bool, tuple[str, ...]]) -> list[Pace]:
    """Return the pace of a finished run, if a single start made it on the machine's kind of device."""
    from abrun.runs.usage import read_starts  # numpy

    config = run.record().config
    devices = list((run.environment() or {}).get("devices") or ())
    on_gpus = bool((config.get("cluster") or {}).get("gpus_per_node"))
    if kinds and devices and not set(devices) <= set(kinds[on_gpus]):
        return []
    times = run.metric_rows().step_times()
    starts = read_starts(run, config, 1, times)
    num_steps = int(times.counts.sum())
    if len(starts) != 1 or not num_steps:
        return []
    split = starts[0].seconds
    return [
        Pace(
            step_s=(split.unknown_s or split.steps_s) / num_steps,
            start_up_s=split.start_up_s,
            end_s=split.other_s,
            num_runs=1,
            experiment=experiment,
            device=devices[0] if devices else "an unnamed device",
        )
    ]


def _mean_pace(paces: list[Pace]) -> Pace:
    names = ("step_s", "start_up_s", "end_s")
    means = {name: sum(getattr(pace, name) for pace in paces) / len(paces) for name in names}
    return replace(paces[0], num_runs=len(paces), **means)


def budget_as_json(budget: Budget | Reason) -> dict[str, Any]:
    """Return the estimate as JSON; only the reason if there is none."""
    if isinstance(budget, Reason):
        return {"wall_s": None, "device_s": None, "reason_code": encode_reasons(budget)}
    return {**asdict(budget), "reason_code": encode_reasons(budget.reason)}
