"""Cells on several GPUs: each alone on its own, the next ones' processes started, and one end for all."""

import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import LaunchError
from abrun.experiment.command import environment
from abrun.experiment.probe import TURN, WAITS, await_turn
from abrun.experiment.probe import _run as run_probe
from abrun.memory.devices import AHEAD, Devices
from abrun.processes import processes_of
from abrun.recipe.experiment import load_recipe
from abrun.recipe.run import OwnRunConfig
from tests.snapshot import Snapshot

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
MEASURING_S = 0.05


def config(num_gpus: int) -> OwnRunConfig:
    found = load_recipe(RECIPE, [f"cluster.gpus_per_node={num_gpus}"]).run_config("baseline")
    assert isinstance(found, OwnRunConfig)
    return found


class Watched:
    """Cells that only note where they are, and who is beside them."""

    def __init__(self, devices: Devices) -> None:
        self._devices, self._lock = devices, threading.Lock()
        self.using, self.started, self.most_started = Counter[str](), 0, 0
        self.places: list[tuple[str, ...]] = []
        self.most_at_once = 0

    def cell(self, config: OwnRunConfig) -> None:
        with self._devices.place(config) as place:
            assert place is not None
            with self._lock:
                self.started += 1
                self.most_started = max(self.most_started, self.started)
            with place.turn:
                with self._lock:
                    self.places.append(tuple(place.gpus))
                    self.using.update(place.gpus)
                    assert max(self.using.values()) == 1  # a GPU that somebody else uses
                    self.most_at_once = max(self.most_at_once, sum(self.using.values()))
                time.sleep(MEASURING_S)
                with self._lock:
                    self.using.subtract(place.gpus)
                    self.started -= 1


def test_cells_have_gpus_of_their_own_side_by_side_while_the_next_ones_start() -> None:
    one, two = config(1), config(2)
    devices = Devices(("0", "1", "2"))
    watched = Watched(devices)
    cells = [one] * 9 + [two] * 3 + [one] * 3
    devices.each(cells, [partial(watched.cell, each) for each in cells])
    assert len(watched.places) == 15 and watched.most_at_once == 3
    assert 3 < watched.most_started <= 3 * (1 + AHEAD)
    of_one = Counter(place for place in watched.places if len(place) == 1)
    assert all(of_one[gpu,] >= 2 for gpu in ("0", "1", "2")), of_one
    assert Counter(watched.places)["0", "1"] == 3  # pairs begin at an even GPU


def test_a_gpu_whose_cells_have_ended_is_nobodys() -> None:
    devices, one = Devices(("0", "1")), config(1)
    with devices.place(one) as slow:
        assert slow and list(slow.gpus) == ["0"]
        for _ in range(3):
            with devices.place(one) as place:
                assert place and list(place.gpus) == ["1"]


def test_cells_on_cpu_cores_come_one_after_the_other() -> None:
    devices, here = Devices(()), threading.get_ident()
    seen: list[Any] = []

    def cell() -> None:
        with devices.place(config(0)) as place:
            seen.append((place, threading.get_ident()))

    devices.each([config(0)], [cell, cell])
    assert seen == [(None, here)] * 2


def test_processes_start_wait_for_their_turn_and_end_where_another_fails(
    tmp_path: Path, snapshot: Snapshot
) -> None:
    devices, configs = Devices(("0",)), [config(1)] * 3
    for name in ("long", "fails", "ahead"):
        (tmp_path / name).mkdir()
    started: list[str] = []

    def process(name: str, script: str) -> None:
        directory = tmp_path / name
        with devices.place(configs[0]) as place:
            assert place is not None
            started.append(name)
            env = environment(directory, [], configs[0])
            run_probe(["sh", "-c", f"echo there > {directory}/there; {script}"], directory, env, place)

    def fails() -> None:
        until((tmp_path / "long" / TURN).exists)
        until((tmp_path / "ahead" / "there").exists)  # it has started, and has not had its turn
        assert not (tmp_path / "ahead" / TURN).exists()
        raise LaunchError("the first failure")

    jobs = [partial(process, "long", "sleep 3600"), fails, lambda: later()]

    def later() -> None:
        until((tmp_path / "long" / TURN).exists)
        process("ahead", "sleep 3600")

    with pytest.raises(LaunchError) as refusal:
        devices.each(configs, jobs)
    snapshot(refusal.value)
    assert started == ["long", "ahead"]
    assert not processes_of(tmp_path / "long") and not processes_of(tmp_path / "ahead")


@pytest.mark.parametrize(
    ("error", "why"),
    [(LaunchError("no"), "another could not"), (KeyboardInterrupt(), "somebody interrupted")],
)
def test_cells_that_are_ended_know_why(error: BaseException, why: str) -> None:
    devices, said, begun = Devices(("0",)), list[str | None](), threading.Event()

    def watches() -> None:
        with devices.place(config(1)) as place:
            assert place is not None and place.stopped() is None
            begun.set()
            until(place.stopped)
            said.append(place.stopped())

    def ends() -> None:
        until(begun.is_set)
        raise error

    with pytest.raises(type(error)):
        devices.each([config(1)], [watches, ends])
    (reason,) = said
    assert reason and reason.startswith(why)


def until(there: Any) -> None:
    deadline = time.monotonic() + 20
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there()


def test_a_rank_waits_for_its_turn_where_its_job_says_so(tmp_path: Path) -> None:
    job: dict[str, Any] = {"length": 3}
    await_turn(tmp_path, job)  # at once
    waiting: dict[str, Any] = {"length": 3, WAITS: True}
    rank = threading.Thread(target=await_turn, args=(tmp_path, waiting))
    rank.start()
    rank.join(0.2)
    assert rank.is_alive()
    (tmp_path / TURN).touch()
    rank.join(5)
    assert not rank.is_alive() and waiting == job
