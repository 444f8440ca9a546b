"""The conversion of weights between Hugging Face's tensors and megatron-core's parameters, bit for bit.

Letters: G groups of query heads that share keys, Q query heads in each, D width of a head, H hidden size, I
width of an MLP, E experts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.trainer.backends.megatron.groups import expert_group, tensor_group
from abrun.trainer.backends.megatron.network import head_dim
from abrun.trainer.backends.shards import Piece, ShardSpec
from abrun.trainer.models import read_slice

VALUE_HEAD = "value_head"  # module of a value model, without a counterpart in Hugging Face's networks
LAYER, EXPERT = "decoder.layers.", "mlp.experts.local_experts."


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """The Hugging Face tensors of a megatron-core parameter, and its tensor-parallel sharding."""

    hf_names: tuple[str, ...]
    sharding: Literal["rows", "columns", "rows_of_halves", "not"] = "not"
    expert: int | None = None  # index into the E experts that one Hugging Face tensor holds


class WeightNames:
    """The mapping between one model's parameters on this rank and Hugging Face's tensors."""

    def __init__(self, model: Any, network: Any) -> None:
        self._model: Any = model
        self._config: Any = network.config
        self._shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
        self._head_dim = head_dim(self._config)
        self._tensor_group, self._expert_group = tensor_group(), expert_group()
        self._parameters: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if not name.startswith(VALUE_HEAD)
        }

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the modules of this stage whose outputs are states, under Hugging Face's names, by depth."""
        if self._model.pre_process:
            yield "model.embed_tokens", self._model.embedding
        for layer in self._model.decoder.layers:
            prefix = f"model.layers.{layer.layer_number - 1}"
            for name, hf_name in _LAYER_MODULES.items():
                yield f"{prefix}.{hf_name}", getattr(layer, name)
            yield prefix, layer
        if self._model.decoder.final_layernorm is not None:
            yield "model.norm", self._model.decoder.final_layernorm

    @torch.no_grad()
    def load(self, network: Any, assign: Callable[[str, Tensor], None]) -> None:
        """Assign this rank's shard of each parameter, reading nothing else of the `network`."""
        for name in self._parameters:
            spec = self.shard_spec(name)
            assign(
                name,
                spec.assemble([read_slice(network, hf_name, piece.slices) for hf_name, piece in spec.pieces]),
            )

    def shard_spec(self, name: str) -> ShardSpec:
        """Return the spec of this rank's shard of a parameter."""
        source = self._find_source(name)
        return ShardSpec(
            pieces=tuple(
                (hf_name, self._local_piece(self._shapes[hf_name], source)) for hf_name in source.hf_names
            ),
            shape=tuple(self._parameters[name].shape),
            head_dim=self._qkv_head_dim(name),
        )

    @torch.no_grad()
    def full_weights(self, read_local: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield this stage's full weights under Hugging Face's names. Collective over the stage's ranks.

        `read_local` returns this rank's shard of a parameter.
        """
        for name in self._parameters:
            source = self._find_source(name)
            if EXPERT in name:
                if f"{EXPERT}0." in name:
                    yield source.hf_names[0], self._all_experts(name, read_local)
            elif not self._is_embedding_copy(name):
                full_weight = _unshard(_all_gather(read_local(name), self._tensor_group), source)
                pieces = tuple((hf_name, Piece.full(self._shapes[hf_name])) for hf_name in source.hf_names)
                spec = ShardSpec(
                    pieces=pieces, shape=tuple(full_weight.shape), head_dim=self._qkv_head_dim(name)
                )
                yield from zip(source.hf_names, spec.split(full_weight), strict=True)

    def _qkv_head_dim(self, name: str) -> int | None:
        """Return the head size if the parameter combines query, key and value projections, else None."""
        return self._head_dim if "linear_qkv" in name else None

    def _is_embedding_copy(self, name: str) -> bool:
        """Return whether this is the last stage's copy of a tied embedding, which the first stage exports."""
        return name == "output_layer.weight" and self._config.tie_word_embeddings

    def _all_experts(self, first_name: str, read_local: Callable[[str], Tensor]) -> Tensor:  # [E, ...]
        prefix, _, suffix = first_name.partition(f"{EXPERT}0.")
        count = self._config.num_experts // self._expert_group.size()
        local = torch.stack([read_local(f"{prefix}{EXPERT}{index}.{suffix}") for index in range(count)])
        return torch.cat(_all_gather(local, self._expert_group))

    def _local_piece(self, shape: tuple[int, ...], source: ParameterSource) -> Piece:
        slices = [slice(0, size) for size in shape]
        if source.expert is not None:
            slices[0] = slice(source.expert, source.expert + 1)
        elif source.sharding != "not":
            dim = 1 if source.sharding == "columns" else 0
            size = -(-shape[dim] // self._tensor_group.size())
            start = min(self._tensor_group.rank() * size, shape[dim])
            slices[dim] = slice(start, min(start + size, shape[dim]))
        return Piece(shape, tuple(slices))

    def _find_source(self, name: str) -> ParameterSource:
        if not name.startswith(LAYER):
            embedding = "model.embed_tokens.weight"
            head = embedding if self._config.tie_word_embeddings else "lm_head.weight"
            return {
                "embedding.word_embeddings.weight": ParameterSource((embedding,), "rows"),
                "decoder.final_layernorm.weight": ParameterSource(("model.norm.weight",)),
                "output_layer.weight": ParameterSource((head,), "rows"),
            }[name]
        index, _, layer_name = name.removeprefix(LAYER).partition(".")
        number = self._model.decoder.layers[int(index)].layer_number - 1  # index over all stages
        prefix = f"model.layers.{number}."
        if layer_name.startswith(EXPERT):
            local, kind = layer_name.removeprefix(EXPERT).split(".")[:2]
            first_expert = self._expert_group.rank() * self._config.num_experts // self._expert_group.size()
            projection = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[kind]
            return ParameterSource((f"{prefix}mlp.experts.{projection}",), expert=first_expert + int(local))
        source = _LAYER_SOURCES[layer_name]
        return ParameterSource(tuple(prefix + hf_name for hf_name in source.hf_names), source.sharding)


_LAYER_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention": "self_attn",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp": "mlp",
}
_LAYER_SOURCES = {
    "input_layernorm.weight": ParameterSource(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ParameterSource(("post_attention_layernorm.weight",)),
    **{
        f"self_attention.linear_qkv.{kind}": ParameterSource(
            tuple(f"self_attn.{letter}_proj.{kind}" for letter in "qkv"), "rows"
        )
        for kind in ("weight", "bias")
    },
    "self_attention.linear_proj.weight": ParameterSource(("self_attn.o_proj.weight",), "columns"),
    "self_attention.q_layernorm.weight": ParameterSource(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ParameterSource(("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": ParameterSource(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows_of_halves"
    ),
    "mlp.linear_fc2.weight": ParameterSource(("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": ParameterSource(("mlp.gate.weight",)),
}


def _unshard(shards: Sequence[Tensor], source: ParameterSource) -> Tensor:
    if source.sharding == "not":
        return shards[0]
    if source.sharding == "rows_of_halves":
        return torch.cat(
            [half for halves in zip(*(shard.chunk(2) for shard in shards), strict=True) for half in halves]
        )
    return torch.cat(list(shards), dim=1 if source.sharding == "columns" else 0)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensor of every rank of the group, in rank order. Collective."""
    tensor = tensor.detach().contiguous()
    if group.size() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor, group=group)
    return tensors
