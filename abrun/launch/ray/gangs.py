"""Runs as gangs: the arms of a pair in one placement group, on the same nodes; of each run an actor a node.

A node that is lost takes its placement group along: what has not finished begins again in a new one.
"""

import contextlib
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from abrun.experiment.plan import ExperimentPlan, group_pairs
from abrun.launch.cluster import agents_grace_s, network
from abrun.launch.engine import Place
from abrun.launch.queue import Job
from abrun.launch.ray.agent import NodeAgent
from abrun.messages import sentence
from abrun.processes import MODULE_OPTIONS
from abrun.reasons import Code, Reason
from abrun.recipe.launcher import Ray
from abrun.recipe.run import RunConfig
from abrun.runs.endings import write_ending
from abrun.runs.experiment import run_dir
from abrun.runs.rundir import RunDir

ASK_EVERY_S = 0.5
LOOK_EVERY_S = 2.0
LAST_WORDS_S = 3.0  # that the other nodes of a run have once one has failed
SILENT_S = 90.0  # Ray declares a node dead within that time
KILL_S = 5.0
TURN = "for its turn"
Resources = dict[str, float]
ray: Any = importlib.import_module("ray")


def resources_of(config: RunConfig, settings: Ray) -> Resources:
    """What a run takes of each of its nodes, in Ray's names."""
    gpus = config.devices_per_node if config.cluster.gpus_per_node else 0
    cpus = float(config.devices_per_node * settings.cpus_per_rank)
    return {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {}), **settings.resources}


def together(configs: Sequence[RunConfig], settings: Ray) -> Resources:
    """What runs side by side take of each of their nodes."""
    total: Counter[str] = Counter()
    for config in configs:
        total.update(resources_of(config, settings))  # pyright: ignore[reportArgumentType]
    return dict(total)


@dataclass(slots=True, kw_only=True, eq=False)
class Gang:
    """A placement group and the runs that it is for."""

    jobs: list[Job]
    group: Any
    broken: bool = False  # a node of it is gone


