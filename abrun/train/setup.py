"""The common setup of all algorithms: one rank's view of a run."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from abrun.backends import Backend, ValueModel, make_backend
from abrun.backends.ranks import Ranks, make_ranks
from abrun.errors import RecipeError
from abrun.models import load_text
from abrun.processes import progress
from abrun.recipe.algorithms import Ppo
from abrun.recipe.run import OwnRunConfig, recorded_source, unsupported_settings
from abrun.rollout import make_engine
from abrun.seeds import derive_seed
from abrun.train.data import Data, make_data
from abrun.train.learner import Learner
from abrun.train.phases import Phases
from abrun.train.recordings import RecordedRollouts
from abrun.train.sampler import Sampler


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
