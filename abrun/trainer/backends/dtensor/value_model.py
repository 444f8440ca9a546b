"""PPO's value model on the dtensor backend: a scalar head on its own backbone or on the policy's."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Policy
from abrun.trainer.backends import B
from abrun.trainer.backends.attention import hidden_states
from abrun.trainer.backends.dtensor.experts import shard_experts
from abrun.trainer.backends.dtensor.fsdp import (
    DTYPES,
    ShardedParameters,
    free_gathered,
    gather_once,
    keeps_gathered,
    materialise,
    shard,
    shard_layers,
)
from abrun.trainer.backends.dtensor.layers import prepare_layers
from abrun.trainer.backends.dtensor.tensor_parallel import TensorParallel
from abrun.trainer.backends.head import init_value_weight
from abrun.trainer.backends.microbatches import Microbatch, Microbatches
from abrun.trainer.backends.packing import Packing
from abrun.trainer.backends.policy import ValueBackend
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.models import facts_of
from abrun.trainer.rl.batch import Sequences

HiddenStates = Callable[[Tensor, Packing | None], Tensor]


class Backbone(nn.Module):
    """A language model without its head."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        return hidden_states(self.base_model, token_ids, packing)


class LinearValueHead(nn.Linear):
    """A linear head that maps each hidden state to a scalar."""

    def forward(self, input: Tensor) -> Tensor:  # [..., H] -> [...]
        return input @ self.weight[0] + self.bias


class DtensorValueModel(ValueBackend):
    """See abrun.trainer.backends.ValueModel.

    `backbone` is its own network, from `load_checked`, or the function that returns the policy's hidden
    states.
    """

    def __init__(
        self,
        settings: Ppo,
        policy: Policy,
        ranks: Ranks,
        backbone: nn.Module | HiddenStates,
        hidden_size: int,
        *,
        tensor: TensorParallel | None,
        seed: int,
    ) -> None:
        self.settings, self.ranks, self.right_shift = policy, ranks, settings.right_shift
        self._tensor_parallel = tensor
        self._coefficient = 1.0
        # float32, unless the recipe tests how much bfloat16 master weights and moments lose by rounding.
        self.head = _make_head(hidden_size, seed, ranks.device, DTYPES[settings.value_head_dtype])
        if tensor:
            tensor.replicate(self.head)
        # Gathered in its own dtype, whatever the backbone's compute dtype.
        shard(self.head, ranks.weight_mesh, settings.value_head_dtype)
        trained = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        if isinstance(backbone, nn.Module):
            self._hidden_states = self._shard_backbone(backbone)
            trained |= dict(self._hidden_states.named_parameters())
        else:
            self._hidden_states = backbone
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        self._parameters = ShardedParameters(trained, settings.value_optimizer, prefix="base_model.")

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        super().load_local_state(state)
        for module in (self.head, self._hidden_states):
            if isinstance(module, nn.Module):  # the policy frees its own backbone
                free_gathered(module)

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        backbone = self._hidden_states
        remaining: Iterable[Microbatch[B]] = microbatches
        if backward and keeps_gathered(self.settings) and isinstance(backbone, nn.Module):
            remaining = gather_once(backbone, microbatches)
        for microbatch in remaining:
            loss = forward(microbatch)
            if backward:
                loss.backward()

    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        token_ids = packing.pack(batch.token_ids) if packing else batch.token_ids
        return self._to_rows(self.head(self._backbone_states(token_ids, packing)).float(), packing)

    def _backbone_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        if self._coefficient == 0:
            with torch.no_grad():
                return self._hidden_states(token_ids, packing)
        hidden = self._hidden_states(token_ids, packing)
        # Every tensor-parallel rank computes the full loss, and the gradients of the states are summed.
        share = self._coefficient / (self._tensor_parallel.size if self._tensor_parallel else 1)
        if hidden.requires_grad and share != 1:
            hidden.register_hook(lambda gradient: gradient * share)
        return hidden

    def _shard_backbone(self, network: Any) -> Backbone:
        facts = facts_of(network)
        module = Backbone(facts.base)
        if not facts.head.weight.is_meta:
            module.to(self.ranks.device)
        if self._tensor_parallel:
            self._tensor_parallel.shard_network(
                network, facts, experts_are_sharded=self.ranks.expert_mesh is not None
            )
        shard_experts(network, self.ranks, self.settings.dtype)
        prepare_layers(facts.layers, self.settings)
        shard_layers(facts.layers, self.ranks.weight_mesh, self.settings.dtype)
        shard(module, self.ranks.weight_mesh, self.settings.dtype)
        materialise(module, network, self.ranks.device)
        return module.train()


def _make_head(hidden_size: int, seed: int, device: torch.device, dtype: torch.dtype) -> LinearValueHead:
    head = LinearValueHead(hidden_size, 1)
    head.weight = nn.Parameter(init_value_weight(hidden_size, seed).to(device, dtype))
    head.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    return head
