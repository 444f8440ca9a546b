"""The parts of policy and value models that the backends share: passes over micro-batches, optimizer step.

Letters: B sequences, S positions, b and s those of a micro-batch, L layers with a router, K experts per
token.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from abrun.recipe.policy import Policy
from abrun.trainer.backends import B, Objective, Trainable, ValueModelObjective
from abrun.trainer.backends.head import EntropyMode, HeadOutput
from abrun.trainer.backends.microbatches import Microbatch, Microbatches, Packing
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.routing import RouterLoad
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.kernels import TokenLoss
from abrun.trainer.models.weights import save_network
from abrun.trainer.rl.advantages import shift_right
from abrun.trainer.rl.batch import Sequences
from abrun.trainer.rl.metrics import MetricParts, merge, merge_keys

RoutingT = TypeVar("RoutingT")  # a backend's record of how a micro-batch was routed to experts
AuxLossInputs = tuple[float, RouterLoad]  # the auxiliary loss's coefficient, and the global batch's load


class TrainedModel(ABC):
    """A model with an optimizer, and passes over a batch's micro-batches with and without gradient."""

    settings: Policy
    ranks: Ranks
    _parameters: Trainable

    def optimizer_step(self, learning_rate: float) -> float:
        return self._parameters.optimizer_step(learning_rate)

    def local_state(self) -> dict[str, Tensor]:
        return self._parameters.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._parameters.load_local_state(state)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._parameters.shard_specs()

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._parameters.resident_tensors()

    @property
    def is_last_stage(self) -> bool:
        """Return whether this pipeline stage computes log-probs and losses."""
        return True

    @abstractmethod
    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        """Call `forward` on each micro-batch; with `backward`, backpropagate the loss [] that it returns."""

    def _infer(self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor]) -> Tensor:
        """Run `forward` on each micro-batch without gradient and return its outputs [b, s] as rows [B, S].

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
        rows = microbatches.gather_rows(outputs) if outputs else None
        return self._tensor_from_last_stage(rows, microbatches.shape)

    def _accumulate(
        self,
        microbatches: Microbatches[B],
        forward: Callable[[Microbatch[B]], tuple[Tensor, MetricParts | None]],
    ) -> MetricParts:
        """Accumulate gradients of the loss [] that `forward` returns, and merge its metrics.

        On earlier stages `forward` returns the hidden states for the next one, and no metrics.
        """
        metric_parts: list[MetricParts] = []

        def step(microbatch: Microbatch[B]) -> Tensor:
            loss, metrics = forward(microbatch)
            if metrics is not None:
                metric_parts.append(metrics)
            return loss

        self._run(microbatches, step, backward=True)
        return self._metrics_from_last_stage(merge(metric_parts) if metric_parts else None)

    def _make_microbatches(self, batch: B) -> Microbatches[B]:
        return Microbatches(batch, self.settings, self.ranks)

    def _tensor_from_last_stage(self, tensor: Tensor | None, shape: torch.Size) -> Tensor:
        assert tensor is not None
        return tensor

    def _metrics_from_last_stage(self, metrics: MetricParts | None) -> MetricParts:
        assert metrics is not None
        return metrics


class PolicyBackend(TrainedModel, Generic[RoutingT]):
    """A policy whose passes are the same on every backend; see abrun.trainer.backends.Backend.

    A backend implements the forward pass of one micro-batch (`_forward`) and the order of forward and
    backward passes (`_run`).
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.settings, self.ranks = policy, ranks
        self.around_forward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def compute_logprobs(self, batch: Sequences) -> Tensor:
        return self._infer_logprobs(batch)[0]

    def compute_logprobs_and_routes(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        logprobs, records, microbatches = self._infer_logprobs(batch)
        routes = self._collect_routes(records)
        return logprobs, microbatches.gather_rows(routes) if routes else logprobs.new_zeros(
            *logprobs.shape, 0
        )

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        coefficient = self.settings.router_aux_loss_coefficient
        # The auxiliary loss needs the load of the global batch, and so a separate pass over all
        # micro-batches.
        aux_loss_inputs = (
            (coefficient, self._reduce_load(self._infer_logprobs(batch)[1])) if coefficient else None
        )
        records: list[RoutingT] = []

        def forward(microbatch: Microbatch[B]) -> tuple[Tensor, MetricParts | None]:
            token_loss = self._make_token_loss(microbatch, objective)
            with self.around_forward():
                output = self._forward(*microbatch, objective.entropies, token_loss, records, aux_loss_inputs)
                if not isinstance(output, HeadOutput):
                    return output, None
                losses = objective.losses(microbatch.batch, output.logprobs, output.entropies)
                loss = losses.shares.sum() if output.loss is None else output.loss
                if output.aux_loss is not None:
                    loss = loss + output.aux_loss
            output = output.map_tokens(Tensor.detach)
            with torch.no_grad():
                return loss, objective.metrics(microbatch.batch, output.logprobs, output.entropies, losses)

        metrics = self._accumulate(self._make_microbatches(batch), forward)
        return merge_keys(metrics, self._reduce_load(records).metrics()) if records else metrics

    def save(self, directory: Path) -> None:
        weights = {}
        for name, weight in self._full_weights():
            if self.ranks.is_first:
                weights[name] = weight.cpu()
        if self.ranks.is_first:
            save_network(self._network, directory, weights.items())

    @property
    @abstractmethod
    def _network(self) -> Any:
        """Return the transformers network whose names the weights are exported under."""

    @abstractmethod
    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full parameter under the network's own name. Collective."""

    @abstractmethod
    def _forward(
        self,
        batch: Sequences,
        packing: Packing | None,
        entropies: EntropyMode,
        token_loss: TokenLoss | None,
        records: list[RoutingT],
        aux_loss_inputs: AuxLossInputs | None,
    ) -> HeadOutput | Tensor:
        """Return log-probs and entropies [b, s], or hidden states on a stage before the last.

        With experts, append the micro-batch's routing to `records`.
        """

    @abstractmethod
    def _reduce_load(self, records: list[RoutingT]) -> RouterLoad:
        """Return the load of the global batch: all passes, layers and ranks. Collective."""

    @abstractmethod
    def _collect_routes(self, records: list[RoutingT]) -> list[Tensor]:
        """Return each micro-batch's routes [b, s, L * K]; an empty list without experts. Collective."""

    def _infer_logprobs(self, batch: B) -> tuple[Tensor, list[RoutingT], Microbatches[B]]:
        """Return log-probs [B, S] without gradient, the routing of the micro-batches, and these."""
        records: list[RoutingT] = []

        def forward(microbatch: Microbatch[B]) -> Tensor:
            output = self._forward(*microbatch, "none", None, records, None)
            return output.logprobs if isinstance(output, HeadOutput) else output

        microbatches = self._make_microbatches(batch)
        return self._infer(microbatches, forward), records, microbatches

    def _make_token_loss(self, microbatch: Microbatch[B], objective: Objective[B]) -> TokenLoss | None:
        """Return a loss of slices of tokens for one-pass heads, which never hold all log-probs at once."""
        if not self.settings.logprobs.one_pass:
            return None
        batch, packing = microbatch
        tokens = (batch.mapped(packing.pack) if packing else batch).predicted_tokens()
        if packing and packing.split:
            tokens = tokens.mapped(packing.split.to_local)

        def losses(logprobs: Tensor, entropy: Tensor | None, token_slice: slice) -> Tensor:
            return objective.losses(tokens[token_slice], logprobs, entropy).shares

        return losses


class ValueBackend(TrainedModel):
    """A value model whose passes are the same on every backend; see abrun.trainer.backends.ValueModel."""

    right_shift: bool

    def compute_values(self, batch: Sequences) -> Tensor:
        return self._infer(self._make_microbatches(batch), lambda microbatch: self._forward(*microbatch))

    def forward_backward(self, batch: B, objective: ValueModelObjective[B]) -> MetricParts:
        def forward(microbatch: Microbatch[B]) -> tuple[Tensor, MetricParts | None]:
            values = self._forward(*microbatch)
            if not self.is_last_stage:
                return values, None
            losses = objective.losses(microbatch.batch, values)
            loss = losses.shares.sum()
            with torch.no_grad():
                return loss, objective.metrics(microbatch.batch, values.detach(), losses)

        return self._accumulate(self._make_microbatches(batch), forward)

    @abstractmethod
    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        """Return values [b, s] float32, or hidden states on a stage before the last."""

    def _to_rows(self, values: Tensor, packing: Packing | None) -> Tensor:
        """Return values as rows [b, s]. The right shift, after unpacking, stays within a sequence."""
        values = packing.unpack(packing.to_full(values)) if packing else values
        return shift_right(values) if self.right_shift else values


def empty_adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state that torch's AdamW has before its first step, to load another one into."""
    return {
        "step": torch.zeros((), device=parameter.device),  # the fused AdamW needs it there
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


# Gradient norms on the CPU, where torch's own norm adds float32 squares one by one.
#
# That loses 0.2% for an embedding of 28 million elements, and more on one rank than on several.

CHUNK_ELEMENTS = 1 << 18  # converted at a time, so that the copies stay in the cache


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, on the CPU: [] float64."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
            values = chunk.double()
            total += torch.dot(values, values)
    return total
