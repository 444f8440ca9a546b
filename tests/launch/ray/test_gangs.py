"""Gangs over a fake of Ray: who shares nodes, who waits, and what becomes of a run that loses a node."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from abrun.experiment.plan import make_plan
from abrun.launch.prepare import own_experiment
from abrun.launch.queue import LaunchJob, LaunchQueue
from abrun.recipe.experiment import load_recipe
from abrun.recipe.launcher import Ray
from tests.launch.test_local import SMALL


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class Actor:
    """Its answers by method: a value, or an error to be raised; each is there at once."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.answers: dict[str, Any] = {
            "get_address": (f"n{number}", f"10.0.0.{number}", 4000),
            "start": None,
            "poll": (None, b""),
        }
        self.cluster, self.asked = cluster, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            def remote(*values: Any) -> Any:
                self.asked.append((name, *values))
                answer = self.answers.get(name)
                if name == "poll" and isinstance(answer, tuple):  # what was printed is told once
                    self.answers["poll"] = (answer[0], b"")
                return answer

        return Method


class Cluster(ModuleType):
    """The module ray: nodes, placement groups and actors."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.alive: list[dict[str, float]] = []
        self.groups: list[list[dict[str, float]]] = []
        self.created: list[Any] = []
        self.removed: list[Any] = []
        self.actors: list[Actor] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": resources} for resources in self.alive]

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> int:
        assert strategy == "STRICT_SPREAD"
        self.groups.append(bundles)
        return len(self.groups) - 1

    def placement_group_table(self, group: int) -> dict[str, str]:
        return {"state": "CREATED" if group in self.created else "PENDING"}

    def remove_placement_group(self, group: int) -> None:
        self.removed.append(group)

    def remote(self, kind: type) -> "Cluster":
        return self

    def options(self, **options: Any) -> Any:
        return type("Made", (), {"remote": self._actor})

    def _actor(self) -> Actor:
        self.actors.append(Actor(self, 1 + len(self.actors) % 2))
        return self.actors[-1]

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs, []

    def get(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Actor) -> None:
        actor.asked.append(("killed",))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = Cluster()
    fake.alive = [{"CPU": 2.0}] * 2
    exceptions, util, strategies = (ModuleType(name) for name in ("e", "u", "s"))
    for kind in (RayError, RayActorError, ActorUnavailableError):
        setattr(exceptions, kind.__name__, kind)
    for name in ("placement_group", "placement_group_table", "remove_placement_group"):
        setattr(util, name, getattr(fake, name))
    strategies.PlacementGroupSchedulingStrategy = lambda group, **_: group  # pyright: ignore
    names = ("ray", "ray.exceptions", "ray.util", "ray.util.scheduling_strategies")
    for name, module in zip(names, (fake, exceptions, util, strategies), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "abrun.launch.ray.gangs", raising=False)
    fake.gangs = importlib.import_module("abrun.launch.ray.gangs")  # pyright: ignore
    monkeypatch.setattr(fake.gangs, "CAPACITY_CHECK_S", -1)
    monkeypatch.setattr(fake.gangs, "POLL_INTERVAL_S", -1)
    yield fake
    sys.modules.pop("abrun.launch.ray.gangs", None)


class Launch:
    """An engine, the jobs of its experiment, and what it told of those that wait."""

    def __init__(self, cluster: Any, runs_dir: Path, *changes: str, num_jobs: int | None = None) -> None:
        plan = make_plan(load_recipe(SMALL, ["cluster.nodes=2", *changes]))
        with own_experiment(plan, runs_dir / "small", resume=False):
            self.jobs = LaunchQueue(plan, runs_dir / "small").jobs
        self.told: Mapping[str, str] = {}
        settings = Ray(type="ray", restarts=1)
        arguments = settings, plan, runs_dir / "small", self.jobs, num_jobs, self._tell
        self.engine = cluster.gangs.GangEngine(*arguments)

    def _tell(self, waiting: Mapping[str, str]) -> None:
        self.told = waiting

    def find_devices(self, index: int) -> Any:
        return self.engine.find_devices(self.jobs[index].run, self.jobs[index].config)

    def start(self, index: int) -> Any:
        job: LaunchJob = self.jobs[index]
        job.started = self.engine.start(job.run, job.config, ())
        return job.started

    def end(self, index: int) -> None:
        self.jobs[index].status = "finished"


def test_a_pair_shares_nodes_and_the_next_waits_its_turn(cluster: Any, tmp_path: Path) -> None:
    launch = Launch(cluster, tmp_path)
    assert launch.find_devices(0) is None and cluster.groups == [[{"CPU": 2.0}] * 2]
    why = "for 2 nodes with 2 CPU each; the cluster has 2 of that size, and not free"
    turn = "for its turn"
    assert [*launch.told.values()] == [why, why, turn, turn]
    cluster.created.append(0)
    assert launch.find_devices(0) == () and [*launch.told] == ["baseline/seed-1", "treatment/seed-1"]
    launch.start(0)
    assert launch.find_devices(1) == ()
    launch.start(1)
    assert launch.find_devices(2) is None and len(cluster.groups) == 2 and cluster.removed == []
    launch.end(0)
    launch.end(1)
    assert launch.find_devices(2) is None and cluster.removed == [0]


def test_runs_that_share_a_gpu_ask_for_its_fractions(cluster: Any, tmp_path: Path) -> None:
    cluster.alive = [{"CPU": 8.0, "GPU": 1.0}]
    one_node = "cluster={nodes: 1, gpus_per_node: 1, runs_per_gpu: 3}"
    launch = Launch(cluster, tmp_path, one_node)
    assert launch.find_devices(0) is None and cluster.groups == [[{"CPU": 2.0, "GPU": 0.6666}]]
    more_arms = Launch(cluster, tmp_path / "other", one_node.replace("3", "1"), "arms.third={steps: 4}")
    assert more_arms.find_devices(0) is None  # three whole GPUs, which no node has: one by one
    assert cluster.groups[1] == [{"CPU": 1.0, "GPU": 1.0}]
    thirds = Launch(cluster, tmp_path / "two", one_node.replace("3", "2"), "arms.third={steps: 4}")
    assert thirds.find_devices(0) is None  # Ray gives no 1.5 GPUs
    assert cluster.groups[2] == [{"CPU": 1.0, "GPU": 0.5}]


def test_a_pair_that_no_nodes_hold_is_two_gangs(cluster: Any, tmp_path: Path) -> None:
    cluster.alive = [{"CPU": 1.0}] * 2
    launch = Launch(cluster, tmp_path)
    assert launch.find_devices(0) is None and cluster.groups == [[{"CPU": 1.0}] * 2]
    cluster.created.append(0)
    assert launch.find_devices(0) == ()
    launch.start(0)
    assert launch.find_devices(1) is None and cluster.groups[1] == [{"CPU": 1.0}] * 2


def test_so_is_one_that_is_asked_for_before_there_are_nodes(cluster: Any, tmp_path: Path) -> None:
    cluster.alive = []
    launch = Launch(cluster, tmp_path)
    assert launch.find_devices(0) is None and cluster.groups == [[{"CPU": 2.0}] * 2]
    assert launch.told["baseline/seed-0"].endswith("of that size")
    cluster.alive = [{"CPU": 1.0}] * 2
    launch.find_devices(0)
    assert (
        launch.find_devices(0) is None
        and cluster.removed == [0]
        and cluster.groups[1:] == [[{"CPU": 1.0}] * 2]
    )


def test_no_more_runs_at_once_than_are_asked_for(cluster: Any, tmp_path: Path) -> None:
    launch = Launch(cluster, tmp_path, num_jobs=1)
    assert launch.find_devices(0) is None and cluster.groups == [[{"CPU": 1.0}] * 2]
    cluster.created.append(0)
    assert launch.find_devices(0) == ()
    launch.start(0)
    assert launch.find_devices(1) is None and len(cluster.groups) == 1
    launch.end(0)
    assert launch.find_devices(1) is None and len(cluster.groups) == 2


def test_nodes_meet_at_the_first_and_what_they_print_is_in_the_log(cluster: Any, tmp_path: Path) -> None:
    launch = Launch(cluster, tmp_path)
    started = _started(cluster, launch)
    first, second = cluster.actors
    for number, actor in enumerate((first, second)):
        (asked,) = [asked for asked in actor.asked if asked[0] == "start"]
        run_dir = str(launch.jobs[0].run.path)
        assert asked[1][1:6] == ["-P", "-m", "abrun.launch.node", run_dir, "10.0.0.1:4000"]
        assert asked[1][-1] == str(number)
    second.answers["poll"] = (2, b"error: rank 1 of 2 (on n2): killed by SIGKILL\n")
    first.answers["poll"] = (1, b"")
    assert started.poll() is None  # its last words, of which there may be more, then its status
    assert "rank 1 of 2 (on n2): killed by SIGKILL" in launch.jobs[0].run.read_log()
    assert started.poll() == 1 and started.is_lost is False
    assert ("killed",) in first.asked and ("killed",) in second.asked


def _started(cluster: Any, launch: Launch) -> Any:
    """The first run, past its start."""
    launch.find_devices(0)
    started = launch.start(0)
    while not all(node.started for node in started.nodes):
        assert started.poll() is None
    assert started.poll() is None
    return started


def test_others_that_outlive_a_failed_node_are_ended(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _started(cluster, Launch(cluster, tmp_path))
    first, second = cluster.actors
    second.answers["poll"] = (2, b"")
    assert started.poll() is None and ("stop", True) not in first.asked
    monkeypatch.setattr(cluster.gangs, "FAILURE_GRACE_S", -1)
    started.poll()
    assert ("stop", True) in first.asked
    first.answers["poll"] = (-9, b"")
    assert started.poll() is not None


def test_a_lost_node_is_a_new_gang_as_often_as_may_be(cluster: Any, tmp_path: Path) -> None:
    launch = Launch(cluster, tmp_path)
    started = _started(cluster, launch)
    other = launch.start(1)
    cluster.actors[1].answers["poll"] = RayActorError("Actor died:\nnode gone")
    cluster.actors[0].answers["poll"] = (1, b"")
    while started.poll() is None:
        pass
    assert started.is_lost is True
    said = launch.jobs[0].run.read_log()
    assert "error: node 1 (n2, 10.0.0.2) is lost: Actor died: node gone\n" in said
    launch.jobs[0].restart(is_retry=False)
    assert launch.find_devices(0) is None and len(cluster.groups) == 1  # the other arm has not ended
    for actor in cluster.actors[2:]:
        actor.answers["get_address"] = RayActorError("gone")
    while other.poll() is None:
        pass
    launch.jobs[1].restart(is_retry=False)
    assert launch.find_devices(0) is None and len(cluster.groups) == 2 and cluster.removed == [0]
    cluster.created.append(1)
    assert launch.find_devices(0) == ()
    cluster.actors.clear()
    again = launch.start(0)
    for actor in cluster.actors:
        actor.answers["get_address"] = RayActorError("gone")
    while again.poll() is None:
        pass
    assert again.is_lost is False  # launcher.restarts: 1


def test_an_actor_that_is_away_for_a_while_is_asked_again(cluster: Any, tmp_path: Path) -> None:
    started = _started(cluster, Launch(cluster, tmp_path))
    for actor in cluster.actors:
        actor.answers["poll"] = ActorUnavailableError("for now")
    assert started.poll() is None and started.poll() is None
    for actor in cluster.actors:
        actor.answers["poll"] = (0, b"")
    while started.poll() is None:
        pass
    assert started.poll() == 0 and started.is_lost is False


def test_stopping_asks_and_killing_ends(cluster: Any, tmp_path: Path) -> None:
    started = _started(cluster, Launch(cluster, tmp_path))
    started.stop(kill=False)
    assert started.poll() is None and all(("stop", False) in actor.asked for actor in cluster.actors)
    started.stop(kill=True)
    assert started.poll() == -9 and all(("killed",) in actor.asked for actor in cluster.actors)
