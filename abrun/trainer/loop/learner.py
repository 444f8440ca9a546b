"""Updates of the trained models, policy and value model: optimizer steps, learning rates and state."""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from abrun.recipe.policy import Optimizer
from abrun.trainer.backends import B, Backend, Objective, ValueModel
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.loop.phases import Phases
from abrun.trainer.rl.metrics import all_reduce, merge

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

    def update(self, batch: B, objective: Objective[B], step: int) -> dict[str, float]:
        """Run one optimizer step on this rank's `batch`; return the metrics over all ranks. Collective."""
        return self.update_on_each([(batch, objective)], step)

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
