"""The common setup of all algorithms: one rank's view of a run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from abrun.errors import RecipeError
from abrun.processes import progress
from abrun.recipe.algorithms import Ppo
from abrun.recipe.run import OwnRunConfig, recorded_source, unsupported_settings
from abrun.trainer.backends import Backend, ValueModel, make_backend
from abrun.trainer.backends.ranks import Ranks, make_ranks
from abrun.trainer.loop.data import Data, make_data
from abrun.trainer.loop.learner import Learner
from abrun.trainer.loop.phases import Phases
from abrun.trainer.loop.recordings import RecordedRollouts
from abrun.trainer.models import load_text
from abrun.trainer.rollout import RolloutEngine, make_engine
from abrun.trainer.seeds import derive_seed

# The rollout engine of a run, synced with the policy before it samples.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """The models, data and tools of a run, as seen by one rank."""

    config: OwnRunConfig
    seed: int
    initial_weights: Path | None
    ranks: Ranks
    data: Data
    policy: Backend
    value_model: ValueModel | None  # only for PPO
    learner: Learner
    sampler: Sampler
    phases: Phases
    recorded_rollouts: RecordedRollouts | None = None  # to train on instead of sampling


def make_setup(
    config: OwnRunConfig,
    seed: int,
    initial_weights: Path | None,
    device: torch.device,
    run_path: Path | None = None,
) -> RunSetup:
    """Load the model and the task of a run. Collective.

    `run_path`: the run's directory, beside which recorded rollouts may lie; None: it trains on none. Raises
    RecipeError if they do not fit together, or for a feature that is not built yet.
    """
    for line in unsupported_settings(config):
        raise RecipeError(line)
    progress.report("model set-up", in_every_step=False)
    algorithm = config.algorithm
    backend = config.policy.backend
    ranks = make_ranks(device, backend.shape, expert_parallel=backend.expert_groups)
    text = load_text(config.model, weights=initial_weights)
    data = make_data(config, text, ranks, seed)
    policy = make_backend(config, ranks, weights=initial_weights, seed=derive_seed(seed, "init"))
    value_model = None
    if isinstance(algorithm, Ppo):
        value_model = policy.make_value_model(algorithm, derive_seed(seed, "value_head"))
    trained = [policy] if value_model is None else [policy, value_model]
    phases = Phases(
        device,
        lambda: [tensor for model in trained for tensor in model.resident_tensors()],
        compiles=config.policy.compile,
    )
    recorded_rollouts = None
    if recorded_source(config) and run_path:
        recorded_rollouts = RecordedRollouts(config, text, run_path, seed)
    learner = Learner(policy, value_model, config.policy.optimizer, phases, config.steps)
    return RunSetup(
        config=config,
        seed=seed,
        initial_weights=initial_weights,
        ranks=ranks,
        data=data,
        policy=policy,
        value_model=value_model,
        learner=learner,
        sampler=Sampler(partial(make_engine, config, policy, text), policy, learner, phases),
        phases=phases,
        recorded_rollouts=recorded_rollouts,
    )


def make_reference(setup: RunSetup) -> Backend:
    """Return a frozen policy with the initial weights of the run."""
    reference = make_backend(
        setup.config,
        setup.ranks,
        weights=setup.initial_weights,
        seed=derive_seed(setup.seed, "init"),
        trainable=False,
    )
    setup.phases.add_resident(reference.resident_tensors)
    return reference