class GangEngine:
    """Runs of this cluster, those of a pair at a time; `tell` hears why runs wait, by name."""

    def __init__(
        self,
        settings: Ray,
        plan: ExperimentPlan,
        experiment_dir: Path,
        jobs: Sequence[Job],
        num_jobs: int | None,
        tell: Callable[[Mapping[str, str]], object],
    ) -> None:
        self._settings, self._num_jobs, self._tell = settings, num_jobs, tell
        self._jobs = {job.run.path: job for job in jobs}
        self._pairs = {
            run_dir(experiment_dir, run.name): [run_dir(experiment_dir, each.name) for each in pair]
            for pair in group_pairs(plan.runs)
            for run in pair
        }
        self._gangs: list[Gang] = []
        self._losses: Counter[Path] = Counter()
        self._told: Mapping[str, str] = {}
        self._looked_s = 0.0
        self._say()

    def refusals(self, plan: ExperimentPlan) -> list[Reason]:
        return []  # what nodes cannot do they say themselves

    def expecting(self, runs: Sequence[tuple[RunDir, RunConfig]]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def place(self, run: RunDir, config: RunConfig) -> Place | None:
        """Where a run could start; its gang is asked for where it has none."""
        for gang in list(self._gangs):
            at_work = any(job.started and not job.done for job in gang.jobs)
            if not at_work and (gang.broken or all(job.done for job in gang.jobs)):
                self._gangs.remove(gang)
                remove_placement_group(gang.group)
        gang = next((gang for gang in self._gangs if self._jobs[run.path] in gang.jobs), None)
        if gang is None:
            jobs = self._to_start(run)
            if self._num_jobs and sum(len(gang.jobs) for gang in self._gangs) + len(jobs) > self._num_jobs:
                self._say()
                return None
            self._gangs.append(gang := self._ask(jobs))
        if gang.broken:  # its other runs end yet
            return None
        if placement_group_table(gang.group)["state"] == "CREATED":
            self._say(gang, None)
            return ()  # of the driver's own machine no device
        self._wait(gang)
        return None

    def start(self, run: RunDir, config: RunConfig, place: Place) -> "GangRun":
        gang = next(gang for gang in self._gangs if self._jobs[run.path] in gang.jobs)
        needs = resources_of(config, self._settings)
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
        return GangRun(run, gang, actors, self._settings, self._count_loss)

    def _to_start(self, run: RunDir) -> list[Job]:
        """The runs of a pair that have not ended; one of them where a pair is more than may, or can, run."""
        pair = [self._jobs[path] for path in self._pairs.get(run.path, [run.path])]
        jobs = [job for job in pair if not (job.done or job.started)]
        nodes = {job.config.cluster.nodes for job in jobs}
        alone = [self._jobs[run.path]]
        if len(nodes) > 1 or (self._num_jobs and len(jobs) > self._num_jobs):
            return alone
        return jobs if self._fits(jobs) or not self._fits(alone) else alone

    def _ask(self, jobs: list[Job]) -> Gang:
        bundle = together([job.config for job in jobs], self._settings)
        group = placement_group([bundle] * jobs[0].config.cluster.nodes, strategy="STRICT_SPREAD")
        return Gang(jobs=jobs, group=group)

    def _fits(self, jobs: Sequence[Job]) -> bool:
        return len(self._large_enough(jobs)) >= jobs[0].config.cluster.nodes

    def _large_enough(self, jobs: Sequence[Job]) -> list[Any]:
        """The nodes that would have room for their share of these runs if nothing else ran."""
        needs = together([job.config for job in jobs], self._settings)
        alive = [node for node in ray.nodes() if node["Alive"]]
        return [
            node
            for node in alive
            if all(node["Resources"].get(name, 0.0) >= amount for name, amount in needs.items())
        ]

    def _wait(self, gang: Gang) -> None:
        """Say what a gang waits for; where its runs would fit one by one, let them."""
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        num_nodes = gang.jobs[0].config.cluster.nodes
        large_enough = len(self._large_enough(gang.jobs))
        if len(gang.jobs) > 1 and large_enough < num_nodes and self._fits(gang.jobs[:1]):
            gang.broken = True
            return
        needs = together([job.config for job in gang.jobs], self._settings)
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        has = f"{large_enough} of that size, and not free" if large_enough else "none of that size"
        why = f"for {num_nodes} node{'s' if num_nodes > 1 else ''} with {amounts} each; the cluster has {has}"
        self._say(gang, why)

    def _say(self, gang: Gang | None = None, why: str | None = None) -> None:
        """Tell what waits: a gang, or with no `why` that it does not; all others for their turn."""
        named = gang.jobs if gang else []
        to_start = [job for job in self._jobs.values() if not (job.started or job.done)]
        reasons = {job.label: why if job in named else TURN for job in to_start}
        waiting = {label: reason for label, reason in reasons.items() if reason}
        if waiting != self._told:
            self._told = waiting
            self._tell(waiting)

    def _count_loss(self, run: RunDir) -> bool:
        """Note that a run has lost a node; whether it may begin again."""
        self._losses[run.path] += 1
        return self._losses[run.path] <= self._settings.restarts


@dataclass(slots=True, eq=False)
class Node:
    """One actor, asked one thing at a time."""

    actor: Any
    index: int
    answer: Any = None
    place: tuple[str, str, int] | None = None
    started: bool = False
    status: int | None = None
    lost: str | None = None  # why, where the actor is gone
    num_told: int = 0
    next_s: float = 0.0

    @property
    def over(self) -> bool:
        return self.status is not None or self.lost is not None

    @property
    def name(self) -> str:
        return f"node {self.index}" + (f" ({self.place[0]}, {self.place[1]})" if self.place else "")


@dataclass(slots=True, eq=False)
class GangRun:
    """A run as its actors see it."""

    run: RunDir
    gang: Gang
    actors: Sequence[Any]
    settings: Ray
    count_loss: Callable[[RunDir], bool]
    nodes: list[Node] = field(init=False)
    last_attempt: int = field(init=False)  # before this start
    failed_s: float | None = None  # since when one of the nodes has
    status: int | None = None
    lost: bool = False

    def __post_init__(self) -> None:
        self.last_attempt = self.run.last_attempt
        self.nodes = [Node(actor, index) for index, actor in enumerate(self.actors)]

    @property
    def pid(self) -> None:
        return None

    def poll(self) -> int | None:
        if self.status is not None:
            return self.status
        for node in self.nodes:
            if not node.over:
                self._look(node)
        if not any(node.started for node in self.nodes) and all(node.place for node in self.nodes):
            self._start()
        now = time.monotonic()
        if self.failed_s is None and any(node.lost or node.status for node in self.nodes):
            self.failed_s = now
        if self.failed_s is not None and now - self.failed_s > LAST_WORDS_S:
            self._end_others(silent=now - self.failed_s > SILENT_S)
        if all(node.over for node in self.nodes):
            self._conclude()
        return self.status

    def stop(self, *, kill: bool) -> None:
        if self.status is not None:
            return
        answers = [node.actor.stop.remote(kill) for node in self.nodes if not node.over]
        if kill or not any(node.started for node in self.nodes):
            with contextlib.suppress(RayError):
                ray.wait(answers, num_returns=len(answers), timeout=KILL_S)
            for node in self.nodes:
                node.status = -9 if node.status is None else node.status
            self._conclude()

    def _look(self, node: Node) -> None:
        """Take an actor's answer, where it is there, and ask the next thing."""
        now = time.monotonic()
        if node.answer is None:
            if now < node.next_s:
                return
            node.next_s = now + ASK_EVERY_S
            if node.place is None:
                node.answer = node.actor.where.remote()
            elif node.started:
                node.answer = node.actor.poll.remote(node.num_told)
        if node.answer is None or not ray.wait([node.answer], timeout=0)[0]:
            return
        answer, node.answer = node.answer, None
        try:
            said = ray.get(answer)
        except ActorUnavailableError:  # for now: Ray says so when it is for good
            return
        except RayActorError as error:
            node.lost = " ".join(str(error).split())[:300]
            return
        except RayError as error:  # it could not start the agent
            cause = " ".join(str(getattr(error, "cause", None) or error).split())
            self._note(node, Code.NODE_CANNOT_RUN(host=node.name, problem=cause[-300:]))
            node.status = 2
            return
        if node.place is None:
            node.place = said
        elif said is not None:
            status, printed = said
            node.num_told += len(printed)
            self._print(printed)
            node.status = status if not printed else None  # its last words first

    def _start(self) -> None:
        first = self.nodes[0].place
        assert first is not None
        python = self.settings.python or sys.executable
        env, grace_s = network(self.settings.interface), agents_grace_s(self.settings.save_s)
        where = [str(self.run.path), f"{first[1]}:{first[2]}", str(grace_s), os.uname().nodename]
        for node in self.nodes:
            argv = [python, *MODULE_OPTIONS, "abrun.launch.node", *where, str(node.index)]
            node.answer = node.actor.start.remote(argv, env, os.getcwd())
            node.started = True

    def _end_others(self, *, silent: bool) -> None:
        for node in self.nodes:
            if not node.over and not node.started:
                node.status = -9
            elif not node.over:
                node.actor.stop.remote(True)
                if silent:
                    node.lost = f"no answer for {SILENT_S:.0f} s"

    def _conclude(self) -> None:
        for node in self.nodes:
            if node.lost:
                self._note(node, Code.NODE_LOST(node=node.name, error=node.lost))
            with contextlib.suppress(RayError):
                ray.kill(node.actor)
        if any(node.lost for node in self.nodes):
            self.gang.broken = True
            self.lost = self.count_loss(self.run)
        self.status = next((node.status for node in self.nodes if node.status), int(self.gang.broken))

    def _note(self, node: Node, reason: Reason) -> None:
        """Say why a node is of no use to the run, in its log and for its end."""
        self._print(f"error: {sentence(reason)}\n".encode())
        write_ending(self.run, f"lost-{node.index:04d}", self.last_attempt, reason)

    def _print(self, content: bytes) -> None:
        if content:
            with contextlib.suppress(StoreError, OSError), self.run.open_log() as log:
                os.write(log, content)
