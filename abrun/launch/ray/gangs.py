"""Runs as gangs: the arms of a pair in one placement group on the same nodes, with an actor per node and run.

When a node is lost, its placement group is lost too, and unfinished runs restart in a new one.
"""

import contextlib
import importlib
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    ActorUnavailableError,
    RayActorError,
    RayError,
)
from ray.util import placement_group, placement_group_table, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from abrun.errors import StoreError
from abrun.experiment.command import NODE_LIST
from abrun.experiment.plan import ExperimentPlan, group_pairs
from abrun.launch.cluster import agent_grace_s, network_variables
from abrun.launch.engine import Devices, Engine, StartedRun
from abrun.launch.queue import LaunchJob
from abrun.launch.ray.agent import NodeAgent
from abrun.messages import sentence
from abrun.messages.codes import Code, Reason, in_words
from abrun.messages.numbers import count_text
from abrun.processes import MODULE_OPTIONS
from abrun.recipe.launcher import Ray
from abrun.recipe.run import RunConfig
from abrun.runs.experiment import run_dir
from abrun.runs.files import open_log
from abrun.runs.launches import write_ending
from abrun.runs.rundir import RunDir

POLL_INTERVAL_S = 0.5
CAPACITY_CHECK_S = 2.0
# Time for the other nodes of a run to report after one has failed.
FAILURE_GRACE_S = 3.0
# Ray declares a node dead within this time.
NODE_TIMEOUT_S = 90.0
KILL_TIMEOUT_S = 5.0
WAITS_FOR_TURN = "for its turn"
Resources = dict[str, float]
ray: Any = importlib.import_module("ray")


def resources_per_node(config: RunConfig, settings: Ray) -> Resources:
    """Return what a run needs on each of its nodes, by Ray's resource names."""
    gpus = config.devices_per_node if config.cluster.gpus_per_node else 0
    if config.cluster.runs_per_gpu > 1:  # of one GPU each; Ray counts in units of 0.0001
        gpus = math.floor(10_000 / config.cluster.runs_per_gpu) / 10_000
    cpus = float(config.devices_per_node * settings.cpus_per_rank)
    return {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {}), **settings.resources}


def combine_resources(configs: Sequence[RunConfig], settings: Ray) -> Resources:
    """Return what these runs together need on each of their nodes."""
    total: Counter[str] = Counter()
    for config in configs:
        total.update(resources_per_node(config, settings))  # pyright: ignore[reportArgumentType]
    return dict(total)


@dataclass(slots=True, kw_only=True, eq=False)
class Gang:
    """A placement group and the runs that share it."""

    jobs: list[LaunchJob]
    group: Any
    is_broken: bool = False  # a node is lost


