"""What the backends share of policy and value models: the work of each micro-batch, the optimizer step.

Letters: B sequences, S positions, b and s those of a micro-batch, R = layers * experts a token.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from abrun.backends import B, Objective, Trained, ValueObjective
from abrun.backends.head import Entropies, HeadOutput
from abrun.backends.microbatches import Microbatch, Microbatches
from abrun.backends.packing import Packing
from abrun.backends.pieces import Held
from abrun.backends.ranks import Ranks
from abrun.backends.routing import Load
from abrun.kernels import TokenLoss
from abrun.models import save_network
from abrun.recipe.policy import Policy
from abrun.rl.batch import Sequences
from abrun.rl.metrics import MetricParts, merge, merge_keys
from abrun.rl.values import shift_right

Routed = TypeVar("Routed")  # what the routers of a mixture of experts did with a micro-batch
Balance = tuple[float, Load]  # the auxiliary loss's coefficient, and the global batch's load


class TrainedModel(ABC):
    """A trained model, and passes over the micro-batches of a batch, without gradient or with."""

    settings: Policy
    ranks: Ranks
    _parameters: Trained

    def optimizer_step(self, learning_rate: float) -> float:
        return self._parameters.optimizer_step(learning_rate)

    def local_state(self) -> dict[str, Tensor]:
        return self._parameters.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._parameters.load_local_state(state)

    def pieces(self) -> Mapping[str, Held]:
        return self._parameters.pieces()

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._parameters.resident_tensors()

    @property
    def is_last_stage(self) -> bool:
        """False on a stage of a pipeline that computes neither log-probs nor losses."""
        return True

    @abstractmethod
    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        """Call `forward` on each micro-batch; with `backward`, go back from the loss [] that it returns."""

    def _infer(self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor]) -> Tensor:
        """Return as rows [B, S] what `forward` computes of each micro-batch [b, s], without gradient.

        On earlier stages `forward` returns the hidden states for the next one.
        """
        outputs: list[Tensor] = []

        def step(microbatch: Microbatch[B]) -> Tensor:
            output = forward(microbatch)
            if self.is_last_stage:
                outputs.append(output)
            return output

        with torch.no_grad():
            self._run(microbatches, step, backward=False)
        rows = microbatches.in_rows(outputs) if outputs else None
        return self._tensor_from_last_stage(rows, microbatches.shape)

    def _accumulate(
        self,
        microbatches: Microbatches[B],
        forward: Callable[[Microbatch[B]], tuple[Tensor, MetricParts | None]],
    ) -> MetricParts:
        """Accumulate gradients of the loss [] that `forward` returns, and merge its metrics.

        On earlier stages `forward` returns the hidden states for the next one, and no metrics.
        """
        parts: list[MetricParts] = []

        def step(microbatch: Microbatch[B]) -> Tensor:
            loss, metrics = forward(microbatch)
            if metrics is not None:
                parts.append(metrics)
            return loss

        self._run(microbatches, step, backward=True)
        return self._metrics_from_last_stage(merge(parts) if parts else None)

    def _microbatches(self, batch: B) -> Microbatches[B]:
        return Microbatches(batch, self.settings, self.ranks)

    def _tensor_from_last_stage(self, tensor: Tensor | None, shape: torch.Size) -> Tensor:
        assert tensor is not None
        return tensor

    def _metrics_from_last_stage(self, parts: MetricParts | None) -> MetricParts:
        assert parts is not None
        return parts


class PolicyBackend(TrainedModel, Generic[Routed]):
    """A policy whose passes are the same on every backend; see abrun.backends.Backend.

    A backend says how one micro-batch goes forward (`_forward`), and in which order micro-batches go forward
    and backward (`_run`).
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.settings, self.ranks = policy, ranks
        self.around_forward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def logprobs(self, batch: Sequences) -> Tensor:
        return self._pass(batch)[0]

    def routed_logprobs(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        logprobs, routed, microbatches = self._pass(batch)
        routes = self._routes(routed)
        return logprobs, microbatches.in_rows(routes) if routes else logprobs.new_zeros(*logprobs.shape, 0)

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        coefficient = self.settings.router_aux_loss_coefficient
        # The load of the global batch takes a pass of its own: no micro-batch knows the others.
        balance = (coefficient, self._total_load(self._pass(batch)[1])) if coefficient else None
        routed: list[Routed] = []

        def forward(microbatch: Microbatch[B]) -> tuple[Tensor, MetricParts | None]:
            token_loss = self._token_loss(microbatch, objective)
            with self.around_forward():
                output = self._forward(*microbatch, objective.entropies, token_loss, routed, balance)
                if not isinstance(output, HeadOutput):
                    return output, None
                losses = objective.losses(microbatch.batch, output.logprobs, output.entropies)
                loss = losses.shares.sum() if output.loss is None else output.loss
                if output.balance is not None:
                    loss = loss + output.balance
            output = output.mapped(Tensor.detach)
            with torch.no_grad():
                return loss, objective.metrics(microbatch.batch, output.logprobs, output.entropies, losses)

        metrics = self._accumulate(self._microbatches(batch), forward)
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

        With experts, what routers did with the micro-batch is appended to `routed`.
        """

    @abstractmethod
    def _total_load(self, routed: list[Routed]) -> Load:
        """Return the load of the global batch: all passes, layers and ranks. Collective."""

    @abstractmethod
    def _routes(self, routed: list[Routed]) -> list[Tensor]:
        """Return where the tokens of each micro-batch went [b, s, R]; empty without experts. Collective."""

    def _pass(self, batch: B) -> tuple[Tensor, list[Routed], Microbatches[B]]:
        """Return log-probs [B, S] without gradient, and what routers did with these micro-batches."""
        routed: list[Routed] = []

        def forward(microbatch: Microbatch[B]) -> Tensor:
            output = self._forward(*microbatch, "none", None, routed, None)
            return output.logprobs if isinstance(output, HeadOutput) else output

        microbatches = self._microbatches(batch)
        return self._infer(microbatches, forward), routed, microbatches

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


class ValueBackend(TrainedModel):
    """A value model whose passes are the same on every backend; see abrun.backends.ValueModel."""

    right_shift: bool

    def values(self, batch: Sequences) -> Tensor:
        return self._infer(self._microbatches(batch), lambda microbatch: self._forward(*microbatch))

    def forward_backward(self, batch: B, objective: ValueObjective[B]) -> MetricParts:
        def forward(microbatch: Microbatch[B]) -> tuple[Tensor, MetricParts | None]:
            values = self._forward(*microbatch)
            if not self.is_last_stage:
                return values, None
            losses = objective.losses(microbatch.batch, values)
            loss = losses.shares.sum()
            with torch.no_grad():
                return loss, objective.metrics(microbatch.batch, values.detach(), losses)

        return self._accumulate(self._microbatches(batch), forward)

    @abstractmethod
    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        """Return values [b, s] float32; on other stages than the last, the hidden states."""

    def _in_rows(self, values: Tensor, packing: Packing | None) -> Tensor:
        """Return a stream's values as rows [b, s], shifted as rows, so that no sequence sees another's."""
        values = packing.unpack(packing.whole(values)) if packing else values
        return shift_right(values) if self.right_shift else values
