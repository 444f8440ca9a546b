"""Passes over microbatches through this rank's pipeline stage, on megatron-core's 1F1B schedule.

Every rank of a replica has the same rows, so only hidden states are sent between stages.
Letters: B sequences, S positions, H hidden size; T tokens of a packed stream.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

from abrun.recipe.policy import Megatron
from abrun.trainer.backends import B
from abrun.trainer.backends.megatron.cpu import emulate_cuda
from abrun.trainer.backends.megatron.groups import is_last_stage, tensor_group
from abrun.trainer.backends.megatron.library import suppress_warnings
from abrun.trainer.backends.megatron.network import MicrobatchParams
from abrun.trainer.backends.megatron.routing import MicrobatchRouting
from abrun.trainer.backends.microbatches import Microbatch, Microbatches
from abrun.trainer.backends.packing import Packing
from abrun.trainer.backends.policy import TrainedModel
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.rl.batch import sequence_lengths
from abrun.trainer.rl.metrics import MetricParts


class Stages:
    """Passes of modules through this rank's pipeline stage, and broadcasts between stages."""

    def __init__(self, settings: Megatron, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks

    def run(
        self,
        module: Any,
        microbatches: Microbatches[B],
        forward: Callable[[Microbatch[B]], Tensor],
        *,
        backward: bool,
    ) -> None:
        """Call `forward` on each microbatch; with `backward`, backpropagate from its output. Collective.

        The output is a loss [] on the last stage, and on others the hidden states for the next stage.
        """

        def step(remaining: Any, _: Any) -> tuple[Tensor, Any]:
            return forward(next(remaining)), _return_undivided

        with emulate_cuda(self._ranks.device), suppress_warnings():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(microbatches),
                model=[module],
                num_microbatches=len(microbatches),
                seq_length=1,  # unused, since lengths vary
                micro_batch_size=1,
                forward_only=not backward,
            )

    def hidden_states(
        self,
        module: Any,
        token_ids: Tensor,
        packing: Packing | None,
        routing: MicrobatchRouting | None = None,
    ) -> Tensor:
        """Return the stage's output for right-padded rows `token_ids` [B, S].

        With `packing`, they are packed into one stream, and the output covers this rank's T/P tokens of it,
        for P context-parallel ranks. With sequence parallelism, positions are padded to a multiple of the
        tensor-parallel ranks, and the states are sharded by position; `gather_for_sharded_head` and
        `gather_for_replicated_head` gather them.
        """
        if packing is None:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        else:
            token_ids = packing.to_local(packing.pack(token_ids))
            positions = packing.to_local(packing.position_ids)[0]
        num_padding = self._num_padding(token_ids.shape[1])
        params = MicrobatchParams(
            positions=pad(positions, (0, num_padding)), packing=packing, routing=routing
        )
        hidden = module(pad(token_ids, (0, num_padding)), None, None, packed_seq_params=params)
        return hidden.contiguous()  # required to send it to the next stage

    def token_positions(
        self, token_mask: Tensor, packing: Packing | None
    ) -> Tensor:  # [B, S] bool -> [T] int64
        """Return the index in the flattened rows of each token of this rank's layers; -1 for padding."""
        if packing is None:
            rows = torch.arange(token_mask.numel(), device=token_mask.device).view(token_mask.shape)
            positions = torch.arange(token_mask.shape[1], device=token_mask.device)
            token_positions = torch.where(positions < sequence_lengths(token_mask)[:, None], rows, -1)
        else:
            split = packing.split
            token_positions = (
                packing.index[None] if split is None else split.to_local(packing.index[None], -1)
            )
        token_positions = pad(
            token_positions, (0, self._num_padding(token_positions.shape[1])), value=-1
        ).t()  # positions first
        if self._settings.sequence_parallel:
            token_positions = token_positions.chunk(tensor_group().size())[tensor_group().rank()]
        return token_positions.flatten()

    def full_states(self, output: Any, length: int) -> Tensor:  # -> [B, length, H]
        """Return the full states, without gradient, of a module's output [S, B, H], alone or with a bias."""
        states = (output[0] if isinstance(output, tuple) else output).detach()
        if self._settings.sequence_parallel:
            states = gather_from_sequence_parallel_region(states.contiguous(), group=tensor_group())
        return states[:length].transpose(0, 1)

    def gather_for_sharded_head(self, hidden: Tensor, length: int) -> Tensor:  # -> [B, length, H]
        """Return the last stage's full states for a head with a sharded vocabulary.

        Each rank's gradient of them is a partial sum, from its vocabulary shard; the backward pass sums them.
        """
        if not self._settings.sequence_parallel:
            return copy_to_tensor_model_parallel_region(hidden, group=tensor_group())
        return self._gather_sequence(hidden, length, partial_gradients=True)

    def gather_for_replicated_head(self, hidden: Tensor, length: int) -> Tensor:  # -> [B, length, H]
        """Return the last stage's full states for a head that is replicated over tensor-parallel ranks.

        Each rank has their full gradient.
        """
        if not self._settings.sequence_parallel:
            return hidden
        return self._gather_sequence(hidden, length, partial_gradients=False)

    def broadcast_metrics(self, metrics: MetricParts | None) -> MetricParts:
        """Return the last stage's metrics on every stage; others pass None. Collective over the pipeline."""
        if self._ranks.pipeline is None:
            assert metrics is not None
            return metrics
        floats = (
            None
            if metrics is None
            else [_to_floats(values) for values in (metrics.sums, metrics.maxima, metrics.minima)]
        )
        box: list[Any] = [floats]
        dist.broadcast_object_list(box, src=self._last_rank(), group=self._ranks.pipeline)
        sums, maxima, minima = ({k: self._to_tensor(v) for k, v in values.items()} for values in box[0])
        return MetricParts(sums=sums, maxima=maxima, minima=minima)

    def broadcast_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all stages, in stage order, on every stage. Collective over the pipeline."""
        pipeline = self._ranks.pipeline
        if pipeline is None:
            yield from weights
            return
        for stage in range(pipeline.size()):
            source, is_mine = dist.get_global_rank(pipeline, stage), stage == pipeline.rank()
            while True:
                name, weight = next(weights, ("", None)) if is_mine else ("", None)
                box = [None if weight is None else (name, weight.shape, weight.dtype)]
                dist.broadcast_object_list(box, src=source, group=pipeline)
                if box[0] is None:
                    break
                name, shape, dtype = box[0]
                tensor = (
                    torch.empty(shape, dtype=dtype, device=self._ranks.device) if weight is None else weight
                )
                dist.broadcast(tensor.contiguous() if is_mine else tensor, src=source, group=pipeline)
                yield name, tensor

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Copy the last stage's tensor into `tensor` on every stage. Collective over the pipeline."""
        if self._ranks.pipeline is not None:
            dist.broadcast(tensor, src=self._last_rank(), group=self._ranks.pipeline)
        return tensor

    def _num_padding(self, length: int) -> int:
        """Return the number of padding tokens that sequence parallelism needs."""
        return -length % self._settings.tensor_parallel if self._settings.sequence_parallel else 0

    def _to_tensor(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._ranks.device)

    def _last_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_last_rank()

    def _gather_sequence(self, hidden: Tensor, length: int, *, partial_gradients: bool) -> Tensor:
        tokens_first = hidden.transpose(0, 1).contiguous()  # [S / tensor ranks, B, H]
        gathered = gather_from_sequence_parallel_region(
            tokens_first, tensor_parallel_output_grad=partial_gradients, group=tensor_group()
        )
        return gathered[:length].transpose(0, 1)


class StagedModel(TrainedModel):
    """A model whose passes run through this rank's stage of `_module`."""

    _stages: Stages
    _module: Any

    @property
    def is_last_stage(self) -> bool:
        return is_last_stage()

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        self._stages.run(self._module, microbatches, forward, backward=backward)

    def _tensor_from_last_stage(self, tensor: Tensor | None, shape: torch.Size) -> Tensor:
        zeros = torch.zeros(shape, device=self.ranks.device)
        return self._stages.broadcast_tensor(zeros if tensor is None else tensor)

    def _metrics_from_last_stage(self, metrics: MetricParts | None) -> MetricParts:
        return self._stages.broadcast_metrics(metrics)


def _return_undivided(output: Tensor, non_loss_data: bool = False) -> tuple[Tensor, Tensor, None]:
    """Return the loss in the form that the schedule does not divide: with a token count of 0."""
    return output, torch.zeros((), dtype=torch.int, device=output.device), None


def _to_floats(values: dict[str, Tensor]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items()}