class GangEngine(Engine):
    """Starts runs on this cluster, pair by pair; calls `report` with the reasons why runs wait, by name."""

    def __init__(
        self,
        settings: Ray,
        plan: ExperimentPlan,
        experiment_dir: Path,
        jobs: Sequence[LaunchJob],
        num_jobs: int | None,
        report: Callable[[Mapping[str, str]], object],
    ) -> None:
        self._settings, self._num_jobs, self._report = settings, num_jobs, report
        self._jobs = {job.run.path: job for job in jobs}
        pairs = ([run_dir(experiment_dir, run.name) for run in pair] for pair in group_pairs(plan.runs))
        self._pairs = {path: pair for pair in pairs for path in pair}
        self._gangs: list[Gang] = []
        self._losses: Counter[Path] = Counter()
        self._last_reported: Mapping[str, str] = {}
        self._capacity_checked_s = 0.0
        self._report_waiting()

    def find_devices(self, run: RunDir, config: RunConfig) -> Devices | None:
        """Return () if a run could start now; requests its gang if it has none."""
        for gang in list(self._gangs):
            is_active = any(job.started and not job.is_done for job in gang.jobs)
            if not is_active and (gang.is_broken or all(job.is_done for job in gang.jobs)):
                self._gangs.remove(gang)
                remove_placement_group(gang.group)
        gang = next((gang for gang in self._gangs if self._jobs[run.path] in gang.jobs), None)
        if gang is None:
            jobs = self._jobs_to_start(run)
            if self._num_jobs and sum(len(gang.jobs) for gang in self._gangs) + len(jobs) > self._num_jobs:
                self._report_waiting()
                return None
            bundle = combine_resources([job.config for job in jobs], self._settings)
            group = placement_group([bundle] * jobs[0].config.cluster.nodes, strategy="STRICT_SPREAD")
            self._gangs.append(gang := Gang(jobs=jobs, group=group))
        if gang.is_broken:  # its other runs are still ending
            return None
        if placement_group_table(gang.group)["state"] == "CREATED":
            self._report_waiting(gang, None)
            return ()  # no devices of the driver's own machine
        self._check_capacity(gang)
        return None

    def start(self, run: RunDir, config: RunConfig, devices: Devices) -> StartedRun:
        gang = next(gang for gang in self._gangs if self._jobs[run.path] in gang.jobs)
        needs = resources_per_node(config, self._settings)
        remote = ray.remote(NodeAgent)
        actors = [
            remote.options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    gang.group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(config.cluster.nodes)
        ]
        return GangRun(run, gang, actors, self._settings, self._losses)

    def _jobs_to_start(self, run: RunDir) -> list[LaunchJob]:
        """Return the unstarted jobs of a pair, or just one if the pair exceeds the limit or the cluster."""
        pair = [self._jobs[path] for path in self._pairs.get(run.path, [run.path])]
        jobs = [job for job in pair if not (job.is_done or job.started)]
        nodes = {job.config.cluster.nodes for job in jobs}
        single_job = [self._jobs[run.path]]
        runs_per_gpu = self._jobs[run.path].config.cluster.runs_per_gpu
        is_too_large = 1 < runs_per_gpu < len(jobs)  # Ray divides GPUs, but gives no 1.5 of them
        if len(nodes) > 1 or is_too_large or (self._num_jobs and len(jobs) > self._num_jobs):
            return single_job
        return jobs if self._can_fit(jobs) or not self._can_fit(single_job) else single_job

    def _can_fit(self, jobs: Sequence[LaunchJob]) -> bool:
        return self._count_large_enough(jobs) >= jobs[0].config.cluster.nodes

    def _count_large_enough(self, jobs: Sequence[LaunchJob]) -> int:
        """Return the number of nodes that could hold their share of these runs if nothing else ran."""
        needs = combine_resources([job.config for job in jobs], self._settings)
        resources = (node["Resources"] for node in ray.nodes() if node["Alive"])
        return sum(all(has.get(name, 0.0) >= need for name, need in needs.items()) for has in resources)

    def _check_capacity(self, gang: Gang) -> None:
        """Report what a gang waits for, or break it up if its runs would fit only one by one."""
        if time.monotonic() - self._capacity_checked_s < CAPACITY_CHECK_S:
            return
        self._capacity_checked_s = time.monotonic()
        num_nodes = gang.jobs[0].config.cluster.nodes
        large_enough = self._count_large_enough(gang.jobs)
        if len(gang.jobs) > 1 and large_enough < num_nodes and self._can_fit(gang.jobs[:1]):
            gang.is_broken = True
            return
        needs = combine_resources([job.config for job in gang.jobs], self._settings)
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        availability = f"{large_enough} of that size, and not free" if large_enough else "none of that size"
        nodes = count_text(num_nodes, "node")
        self._report_waiting(gang, f"for {nodes} with {amounts} each; the cluster has {availability}")

    def _report_waiting(self, gang: Gang | None = None, reason_text: str | None = None) -> None:
        """Report why runs wait: those of `gang` for `reason_text` (None: none do), others for their turn."""
        gang_jobs, waiting = gang.jobs if gang else [], dict[str, str]()
        for job in self._jobs.values():
            reason = reason_text if job in gang_jobs else WAITS_FOR_TURN
            if reason and not (job.started or job.is_done):
                waiting[job.label] = reason
        if waiting != self._last_reported:
            self._last_reported = waiting
            self._report(waiting)


@dataclass(slots=True, eq=False)
class NodeActor:
    """One actor, with at most one pending call."""

    actor: Any
    index: int
    answer: Any = None
    address: tuple[str, str, int] | None = None
    started: bool = False
    status: int | None = None
    lost: str | None = None  # why the actor is lost
    num_bytes_read: int = 0
    next_poll_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.status is not None or self.lost is not None

    @property
    def name(self) -> str:
        return f"node {self.index}" + (f" ({self.address[0]}, {self.address[1]})" if self.address else "")


