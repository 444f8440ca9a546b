"""The run's one rollout engine, with the policy's newest weights in it whenever it samples."""

import contextlib
from collections.abc import Callable, Iterator

from abrun.backends import Backend
from abrun.rollout import RolloutEngine
from abrun.train.learner import Learner
from abrun.train.phases import Phases


class Sampler:
    """Starts the engine where there is something to sample, and syncs it where the policy has moved since."""

    def __init__(
        self, make_engine: Callable[[], RolloutEngine], policy: Backend, learner: Learner, phases: Phases
    ) -> None:
        self._make_engine, self._policy, self._learner, self._phases = make_engine, policy, learner, phases
        self._engine: RolloutEngine | None = None
        self._num_updates_synced: int | None = None

    @contextlib.contextmanager
    def awake(self) -> Iterator[RolloutEngine]:
        """The engine, ready to sample from the policy as it is now; it sleeps afterwards. Collective."""
        engine = self._engine = self._engine or self._make_engine()
        with self._phases("weight_sync", memory=False):
            self._phases.absent_bytes = 0
            if engine.wake() or self._num_updates_synced != self._learner.num_updates:
                engine.sync(self._policy.gather_weights())
                self._num_updates_synced = self._learner.num_updates
        yield engine
        with self._phases("engine_sleep", memory=False):
            # Not after an error, which ends the run and is to be heard
            self._phases.absent_bytes = engine.sleep()

    def close(self) -> None:
        """End what the engine has started, if anything was ever sampled."""
        if self._engine is not None:
            self._engine.close()
