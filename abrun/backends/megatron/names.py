"""Weights under their Hugging Face names, and as megatron-core's parameters hold them: both ways, to the bit.

Letters: G groups of query heads that share keys, Q query heads in each, D width of a head, H hidden size, I
width of an MLP, E experts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.backends.megatron.groups import expert_group, tensor_group
from abrun.backends.megatron.network import head_width
from abrun.backends.pieces import Held, Piece
from abrun.models import read_slice

OF_HEAD = "value_head"  # of a critic, which no Hugging Face network has
LAYER, EXPERT = "decoder.layers.", "mlp.experts.local_experts."


@dataclass(frozen=True, slots=True)
class Place:
    """What a parameter of megatron-core is made of, and how tensor-parallel ranks share it."""

    sources: tuple[str, ...]  # Hugging Face names
    shared: Literal["rows", "columns", "rows_of_halves", "not"] = "not"
    expert: int | None = None  # of the E that are one tensor in Hugging Face's networks


class Names:
    """Of one model on this rank, by its Hugging Face configuration."""

    def __init__(self, model: Any, network: Any) -> None:
        self._model: Any = model
        self._config: Any = network.config
        self._shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
        self._width = head_width(self._config)
        self._tensor, self._experts = tensor_group(), expert_group()
        self._named: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if not name.startswith(OF_HEAD)
        }

    @torch.no_grad()
    def load(self, network: Any, assign: Callable[[str, Tensor], None]) -> None:
        """Assign this rank's part of each parameter by its name; nothing else of the `network` is read."""
        for name in self._named:
            held = self.held(name)
            assign(name, held.joined([read_slice(network, of, piece.slices) for of, piece in held.pieces]))

    def held(self, name: str) -> Held:
        """Of what this rank's part of a parameter is made."""
        place = self._place(name)
        return Held(
            pieces=tuple((source, self._own_piece(self._shapes[source], place)) for source in place.sources),
            shape=tuple(self._named[name].shape),
            width=self._width_of(name),
        )

    @torch.no_grad()
    def whole(self, mine: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """This stage's weights, from this rank's part of each. Collective over the stage's ranks."""
        for name in self._named:
            place = self._place(name)
            if EXPERT in name:
                if f"{EXPERT}0." in name:
                    yield place.sources[0], self._all_experts(name, mine)
            elif not self._is_copy(name):
                whole = _unshard(_gathered(mine(name), self._tensor), place)
                pieces = tuple((source, Piece.all_of(self._shapes[source])) for source in place.sources)
                held = Held(pieces=pieces, shape=tuple(whole.shape), width=self._width_of(name))
                yield from zip(place.sources, held.split(whole), strict=True)

    def _width_of(self, name: str) -> int | None:
        """Of a head, where queries, keys and values are one parameter."""
        return self._width if "linear_qkv" in name else None

    def _is_copy(self, name: str) -> bool:
        """Whether this is the last stage's copy of the embedding, which the first stage gives."""
        return name == "output_layer.weight" and self._config.tie_word_embeddings

    def _all_experts(self, of_first: str, mine: Callable[[str], Tensor]) -> Tensor:  # [E, ...]
        before, _, after = of_first.partition(f"{EXPERT}0.")
        count = self._config.num_experts // self._experts.size()
        local = torch.stack([mine(f"{before}{EXPERT}{index}.{after}") for index in range(count)])
        return torch.cat(_gathered(local, self._experts))

    def _own_piece(self, shape: tuple[int, ...], place: Place) -> Piece:
        part = [slice(0, size) for size in shape]
        if place.expert is not None:
            part[0] = slice(place.expert, place.expert + 1)
        elif place.shared != "not":
            dim = 1 if place.shared == "columns" else 0
            size = -(-shape[dim] // self._tensor.size())
            start = min(self._tensor.rank() * size, shape[dim])
            part[dim] = slice(start, min(start + size, shape[dim]))
        return Piece(shape, tuple(part))

    def _place(self, name: str) -> Place:
        if not name.startswith(LAYER):
            embedding = "model.embed_tokens.weight"
            head = embedding if self._config.tie_word_embeddings else "lm_head.weight"
            return {
                "embedding.word_embeddings.weight": Place((embedding,), "rows"),
                "decoder.final_layernorm.weight": Place(("model.norm.weight",)),
                "output_layer.weight": Place((head,), "rows"),
            }[name]
        index, _, inside = name.removeprefix(LAYER).partition(".")
        number = self._model.decoder.layers[int(index)].layer_number - 1  # counted over all stages
        prefix = f"model.layers.{number}."
        if inside.startswith(EXPERT):
            local, kind = inside.removeprefix(EXPERT).split(".")[:2]
            first = self._experts.rank() * self._config.num_experts // self._experts.size()
            source = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[kind]
            return Place((f"{prefix}mlp.experts.{source}",), expert=first + int(local))
        place = _IN_LAYER[inside]
        return Place(tuple(prefix + source for source in place.sources), place.shared)


_IN_LAYER = {
    "input_layernorm.weight": Place(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Place(("post_attention_layernorm.weight",)),
    **{
        f"self_attention.linear_qkv.{kind}": Place(
            tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"), "rows"
        )
        for kind in ("weight", "bias")
    },
    "self_attention.linear_proj.weight": Place(("self_attn.o_proj.weight",), "columns"),
    "self_attention.q_layernorm.weight": Place(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Place(("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": Place(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows_of_halves"),
    "mlp.linear_fc2.weight": Place(("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": Place(("mlp.gate.weight",)),
}


def _unshard(shards: Sequence[Tensor], place: Place) -> Tensor:
    if place.shared == "not":
        return shards[0]
    if place.shared == "rows_of_halves":
        return torch.cat(
            [half for halves in zip(*(s.chunk(2) for s in shards), strict=True) for half in halves]
        )
    return torch.cat(list(shards), dim=1 if place.shared == "columns" else 0)


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's, in their order. Collective."""
    tensor = tensor.detach().contiguous()
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts
