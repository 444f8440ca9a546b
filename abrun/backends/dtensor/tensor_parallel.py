"""Tensor parallelism: a decoder's matrices cut over ranks, by heads, features and vocabulary.

Letters: B rows, S positions, H hidden size, V vocabulary, P ranks of the tensor-parallel group.

Every parameter is a DTensor over these ranks, so that FSDP, clipping and AdamW know what each rank holds; all
products are of plain tensors, each rank's own part. Rows come in whole and hidden states go out whole. What
enters a block's columns is the same on all ranks, so its gradient is added up there; what leaves its rows is
a partial sum. With sequence parallelism the states between blocks are cut by positions, [B, S/P, H], and the
two sums become a gather and a scatter. A router sees all positions on every rank, which then computes the
same; what it and its experts make of them is cut again. Positions are filled up to a multiple of P with
zeros, which nothing reads: attention, routers, and whoever takes the states, cut them off.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from abrun.backends.collectives import gathered, scattered, summed
from abrun.backends.head import padded_shard
from abrun.errors import RecipeError
from abrun.models import Facts
from abrun.recipe.model_fit import PLAIN_DECODERS, heads_misfit

FIELD = "policy.backend.tensor_parallel"
# Says of each parameter that is gathered over two meshes that it takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class TensorParallel:
    """Spreads networks over the ranks of one tensor-parallel group."""

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()
        self._mesh, self._rank = mesh, mesh.get_local_rank()
        self._sequence_parallel = self._cut = sequence_parallel
        # Of what acts on a rank's own positions alone, with sequence parallelism: of some positions.
        self._of_states: Placement = Partial() if sequence_parallel else Replicate()

    def spread(self, network: Any, facts: Facts, *, experts_are_spread: bool) -> None:
        """Cut the network's parameters, in place, and let each rank compute with its own.

        Experts are whole on every rank, whose tokens are the same, unless they are spread otherwise. Raises
        RecipeError where the network does not fit so many ranks.
        """
        check_fits(network, self.size, sequence_parallel=self._sequence_parallel)
        base: Any = facts.base
        tied = facts.head.weight is base.embed_tokens.weight
        self._embedding(base.embed_tokens)
        if tied:
            facts.head.weight = base.embed_tokens.weight
        else:
            self._distribute(facts.head, Shard(0))
        for layer in facts.layers:
            parts: Any = layer
            self._attention(parts.self_attn)
            if hasattr(parts.mlp, "gate_proj"):
                self._mlp(parts.mlp)
            else:
                self.replicate(parts.mlp.gate)
                if not experts_are_spread:
                    self.replicate(parts.mlp.experts)
                self._experts(parts)
            self.replicate(parts.input_layernorm, self._of_states)
            self.replicate(parts.post_attention_layernorm, self._of_states)
        self.replicate(base.norm, self._of_states)
        self._base(base)

    def replicate(self, module: nn.Module, gradient: Placement | None = None) -> None:
        """Whole parameters on every rank, whose gradient is alike on all of them, or their sum (Partial)."""
        for part in module.modules():
            if part._parameters:
                self._distribute(part, Replicate())
                _compute_locally(part, gradient or Replicate())

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Inside, states are not cut by positions: for decoding, which has one a step."""
        self._cut = False
        try:
            yield
        finally:
            self._cut = self._sequence_parallel

    def enter(self, states: Tensor, length: int | None = None) -> Tensor:  # -> [B, S, H], S = length
        """States between blocks as every rank needs them whole; their gradient is summed over the ranks."""
        whole: Any = _Enter.apply(states, self.group, self._cut)
        return whole if length in (None, whole.shape[1]) else whole[:, :length]

    def leave(self, partial: Tensor) -> Tensor:  # [B, S, H]
        """The sum of what each rank has, as states between blocks."""
        missing = -partial.shape[1] % self.size
        if self._cut and missing:
            partial = nn.functional.pad(partial, (0, 0, 0, missing))
        summed: Any = _Leave.apply(partial, self.group, self._cut)
        return summed

    def _base(self, base: Any) -> None:
        """Positions are counted from the whole sequence, and its hidden states go out whole.

        Each rank's gradient of them counts as a share: together they are summed.
        """
        forward = base.forward

        def run(input_ids: Tensor, position_ids: Tensor | None = None, **settings: Any) -> Any:
            length = input_ids.shape[1]
            if position_ids is None:
                position_ids = torch.arange(length, device=input_ids.device)[None]
            output = forward(input_ids=input_ids, position_ids=position_ids, **settings)
            # FSDP's hook on what its module returns does not bear a view.
            output.last_hidden_state = self.enter(output.last_hidden_state, length).clone()
            return output

        base.forward = run

    def _embedding(self, module: Any) -> None:
        """Rows of the vocabulary; a token's states come from the rank that has its row."""
        size = module.num_embeddings
        self._distribute(module, Shard(0))
        rows = -(-size // self.size)
        first, padding = self._rank * rows, module.padding_idx
        own_padding = padding - first if padding is not None and first <= padding < first + rows else None

        def run(token_ids: Tensor) -> Tensor:
            row = token_ids - first
            here = (row >= 0) & (row < rows)
            weight = padded_shard(module.weight.to_local(), size, self.size)
            found = nn.functional.embedding(row.clamp(0, rows - 1), weight, own_padding)
            return self.leave(torch.where(here[..., None], found, 0.0))

        module.forward = run

    def _attention(self, module: Any) -> None:
        """Heads; where there are more ranks than key heads, ranks share one."""
        config, forward = module.config, module.forward
        heads = config.num_key_value_heads
        self._columns(module.q_proj)
        for projection in (module.k_proj, module.v_proj):
            if heads < self.size:
                self._shared_columns(projection, heads)
            else:
                self._columns(projection)
        self._rows(module.o_proj)
        for name in ("q_norm", "k_norm"):  # of each head, and so of other heads on each rank
            if hasattr(module, name):
                self.replicate(getattr(module, name), Partial())
        module.num_key_value_groups = config.num_attention_heads // max(heads, self.size)

        def run(hidden_states: Tensor, position_embeddings: Any, **settings: Any) -> Any:
            length = position_embeddings[0].shape[-2]  # of the rotation of each position
            states = self.enter(hidden_states, length)
            return forward(hidden_states=states, position_embeddings=position_embeddings, **settings)

        module.forward = run

    def _mlp(self, module: Any) -> None:
        forward = module.forward
        self._columns(module.gate_proj)
        self._columns(module.up_proj)
        self._rows(module.down_proj)
        module.forward = lambda states: forward(self.enter(states))

    def _experts(self, layer: Any) -> None:
        """A router and its experts: every rank computes the same, of all positions, and takes its own."""
        of_layer, of_mlp, length = layer.forward, layer.mlp.forward, 0

        def run_layer(hidden_states: Tensor, *, position_embeddings: Any, **settings: Any) -> Any:
            nonlocal length  # not counting those that fill up
            length = position_embeddings[0].shape[-2]
            return of_layer(hidden_states, position_embeddings=position_embeddings, **settings)

        def run(states: Tensor) -> Tensor:
            if not self._cut:
                return of_mlp(states)
            whole: Any = _Joined.apply(states, self.group)
            output = of_mlp(whole[:, :length].contiguous())
            own: Any = _Own.apply(nn.functional.pad(output, (0, 0, 0, -length % self.size)), self.group)
            return own

        layer.forward, layer.mlp.forward = run_layer, run

    def _columns(self, module: nn.Module) -> None:
        """Some features of the output."""
        self._distribute(module, Shard(0))
        _compute_locally(module)

    def _shared_columns(self, module: Any, heads: int) -> None:
        """One head's features of the output, that several ranks have."""
        size = module.out_features // heads
        head = self._rank * heads // self.size
        own = slice(head * size, (head + 1) * size)
        self._distribute(module, Replicate())

        def run(states: Tensor) -> Tensor:
            weight = module.weight.to_local(grad_placements=[Partial()])[own]
            bias = None if module.bias is None else module.bias.to_local(grad_placements=[Partial()])[own]
            return nn.functional.linear(states, weight, bias)

        module.forward = run

    def _rows(self, module: Any) -> None:
        """Some features of the input; the bias is added once, to the sum."""
        self._distribute(module, Shard(1), bias=Replicate())

        def run(states: Tensor) -> Tensor:
            output = self.leave(nn.functional.linear(states, module.weight.to_local()))
            if module.bias is None:
                return output
            return output + module.bias.to_local(grad_placements=[self._of_states])

        module.forward = run

    def _distribute(self, module: nn.Module, placement: Placement, *, bias: Placement | None = None) -> None:
        """Cut a module's own parameters. Each rank has them all, alike, so nothing is sent."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            where = bias if bias and name == "bias" else placement
            cut = distribute_tensor(parameter.detach(), self._mesh, [where], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def check_fits(network: Any, size: int, *, sequence_parallel: bool) -> None:
    """Raises RecipeError where a network's heads cannot be cut over `size` ranks, or nobody knows how."""
    config, kind = network.config, type(network).__name__
    if config.model_type not in PLAIN_DECODERS:
        known = ", ".join(PLAIN_DECODERS)
        raise RecipeError(
            f"{FIELD}: got {size} with {kind}, which there is no plan for; use 1, or a model of {known}"
        )
    if misfit := heads_misfit(config.to_dict(), size):
        raise RecipeError(misfit)
    if sequence_parallel and {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        raise RecipeError(
            f"policy.backend.sequence_parallel: got true with {kind}, some layers of which have no full "
            "attention; use sequence_parallel: false"
        )


def own_part(parameter: Tensor) -> Tensor:
    """What this rank computes with: its part of a parameter that is cut, or all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _compute_locally(module: Any, gradient: Placement | None = None) -> None:
    """Let a module's own forward pass find plain tensors under its parameters' names.

    `gradient`: how each rank's gradients make the parameter's; None: as the parameter is cut.
    """
    forward, placements = module.forward, [gradient] if gradient else None

    def run(*args: Any, **settings: Any) -> Any:
        own = {
            name: parameter.to_local(grad_placements=placements)
            for name, parameter in module.named_parameters(recurse=False)
        }
        vars(module).update(own)  # found before the parameters
        try:
            return forward(*args, **settings)
        finally:
            for name in own:
                del vars(module)[name]

    module.forward = run


class _Enter(torch.autograd.Function):
    """Nothing, or the gather of positions; backward the sum over ranks, or its scatter."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup, cut: bool) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return gathered(states, 1, group) if cut else states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scattered(gradient, 1, ctx.group) if ctx.cut else summed(gradient, ctx.group), None, None


class _Leave(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup, cut: bool) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return scattered(states, 1, group) if cut else summed(states, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, 1, ctx.group) if ctx.cut else gradient, None, None


class _Joined(torch.autograd.Function):
    """The gather of positions for what every rank computes alike; backward each takes its own's gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(own, 1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own_positions(gradients[0], ctx.group), None


class _Own(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_positions(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], 1, ctx.group), None


def _own_positions(whole: Tensor, group: ProcessGroup) -> Tensor:  # [B, S, H] -> [B, S/P, H]
    return whole.chunk(group.size(), dim=1)[group.rank()].contiguous()
