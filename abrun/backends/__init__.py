"""Backends: how a policy is spread over ranks and trained. The loops know only the protocols below.

Letters: B sequences, S positions, V vocabulary; entry t of a per-token tensor belongs to token t.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from abrun.backends.head import Entropies
from abrun.backends.pieces import Held
from abrun.backends.ranks import Ranks
from abrun.models import open_network
from abrun.recipe.algorithms import Ppo
from abrun.recipe.implementations import BACKENDS, load_implementation
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import Sequences
from abrun.rl.losses import TokenLosses
from abrun.rl.metrics import MetricParts

B = TypeVar("B", bound=Sequences)
B_contra = TypeVar("B_contra", bound=Sequences, contravariant=True)


class Objective(Protocol[B_contra]):
    """What a step minimises: the sum of a loss over all tokens of the global batch."""

    @property
    def entropies(self) -> Entropies:
        """Whether its losses or metrics need entropies: without, they are given None."""
        ...

    def losses(self, batch: B_contra, logprobs: Tensor, entropy: Tensor | None) -> TokenLosses:
        """Compute each token's share of the global loss [...], 0 where masked.

        All of `batch` is [...]: a microbatch [B, S], or some tokens of one [n], as a pass that never has all
        log-probs at once asks for them. A token's loss is the same in both.
        """
        ...

    def metrics(self, batch: B_contra, logprobs: Tensor, entropy: Tensor | None, losses: Any) -> MetricParts:
        """Return a microbatch's contributions, from log-probs and entropies [B, S] without gradient.

        `losses` is what `losses` returned for the microbatch; the caller has disabled gradients.
        """
        ...


class ValueObjective(Protocol[B_contra]):
    """What a step's value model minimises: the sum of a loss over all tokens of the global batch."""

    def losses(self, batch: B_contra, values: Tensor) -> TokenLosses:
        """Compute each token's share of the global loss [B, S], 0 where masked."""
        ...

    def metrics(self, batch: B_contra, values: Tensor, losses: Any) -> MetricParts:
        """Return a microbatch's contributions, from values [B, S] without gradient; `losses` as above."""
        ...


class Trained(Protocol):
    """What has weights and an optimizer on this process's device, spread over the ranks."""

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip, step, zero the gradients. Returns the L2 norm of the global gradient before clipping."""
        ...

    def local_state(self) -> dict[str, Tensor]:
        """This rank's shards of weights and optimizer state, in place: what its checkpoint holds."""
        ...

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `local_state` of the same rank of an equal layout gave."""
        ...

    def pieces(self) -> Mapping[str, Held]:
        """Of which parts of whole tensors each is made that `local_state` gives, or will after a step."""
        ...

    def resident_tensors(self) -> Sequence[Tensor]:
        """What lives on the device between steps, for the memory tracker."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One step of decoding, with the cache of those before."""

    step: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]
    in_place: bool  # after the prompts it also takes abrun.models.Places, and their mask
    collective: bool  # a step talks to other ranks

    def __call__(
        self, token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """The next tokens' logits [B, V] float32, which no temperature has touched, and the cache.

        `token_ids` and `position_ids` [B, S] are the new tokens', `attention_mask` [B, all so far] is 1 on
        real ones. The first call's cache is None.
        """
        return self.step(token_ids, attention_mask, position_ids, cache)


class ValueModel(Trained, Protocol):
    """A value model beside a policy.

    A token's value is the one computed before it (right-shifted in its sequence), or after it where the
    recipe says `right_shift: false`.
    """

    def values(self, batch: Sequences) -> Tensor:
        """Values [B, S] float32 of every token, without gradient."""
        ...

    def forward_backward(self, batch: B, objective: ValueObjective[B]) -> MetricParts:
        """Accumulate gradients of the global loss, the policy's backbone included where it is shared."""
        ...


class Backend(Trained, Protocol):
    """A policy. Rows come in and go out whole, whatever the backend cuts in between."""

    ranks: Ranks
    # Entered around each forward pass of `forward_backward`: the rest of it is the backward passes. For a
    # measurement to put its own here; see abrun.train.phases
    around_forward: Callable[[], AbstractContextManager[None]]

    def logprobs(self, batch: Sequences) -> Tensor:
        """Log-probs [B, S] of every token, without gradient."""
        ...

    def routed_logprobs(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        """And `routes` of the batch, the experts that its tokens went to; where `replay_routing` asks."""
        ...

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        """Accumulate gradients of the global loss: the sum of losses over all microbatches of all ranks."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their Hugging Face names, each whole on this rank's device. Collective.

        One after the other, and to be kept by nobody: no rank has room for all of them.
        """
        ...

    def decoding(self) -> AbstractContextManager[Decoder]:
        """The policy as a decoder on this rank, for an engine without weights of its own. Collective."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights and configuration as a Hugging Face checkpoint, by the first rank. Collective."""
        ...

    def make_value_model(self, settings: Ppo, seed: int) -> ValueModel:
        """The value model that goes with this policy, its head initialised from `seed`."""
        ...


def make_backend(
    config: OwnRunConfig, ranks: Ranks, *, weights: Path | None, seed: int, trainable: bool = True
) -> Backend:
    """Make the policy of a run, on the backend that its recipe names.

    `weights`, a checkpoint folder, replaces the recipe's own initial ones; a preset without is initialised
    from `seed`. Raises RecipeError if the model does not fit the backend.

    A backend gets `load_initial`, which makes a network with the run's initial weights, on the CPU and alike
    on every rank, or on the meta device with a `checkpoint` to read them from: the policy's, and that of a
    value model with a backbone of its own. Its log-probs are of the distribution that a sampler at
    `temperature` with `filters` draws from; the sampler's own LM head runs in `engine_dtype`.
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
