"""The rollout engine of a run, synced with the policy before it samples."""

import contextlib
from collections.abc import Callable, Iterator

from abrun.backends import Backend
from abrun.rollout import RolloutEngine
from abrun.train.learner import Learner
from abrun.train.phases import Phases


class Sampler:
    """Starts the engine on first use, and syncs it if the policy has been updated since the last sync."""

    def __init__(
        self, make_engine: Callable[[], RolloutEngine], policy: Backend, learner: Learner, phases: Phases
    ) -> None:
        self._make_engine, self._policy, self._learner, self._phases = make_engine, policy, learner, phases
        self._engine: RolloutEngine | None = None
        self._num_updates_synced: int | None = None

    @contextlib.contextmanager
    def awake(self) -> Iterator[RolloutEngine]:
        """Yield the engine, awake and synced with the policy; it sleeps afterwards. Collective."""
        engine = self._engine = self._engine or self._make_engine()
        with self._phases("weight_sync", memory=False):
            self._phases.absent_bytes = 0
            if engine.wake() or self._num_updates_synced != self._learner.num_updates:
                engine.sync(self._policy.gather_weights())
                self._num_updates_synced = self._learner.num_updates
        yield engine
        with self._phases("engine_sleep", memory=False):
            # Skipped after an error, so that a failing sleep cannot hide it.
            self._phases.absent_bytes = engine.sleep()

    def close(self, *, finished: bool = False) -> None:
        """Close the engine, if it was started. `finished`: the run has taken its last step."""
        if self._engine is not None:
            self._engine.close(finished=finished)
