"""Steps of an algorithm on given rows: on the ranks of a layout, and by the oracle."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import make_backend
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.loop.grpo import GrpoAlgorithm
from abrun.trainer.loop.phases import Phases
from abrun.trainer.loop.ppo import PpoAlgorithm
from abrun.trainer.loop.setup import Learner, RunSetup
from abrun.trainer.rl.batch import RolloutBatch, collate, scatter_to_completions
from tests.trainer.backends.oracle import Row

CPU = torch.device("cpu")
HEAD_SEED = 5


def config_of(folder: Path, world_size: int, settings: dict[str, Any], steps: int) -> OwnRunConfig:
    return OwnRunConfig.model_validate(
        {"steps": steps, "model": {"path": str(folder)}, "cluster": {"cpu_ranks": world_size}}
        | {"task": {"type": "arithmetic"}}
        | settings
    )


def batch_of(rows: list[Row], config: OwnRunConfig, pad_id: int) -> Any:
    sequences = collate([row.prompt for row in rows], [row.completion for row in rows], pad_id=pad_id)
    counted = torch.tensor([row.merge_counts for row in rows])
    sequences = replace(sequences, token_mask=sequences.token_mask & counted[:, None])
    whole = collate([row.prompt for row in rows], [row.completion for row in rows], pad_id=pad_id)
    return sequences.with_fields(
        RolloutBatch,
        inference_logprobs=scatter_to_completions([row.inference for row in rows], whole.token_mask),
        rewards=torch.tensor([row.reward for row in rows]),
    )


def steps_on_ranks(
    rank: int, world_size: int, folder: Path, settings: dict[str, Any], steps: list[list[Row]], pad_id: int
) -> dict[str, Any]:
    """What the ranks make of these steps. The last one is taken twice, the second time from a saved state."""
    config = config_of(folder, world_size, settings, len(steps))
    backend = config.policy.backend
    ranks = make_ranks(CPU, backend.shape, expert_parallel=backend.expert_groups)
    policy: Any = make_backend(config, ranks, weights=None, seed=0)
    kind: Any = config.algorithm
    values: Any = policy.make_value_model(kind, HEAD_SEED) if kind.type == "ppo" else None
    phases = Phases(ranks.device)
    learner = Learner(policy, values, config.policy.optimizer, phases, config.steps)
    nothing: Any = None
    setup = RunSetup(
        config=config,
        seed=0,
        initial_weights=None,
        ranks=ranks,
        data=nothing,
        policy=policy,
        value_model=values,
        learner=learner,
        sampler=nothing,
        phases=phases,
    )
    algorithm: Any = PpoAlgorithm(setup, kind, values) if values else GrpoAlgorithm(setup, kind)
    initial = {name: weight.clone() for name, weight in policy.gather_weights()}
    metrics: list[dict[str, float]] = []
    saved: dict[str, Tensor] = {}
    batch: Any = None
    for number, rows in enumerate(steps, start=1):
        batch = batch_of(rows[ranks.data_slice(len(rows))], config, pad_id)
        saved = {name: tensor.clone() for name, tensor in learner.local_state().items()}
        metrics.append(algorithm.update(batch, number))
    weights = {name: weight.clone() for name, weight in policy.gather_weights()}
    after = {name: tensor.clone() for name, tensor in learner.local_state().items()}
    learner.load_local_state(saved)
    again = algorithm.update(batch, len(steps))
    repeated = learner.local_state()
    resumed = again == metrics[-1] or _same(again, metrics[-1])
    same = {name: bool(torch.equal(repeated[name], tensor)) for name, tensor in after.items()}
    return {
        "initial": initial if rank == 0 else None,
        "metrics": metrics,
        "weights": weights if rank == 0 else None,
        "values": _rows(values.compute_values(batch), batch.token_mask) if values else None,
        "share": (ranks.data.rank(), ranks.data.size()),
        "resumed": resumed and all(same.values()),
    }


def _rows(values: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[m].tolist() for row, m in zip(values, mask, strict=True)]


def _same(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(a == other[key] or a != a for key, a in one.items())
