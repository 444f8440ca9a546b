"""Backends shard a policy over ranks and train it. Training loops use only the protocols in this module.

Letters: B sequences, S positions, V vocabulary; entry t of a per-token tensor belongs to token t.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from abrun.recipe.algorithms import Ppo
from abrun.recipe.implementations import BACKENDS, load_implementation
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends.head import Decoder, EntropyMode
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.models.weights import open_network
from abrun.trainer.rl.batch import Sequences
from abrun.trainer.rl.losses import TokenLosses
from abrun.trainer.rl.metrics import MetricParts

B = TypeVar("B", bound=Sequences)
B_contra = TypeVar("B_contra", bound=Sequences, contravariant=True)


class Objective(Protocol[B_contra]):
    """The objective of a policy update: a loss summed over all tokens of the global batch."""

    @property
    def entropies(self) -> EntropyMode:
        """Return whether losses or metrics need entropies. If not, they receive None."""
        ...

    def losses(self, batch: B_contra, logprobs: Tensor, entropy: Tensor | None) -> TokenLosses:
        """Compute each token's share of the global loss [...], 0 where masked.

        `batch` has the same leading shape: a microbatch [B, S], or n of its tokens [n] if the pass never
        holds all log-probs at once. A token's loss must not depend on which of the two it is.
        """
        ...

    def metrics(self, batch: B_contra, logprobs: Tensor, entropy: Tensor | None, losses: Any) -> MetricParts:
        """Return a microbatch's metrics from log-probs and entropies [B, S], without gradient.

        `losses` is the result of the method `losses` for the microbatch. The caller disables gradients.
        """
        ...


class ValueModelObjective(Protocol[B_contra]):
    """The objective of a value-model update: a loss summed over all tokens of the global batch."""

    def losses(self, batch: B_contra, values: Tensor) -> TokenLosses:
        """Compute each token's share of the global loss [B, S], 0 where masked."""
        ...

    def metrics(self, batch: B_contra, values: Tensor, losses: Any) -> MetricParts:
        """Return a microbatch's metrics from values [B, S], without gradient; `losses` as in Objective."""
        ...


class Trainable(Protocol):
    """Weights with an optimizer, sharded over the ranks; this process holds its shards on its device."""

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip, step and zero the gradients. Return the global gradient's L2 norm before clipping."""
        ...

    def local_state(self) -> dict[str, Tensor]:
        """Return this rank's shards of weights and optimizer state, not copied. A checkpoint stores them."""
        ...

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Restore a `local_state` that the same rank of the same layout returned."""
        ...

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """Return the spec of every shard that `local_state` returns, now or after an optimizer step."""
        ...

    def resident_tensors(self) -> Sequence[Tensor]:
        """Return the tensors that stay on the device between steps, for the memory tracker."""
        ...


class ValueModel(Trainable, Protocol):
    """A value model, trained along with a policy.

    A token's value is computed from the tokens before it (right shift), or, with the recipe's
    `right_shift: false`, from the tokens up to and including it.
    """

    def compute_values(self, batch: Sequences) -> Tensor:
        """Return the value [B, S] float32 of every token, without gradient."""
        ...

    def forward_backward(self, batch: B, objective: ValueModelObjective[B]) -> MetricParts:
        """Accumulate gradients of the global loss, also in the policy's backbone if that is shared."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module of the network on this rank whose output is the states of the tokens."""

    name: str  # Hugging Face's
    module: Any
    # Returns the states of this rank's tokens, [B, S, H] or of a stream [1, T/P, H], given the
    # module's output and the number of tokens. Collective over the ranks that share these tokens.
    full_states: Callable[[Any, int], Tensor]
    is_compiled: bool = False  # modules inside it are compiled: hooks on them would change the graph


class Backend(Trainable, Protocol):
    """A sharded policy. Its inputs and outputs are full rows, however the backend shards them inside."""

    ranks: Ranks
    # `forward_backward` enters this context around each forward pass; everything else in it is backward.
    # A measurement can replace it: see abrun.trainer.loop.phases.
    around_forward: Callable[[], AbstractContextManager[None]]

    def compute_logprobs(self, batch: Sequences) -> Tensor:
        """Return the log-prob [B, S] of every token, without gradient."""
        ...

    def compute_logprobs_and_routes(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        """Return log-probs [B, S] and the experts that each token was routed to, for `replay_routing`."""
        ...

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        """Accumulate gradients of the global loss: the sum of losses over all microbatches of all ranks."""
        ...

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full weight under its Hugging Face name, on this rank's device. Collective.

        The caller must not keep them: a rank may have no memory for all of them at once.
        """
        ...

    def decoding(self) -> AbstractContextManager[Decoder]:
        """Open a decoder of the policy on this rank, for an engine without its own weights. Collective."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and configuration as a Hugging Face checkpoint; rank 0 writes. Collective."""
        ...

    def traced_modules(self) -> Sequence[TracedModule]:
        """Return embedding, layers with their parts, and final norm: those that this rank computes."""
        ...

    def make_value_model(self, settings: Ppo, seed: int) -> ValueModel:
        """Make the value model of this policy, with a head initialised from `seed`."""
        ...


def make_backend(
    config: OwnRunConfig, ranks: Ranks, *, weights: Path | None, seed: int, trainable: bool = True
) -> Backend:
    """Make a run's policy on the backend that its recipe names.

    `weights`, a checkpoint folder, replaces the recipe's initial weights. A preset without weights is
    initialised from `seed`. Raises RecipeError if the model does not fit the backend.

    The backend receives `load_initial`, which makes a network with the run's initial weights: on the CPU, the
    same on every rank, or on the meta device with a `checkpoint` to read from. It is called once for the
    policy and once for a value model with its own backbone. Log-probs are those of the distribution that a
    sampler at `temperature` with `filters` draws from. The sampler's LM head runs in `engine_dtype`.
    """
    temperature, filters = config.trained_distribution

    def load_initial() -> Any:
        return open_network(
            config.model, weights=weights, seed=seed, decodes=trainable and config.decodes_with_policy
        )

    return load_implementation(BACKENDS[config.policy.backend.type])(
        load_initial,
        config.policy,
        ranks,
        temperature=temperature,
        filters=filters,
        engine_dtype=config.rollout.head_dtype,
        trainable=trainable,
    )
