"""The engine samples from the newest weights, and they are sent to it only where they have moved."""

from typing import Any

import torch

from abrun.trainer.loop.phases import Phases
from abrun.trainer.loop.setup import Sampler


class Moving:
    """A policy and its learner: the weights are the number of updates."""

    num_updates = 0

    def gather_weights(self) -> Any:
        yield "w", torch.tensor(self.num_updates)


class Engine:
    def __init__(self, log: list[str], *, forgets: bool = False) -> None:
        self._log, self._weight, self._forgets = log, -1, forgets

    def sync(self, weights: Any) -> None:
        ((_, weight),) = weights
        self._weight = int(weight)
        self._log.append("sync")

    def wake(self) -> bool:
        self._log.append("wake")
        return self._forgets

    def generate(self) -> int:
        return self._weight

    def sleep(self) -> int:
        self._log.append("sleep")
        return 7


def test_weights_are_sent_before_the_first_sample_and_after_each_update_alone() -> None:
    log: list[str] = []
    moving: Any = Moving()
    phases = Phases(torch.device("cpu"), lambda: [])
    sampler = Sampler(lambda: log.append("make") or Engine(log), moving, moving, phases)  # pyright: ignore
    for updates in (0, 0, 1, 1, 4):
        moving.num_updates = updates
        with sampler.awake() as engine:
            assert engine.generate() == updates  # pyright: ignore
            assert phases.absent_bytes == 0
        assert phases.absent_bytes == 7
    awake, sent = ["wake", "sleep"], ["wake", "sync", "sleep"]
    assert log == ["make", *sent, *awake, *sent, *awake, *sent]


def test_weights_that_an_engine_gave_away_in_its_sleep_are_sent_again() -> None:
    log: list[str] = []
    moving: Any = Moving()
    engine: Any = Engine(log, forgets=True)
    sampler = Sampler(lambda: engine, moving, moving, Phases(torch.device("cpu"), lambda: []))
    for _ in range(2):
        with sampler.awake():
            pass
    assert log == ["wake", "sync", "sleep"] * 2
