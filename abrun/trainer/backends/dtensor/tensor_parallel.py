"""Tensor parallelism: a decoder's matrices sharded over ranks, by heads, features and vocabulary.

Letters: B rows, S positions, H hidden size, V vocabulary, P ranks of the tensor-parallel group.

Every parameter is a DTensor over these ranks, so that FSDP, clipping and AdamW know each rank's shard. All
matmuls run on plain tensors, the local shards. Input rows and output hidden states are full. The input of a
column-parallel matmul is the same on all ranks, and its gradient is summed over them; the output of a
row-parallel matmul is a partial sum. With sequence parallelism, the states between blocks are sharded by
position, [B, S/P, H], and the two sums become an all-gather and a reduce-scatter. Every rank's router sees
all positions and computes the same; the output of its experts is sharded again. Positions are padded with
zeros to a multiple of P. Attention, routers and the users of the hidden states drop the padding.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from abrun.errors import RecipeError
from abrun.recipe.families import PLAIN_DECODERS, heads_misfit
from abrun.trainer.backends.head import pad_vocab_shard
from abrun.trainer.backends.ranks import all_gather, all_reduce_sum, reduce_scatter
from abrun.trainer.models.families import Facts

KEY = "policy.backend.tensor_parallel"
# It would warn for every parameter gathered over two mesh dimensions that this takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class TensorParallel:
    """Shards networks over the ranks of one tensor-parallel group."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()
        self._mesh, self._rank = mesh, mesh.get_local_rank()
        self._sequence_parallel = self._shards_positions = sequence_parallel
        # Gradient placement of parameters applied to the states between blocks. With sequence parallelism
        # each rank's gradient covers its own positions only, so it is a partial sum.
        self._state_gradient: Placement = Partial() if sequence_parallel else Replicate()

    def shard_network(self, network: Any, facts: Facts, *, experts_are_sharded: bool) -> None:
        """Shard the network's parameters in place and let each rank compute with its shards.

        Experts are replicated, unless expert parallelism shards them: tensor-parallel ranks have the same
        tokens. Raises RecipeError if the network does not fit this number of ranks.
        """
        check_fits(network, self.size, sequence_parallel=self._sequence_parallel)
        base: Any = facts.base
        is_tied = facts.head.weight is base.embed_tokens.weight
        self._shard_embedding(base.embed_tokens)
        if is_tied:
            facts.head.weight = base.embed_tokens.weight
        else:
            self._distribute(facts.head, Shard(0))
        for layer in facts.layers:
            block: Any = layer
            self._shard_attention(block.self_attn)
            if hasattr(block.mlp, "gate_proj"):
                self._shard_mlp(block.mlp)
            else:
                self.replicate(block.mlp.gate)
                if not experts_are_sharded:
                    self.replicate(block.mlp.experts)
                self._replicate_experts(block)
            self.replicate(block.input_layernorm, self._state_gradient)
            self.replicate(block.post_attention_layernorm, self._state_gradient)
        self.replicate(base.norm, self._state_gradient)
        self._shard_base(base)

    def replicate(self, module: nn.Module, gradient: Placement | None = None) -> None:
        """Replicate parameters; their gradients are equal on all ranks, or, with Partial, are summed."""
        for submodule in module.modules():
            if submodule._parameters:
                self._distribute(submodule, Replicate())
                _use_local_parameters(submodule, gradient or Replicate())

    @contextmanager
    def with_full_sequences(self) -> Iterator[None]:
        """Do not shard states by position while the context is open: decoding has one position a step."""
        self._shards_positions = False
        try:
            yield
        finally:
            self._shards_positions = self._sequence_parallel

    def enter(self, states: Tensor, length: int | None = None) -> Tensor:  # -> [B, S, H], S = length
        """Return the full states at the start of a block; their gradient is summed over the ranks."""
        full_states: Any = _EnterBlock.apply(states, self.group, self._shards_positions)
        return full_states if length in (None, full_states.shape[1]) else full_states[:, :length]

    def leave(self, partial: Tensor) -> Tensor:  # [B, S, H]
        """Return the sum of the ranks' partial outputs, in the layout of states between blocks."""
        num_padding = -partial.shape[1] % self.size
        if self._shards_positions and num_padding:
            partial = nn.functional.pad(partial, (0, 0, 0, num_padding))
        all_reduce_sum: Any = _LeaveBlock.apply(partial, self.group, self._shards_positions)
        return all_reduce_sum

    def full_states(self, states: Tensor, length: int) -> Tensor:  # -> [B, S, H], S = length
        """Return the full states between blocks, without gradient. Collective if they are sharded."""
        states = states.detach()
        return (all_gather(states, 1, self.group) if self._shards_positions else states)[:, :length]

    def _shard_base(self, base: Any) -> None:
        """Wrap the model so that positions count over the full sequence and hidden states are returned full.

        Gradients of the hidden states are summed over the ranks.
        """
        forward = base.forward

        def run(input_ids: Tensor, position_ids: Tensor | None = None, **settings: Any) -> Any:
            length = input_ids.shape[1]
            if position_ids is None:
                position_ids = torch.arange(length, device=input_ids.device)[None]
            output = forward(input_ids=input_ids, position_ids=position_ids, **settings)
            # FSDP's hook on a module's output does not support views.
            output.last_hidden_state = self.enter(output.last_hidden_state, length).clone()
            return output

        base.forward = run

    def _shard_embedding(self, module: Any) -> None:
        """Shard the vocabulary; a token's embedding comes from the rank that has its row."""
        size = module.num_embeddings
        self._distribute(module, Shard(0))
        rows = -(-size // self.size)
        first_row, padding = self._rank * rows, module.padding_idx
        local_padding = (
            padding - first_row if padding is not None and first_row <= padding < first_row + rows else None
        )

        def run(token_ids: Tensor) -> Tensor:
            row = token_ids - first_row
            is_local = (row >= 0) & (row < rows)
            weight = pad_vocab_shard(module.weight.to_local(), size, self.size)
            embedded = nn.functional.embedding(row.clamp(0, rows - 1), weight, local_padding)
            return self.leave(torch.where(is_local[..., None], embedded, 0.0))

        module.forward = run

    def _shard_attention(self, module: Any) -> None:
        """Shard attention by heads; if there are more ranks than key heads, several ranks share one."""
        config, forward = module.config, module.forward
        num_key_heads = config.num_key_value_heads
        self._shard_columns(module.q_proj)
        for projection in (module.k_proj, module.v_proj):
            if num_key_heads < self.size:
                self._share_columns(projection, num_key_heads)
            else:
                self._shard_columns(projection)
        self._shard_rows(module.o_proj)
        for name in (
            "q_norm",
            "k_norm",
        ):  # they apply per head, so each rank's gradient covers its heads only
            if hasattr(module, name):
                self.replicate(getattr(module, name), Partial())
        module.num_key_value_groups = config.num_attention_heads // max(num_key_heads, self.size)

        def run(hidden_states: Tensor, position_embeddings: Any, **settings: Any) -> Any:
            # The length without padding, because rotary embeddings cover real positions only
            length = position_embeddings[0].shape[-2]
            states = self.enter(hidden_states, length)
            return forward(hidden_states=states, position_embeddings=position_embeddings, **settings)

        module.forward = run

    def _shard_mlp(self, module: Any) -> None:
        forward = module.forward
        self._shard_columns(module.gate_proj)
        self._shard_columns(module.up_proj)
        self._shard_rows(module.down_proj)
        module.forward = lambda states: forward(self.enter(states))

    def _replicate_experts(self, layer: Any) -> None:
        """Let every rank compute a router and its experts on all positions, and keep its own positions."""
        layer_forward, mlp_forward, length = layer.forward, layer.mlp.forward, 0

        def run_layer(hidden_states: Tensor, *, position_embeddings: Any, **settings: Any) -> Any:
            nonlocal length  # without padding
            length = position_embeddings[0].shape[-2]
            return layer_forward(hidden_states, position_embeddings=position_embeddings, **settings)

        def run(states: Tensor) -> Tensor:
            if not self._shards_positions:
                return mlp_forward(states)
            full_states: Any = _GatherPositions.apply(states, self.group)
            output = mlp_forward(full_states[:, :length].contiguous())
            local_output: Any = _TakeLocalPositions.apply(
                nn.functional.pad(output, (0, 0, 0, -length % self.size)), self.group
            )
            return local_output

        layer.forward, layer.mlp.forward = run_layer, run

    def _shard_columns(self, module: nn.Module) -> None:
        """Shard a linear layer by output features."""
        self._distribute(module, Shard(0))
        _use_local_parameters(module)

    def _share_columns(self, module: Any, heads: int) -> None:
        """Let a rank compute one key or value head that it shares with other ranks."""
        size = module.out_features // heads
        head = self._rank * heads // self.size
        head_rows = slice(head * size, (head + 1) * size)
        self._distribute(module, Replicate())

        def run(states: Tensor) -> Tensor:
            weight = module.weight.to_local(grad_placements=[Partial()])[head_rows]
            bias = (
                None if module.bias is None else module.bias.to_local(grad_placements=[Partial()])[head_rows]
            )
            return nn.functional.linear(states, weight, bias)

        module.forward = run

    def _shard_rows(self, module: Any) -> None:
        """Shard a linear layer by input features; the bias is added once, to the sum."""
        self._distribute(module, Shard(1), bias=Replicate())

        def run(states: Tensor) -> Tensor:
            output = self.leave(nn.functional.linear(states, module.weight.to_local()))
            if module.bias is None:
                return output
            return output + module.bias.to_local(grad_placements=[self._state_gradient])

        module.forward = run

    def _distribute(self, module: nn.Module, placement: Placement, *, bias: Placement | None = None) -> None:
        """Shard a module's direct parameters. Every rank has the same full ones, so nothing is sent."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            parameter_placement = bias if bias and name == "bias" else placement
            shard = distribute_tensor(
                parameter.detach(), self._mesh, [parameter_placement], src_data_rank=None
            )
            module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def check_fits(network: Any, size: int, *, sequence_parallel: bool) -> None:
    """Raise RecipeError if the model family is unsupported or its heads do not divide over `size` ranks."""
    config, kind = network.config, type(network).__name__
    if config.model_type not in PLAIN_DECODERS:
        families = ", ".join(PLAIN_DECODERS)
        raise RecipeError(
            f"{KEY}: got {size} with {kind}, which is not supported; use 1, or a model of {families}"
        )
    if misfit := heads_misfit(config.to_dict(), size):
        raise RecipeError(misfit)
    if sequence_parallel and {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        raise RecipeError(
            f"policy.backend.sequence_parallel: got true with {kind}, which has layers without full "
            "attention; use sequence_parallel: false"
        )


def _use_local_parameters(module: Any, gradient: Placement | None = None) -> None:
    """Let a module's forward pass find plain local tensors under its parameters' names.

    `gradient` is the placement of the gradients; None: the same as the parameter's.
    """
    forward, placements = module.forward, [gradient] if gradient else None

    def run(*args: Any, **settings: Any) -> Any:
        local_parameters = {
            name: parameter.to_local(grad_placements=placements)
            for name, parameter in module.named_parameters(recurse=False)
        }
        vars(module).update(local_parameters)  # attributes take precedence over parameters
        try:
            return forward(*args, **settings)
        finally:
            for name in local_parameters:
                del vars(module)[name]

    module.forward = run


class _EnterBlock(torch.autograd.Function):
    """Identity, or all-gather of positions; backward all-reduce, or reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup, shards_positions: bool) -> Tensor:
        ctx.group, ctx.shards_positions = group, shards_positions
        return all_gather(states, 1, group) if shards_positions else states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.shards_positions:
            return reduce_scatter(gradient, 1, ctx.group), None, None
        return all_reduce_sum(gradient, ctx.group), None, None


class _LeaveBlock(torch.autograd.Function):
    """All-reduce, or reduce-scatter of positions; backward identity, or all-gather."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup, shards_positions: bool) -> Tensor:
        ctx.group, ctx.shards_positions = group, shards_positions
        return reduce_scatter(states, 1, group) if shards_positions else all_reduce_sum(states, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, 1, ctx.group) if ctx.shards_positions else gradient, None, None


class _GatherPositions(torch.autograd.Function):
    """All-gather of positions for computations that all ranks repeat; backward slices the local positions."""

    @staticmethod
    def forward(ctx: Any, local_states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(local_states, 1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _local_positions(gradients[0], ctx.group), None


class _TakeLocalPositions(torch.autograd.Function):
    """Slice of the local positions; backward all-gathers their gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _local_positions(states, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], 1, ctx.group), None


def _local_positions(states: Tensor, group: ProcessGroup) -> Tensor:  # [B, S, H] -> [B, S/P, H]
    return states.chunk(group.size(), dim=1)[group.rank()].contiguous()
