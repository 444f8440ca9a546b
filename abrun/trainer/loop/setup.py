"""The common setup of all algorithms: one rank's view of a run."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from abrun.errors import RecipeError
from abrun.processes import progress
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Optimizer
from abrun.recipe.run import OwnRunConfig, recorded_source, unsupported_settings
from abrun.trainer.backends import B, Backend, Objective, ValueModel, make_backend
from abrun.trainer.backends.ranks import Ranks, make_ranks
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.loop.data import Data, RecordedGroups, make_data
from abrun.trainer.loop.phases import Phases
from abrun.trainer.models.text import load_text
from abrun.trainer.rl.metrics import all_reduce, merge
from abrun.trainer.rollout import RolloutEngine, make_engine
from abrun.trainer.seeds import derive_seed

# Updates of the trained models, policy and value model: optimizer steps, learning rates and state.

VALUE_MODEL_PREFIX = "critic/"


class Learner:
    """Updates the policy and counts the updates. It saves the state of `value_model`, which PPO updates."""

    def __init__(
        self,
        policy: Backend,
        value_model: ValueModel | None,
        optimizer: Optimizer,
        phases: Phases,
        num_steps: int,
    ) -> None:
        self._policy, self._value_model, self._phases = policy, value_model, phases
        self._optimizer, self._num_steps = optimizer, num_steps
        self.num_updates = 0

    def update_on_each(
        self,
        updates: Sequence[tuple[B, Objective[B]]],
        step: int,
        before_each: Callable[[B], None] = lambda batch: None,
    ) -> dict[str, float]:
        """Run one optimizer step for each batch and objective; return the metrics over all ranks. Collective.

        Metrics are summed over the batches, like those of microbatches. The gradient norm is the mean over
        the optimizer steps.
        """
        learning_rate = learning_rate_at(step, self._optimizer, self._num_steps)
        contributions, norms = [], []
        with self._phases("policy_training", memory=False):
            for batch, objective in updates:
                before_each(batch)
                with self._phases("forward_backward"):
                    contributions.append(self._policy.forward_backward(batch, objective))
                with self._phases("optimizer"):
                    norms.append(self._policy.optimizer_step(learning_rate))
                self.num_updates += 1
        return {
            **all_reduce(merge(contributions), self._policy.ranks.data),
            "train/grad_norm": sum(norms) / len(norms),
            "train/lr": learning_rate,
        }

    def local_state(self) -> dict[str, Tensor]:
        """Return this rank's shards of all trained state, in place: the contents of its checkpoint."""
        state = self._policy.local_state()
        if self._value_model is not None:
            value_state = self._value_model.local_state()
            state |= {f"{VALUE_MODEL_PREFIX}{name}": tensor for name, tensor in value_state.items()}
        return state

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """See abrun.trainer.backends.Trainable."""
        specs = dict(self._policy.shard_specs())
        if self._value_model is not None:
            for name, held in self._value_model.shard_specs().items():
                specs[f"{VALUE_MODEL_PREFIX}{name}"] = held.with_prefix(VALUE_MODEL_PREFIX)
        return specs

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Load a state that `local_state` returned on the same rank of a run with the same layout."""
        self._policy.load_local_state(state)
        if self._value_model is not None:
            self._value_model.load_local_state(
                {
                    name.removeprefix(VALUE_MODEL_PREFIX): tensor
                    for name, tensor in state.items()
                    if name.startswith(VALUE_MODEL_PREFIX)
                }
            )


def learning_rate_at(step: int, optimizer: Optimizer, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then the schedule down to the floor at `num_steps`.

    constant stays at the peak. linear and cosine (arXiv:1608.03983, equation 5, one cycle) reach the floor at
    the last step. Steps count from 1.
    """
    peak, floor, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps
    if step <= warmup or optimizer.schedule == "constant":
        return peak * min(1.0, step / max(warmup, 1))
    peak_step = max(warmup, 1)
    progress = (step - peak_step) / max(num_steps - peak_step, 1)
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return floor + (peak - floor) * remaining


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
            # Every weight costs a collective, so an engine that has the current ones is not synced: the
            # policy changes by updates alone. After some kinds of sleep an engine has none.
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
    recorded_rollouts: RecordedGroups | None = None  # to train on instead of sampling


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
        recorded_rollouts = RecordedGroups(config, text, run_path, seed)
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