@dataclass(slots=True, eq=False)
class GangRun:
    """A run as reported by its actors."""

    run: RunDir
    gang: Gang
    actors: Sequence[Any]
    settings: Ray
    losses: Counter[Path]  # number of starts of each run that lost a node
    nodes: list[NodeActor] = field(init=False)
    last_attempt: int = field(init=False)  # number before this start
    failed_s: float | None = None  # time of the first failure of a node
    status: int | None = None
    is_lost: bool = False

    def __post_init__(self) -> None:
        self.last_attempt = self.run.last_attempt
        self.nodes = [NodeActor(actor, index) for index, actor in enumerate(self.actors)]

    @property
    def pid(self) -> None:
        return None

    def poll(self) -> int | None:
        if self.status is not None:
            return self.status
        for node in self.nodes:
            if not node.is_over:
                self._poll_node(node)
        if not any(node.started for node in self.nodes) and all(node.address for node in self.nodes):
            self._start_agents()
        now = time.monotonic()
        if self.failed_s is None and any(node.lost or node.status for node in self.nodes):
            self.failed_s = now
        if self.failed_s is not None and now - self.failed_s > FAILURE_GRACE_S:
            for node in self.nodes:
                if not node.is_over and not node.started:
                    node.status = -9
                elif not node.is_over:
                    node.actor.stop.remote(True)
                    if now - self.failed_s > NODE_TIMEOUT_S:
                        node.lost = f"no answer for {NODE_TIMEOUT_S:.0f} s"
        if all(node.is_over for node in self.nodes):
            self._record_end()
        return self.status

    def stop(self, *, kill: bool) -> None:
        if self.status is not None:
            return
        answers = [node.actor.stop.remote(kill) for node in self.nodes if not node.is_over]
        if kill or not any(node.started for node in self.nodes):
            with contextlib.suppress(RayError):
                ray.wait(answers, num_returns=len(answers), timeout=KILL_TIMEOUT_S)
            for node in self.nodes:
                node.status = -9 if node.status is None else node.status
            self._record_end()

    def _poll_node(self, node: NodeActor) -> None:
        """Take an actor's answer if there is one, and make the next call."""
        now = time.monotonic()
        if node.answer is None:
            if now < node.next_poll_s:
                return
            node.next_poll_s = now + POLL_INTERVAL_S
            if node.address is None:
                node.answer = node.actor.get_address.remote()
            elif node.started:
                node.answer = node.actor.poll.remote(node.num_bytes_read)
        if node.answer is None or not ray.wait([node.answer], timeout=0)[0]:
            return
        answer, node.answer = node.answer, None
        try:
            result = ray.get(answer)
        except ActorUnavailableError:  # temporary: Ray raises another error for a dead actor
            return
        except RayActorError as error:
            node.lost = " ".join(str(error).split())[:300]
            return
        except RayError as error:  # the agent could not be started
            cause = " ".join(str(getattr(error, "cause", None) or error).split())
            self._note(node, in_words(f"{node.name}: {cause[-300:]}"))
            node.status = 2
            return
        if node.address is None:
            node.address = result
        elif result is not None:
            status, printed = result
            node.num_bytes_read += len(printed)
            self._print(printed)
            node.status = status if not printed else None  # read all output first

    def _start_agents(self) -> None:
        addresses = [node.address for node in self.nodes if node.address]
        _, head, port = addresses[0]
        python = self.settings.python or sys.executable
        env, grace_s = network_variables(self.settings.interface), agent_grace_s(self.settings.save_s)
        env[NODE_LIST] = ",".join(address for _, address, _ in addresses)
        arguments = [str(self.run.path), f"{head}:{port}", str(grace_s), os.uname().nodename]
        for node in self.nodes:
            argv = [python, *MODULE_OPTIONS, "abrun.launch.node", *arguments, str(node.index)]
            node.answer = node.actor.start.remote(argv, env, os.getcwd())
            node.started = True

    def _record_end(self) -> None:
        for node in self.nodes:
            if node.lost:
                self._note(node, Code.NODE_LOST(node=node.name, error=node.lost))
            with contextlib.suppress(RayError):
                ray.kill(node.actor)
        if any(node.lost for node in self.nodes):
            self.gang.is_broken = True
            self.losses[self.run.path] += 1
            self.is_lost = self.losses[self.run.path] <= self.settings.restarts
        self.status = next((node.status for node in self.nodes if node.status), int(self.gang.is_broken))

    def _note(self, node: NodeActor, reason: Reason) -> None:
        """Write why a node is lost to the run into its log and its endings."""
        self._print(f"error: {sentence(reason)}\n".encode())
        write_ending(self.run, f"lost-{node.index:04d}", self.last_attempt, reason)

    def _print(self, content: bytes) -> None:
        if content:
            with contextlib.suppress(StoreError, OSError), open_log(self.run.log) as log:
                log.write(content)
