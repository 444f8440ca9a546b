"""What the backends share of a policy: the passes over a batch's microbatches, and what is made of them.

Letters: B sequences, S positions, b and s those of a microbatch, R = layers * experts a token.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from abrun.backends import B, Objective
from abrun.backends.head import Entropies, HeadOutput
from abrun.backends.microbatches import Microbatch, Microbatches
from abrun.backends.packing import Packing
from abrun.backends.ranks import Ranks
from abrun.backends.routing import Load
from abrun.kernels import TokenLoss
from abrun.models import open_network, save_network
from abrun.recipe.policy import Policy
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import Sequences
from abrun.rl.metrics import MetricParts, merge, merge_keys

Routed = TypeVar("Routed")  # what the routers of a mixture of experts did with a microbatch
Balance = tuple[float, Load]  # the auxiliary loss's coefficient, and the global batch's load


class PolicyBackend(ABC, Generic[Routed]):
    """A policy whose passes are the same on every backend; see abrun.backends.Backend.

    A backend says how one microbatch goes forward (`_forward`), and in which order microbatches go forward
    and backward (`_run`).
    """

    settings: Policy
    ranks: Ranks
    around_forward: Callable[[], AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    @classmethod
    def of_run(
        cls, config: OwnRunConfig, ranks: Ranks, *, weights: Path | None, seed: int, trainable: bool = True
    ) -> Self:
        """See abrun.backends.make_backend."""
        temperature, filters = config.trained_distribution

        def load() -> Any:
            decodes = trainable and config.decodes
            return open_network(config.model, weights=weights, seed=seed, decodes=decodes)

        make: Any = cls
        return make(
            load,
            config.policy,
            ranks,
            temperature=temperature,
            filters=filters,
            engine_dtype=config.rollout.head_dtype,
            trainable=trainable,
        )

    def logprobs(self, batch: Sequences) -> Tensor:
        return self._pass(batch)[0]

    def routed_logprobs(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        logprobs, routed, microbatches = self._pass(batch)
        routes = self._routes(routed)
        return logprobs, microbatches.in_rows(routes) if routes else logprobs.new_zeros(*logprobs.shape, 0)

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        coefficient = self.settings.router_aux_loss_coefficient
        # The load of the global batch takes a pass of its own: no microbatch knows the others.
        balance = (coefficient, self._total_load(self._pass(batch)[1])) if coefficient else None
        parts: list[MetricParts] = []
        routed: list[Routed] = []

        def forward(microbatch: Microbatch[B]) -> Tensor:
            token_loss = self._token_loss(microbatch, objective)
            with self.around_forward():
                output = self._forward(*microbatch, objective.entropies, token_loss, routed, balance)
                if not isinstance(output, HeadOutput):
                    return output  # of a pipeline's stage that is not the last
                losses = objective.losses(microbatch.batch, output.logprobs, output.entropies)
                loss = losses.shares.sum() if output.loss is None else output.loss
                if output.balance is not None:
                    loss = loss + output.balance
            detached = output.mapped(Tensor.detach)
            with torch.no_grad():
                parts.append(
                    objective.metrics(microbatch.batch, detached.logprobs, detached.entropies, losses)
                )
            return loss

        self._run(Microbatches(batch, self.settings, self.ranks), forward, backward=True)
        metrics = self._from_last_stage(merge(parts) if parts else None)
        return merge_keys(metrics, self._total_load(routed).metrics()) if routed else metrics

    def save(self, directory: Path) -> None:
        weights = {}
        for name, weight in self._whole():
            if self.ranks.is_first:
                weights[name] = weight.cpu()
        if self.ranks.is_first:
            save_network(self._network, directory, weights.items())

    @property
    @abstractmethod
    def _network(self) -> Any:
        """The transformers network that weights are published under the names of."""

    @abstractmethod
    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters under the network's own names, each whole. Collective."""

    @abstractmethod
    def _forward(
        self,
        batch: Sequences,
        packing: Packing | None,
        entropies: Entropies,
        token_loss: TokenLoss | None,
        routed: list[Routed],
        balance: Balance | None,
    ) -> HeadOutput | Tensor:
        """Return log-probs and entropies [b, s]; on other stages than the last, the hidden states.

        With experts, what routers did with the microbatch is appended to `routed`.
        """

    @abstractmethod
    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        """Call `forward` on each microbatch; with `backward`, go back from the loss [] that it returns."""

    @abstractmethod
    def _total_load(self, routed: list[Routed]) -> Load:
        """Return the load of the global batch: all passes, layers and ranks. Collective."""

    @abstractmethod
    def _routes(self, routed: list[Routed]) -> list[Tensor]:
        """Return where the tokens of each microbatch went [b, s, R]; empty without experts. Collective."""

    def _from_last_stage(self, parts: MetricParts | None) -> MetricParts:
        assert parts is not None
        return parts

    def _logprobs_of_last_stage(self, logprobs: Tensor | None, shape: torch.Size) -> Tensor:
        assert logprobs is not None
        return logprobs

    def _pass(self, batch: B) -> tuple[Tensor, list[Routed], Microbatches[B]]:
        """Return log-probs [B, S] without gradient, and what routers did with these microbatches."""
        found: list[Tensor] = []
        routed: list[Routed] = []

        def forward(microbatch: Microbatch[B]) -> Tensor:
            output = self._forward(*microbatch, "none", None, routed, None)
            if not isinstance(output, HeadOutput):
                return output
            found.append(output.logprobs)
            return output.logprobs.new_zeros(())

        microbatches = Microbatches(batch, self.settings, self.ranks)
        with torch.no_grad():
            self._run(microbatches, forward, backward=False)
        logprobs = microbatches.in_rows(found) if found else None
        return self._logprobs_of_last_stage(logprobs, batch.token_ids.shape), routed, microbatches

    def _token_loss(self, microbatch: Microbatch[B], objective: Objective[B]) -> TokenLoss | None:
        """Return the loss of some tokens, for a head that never has all log-probs at once."""
        if not self.settings.logprobs.one_pass:
            return None
        batch, packing = microbatch
        tokens = (batch.mapped(packing.pack) if packing else batch).predicted_tokens()
        if packing and packing.split:
            tokens = tokens.mapped(packing.split.cut)

        def losses(logprobs: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
            return objective.losses(tokens[part], logprobs, entropy).shares

        return losses
