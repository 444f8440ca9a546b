"""PPO's value model on the dtensor backend: a scalar head on a backbone, its own or the policy's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from abrun.backends import B
from abrun.backends.attention import enable_streams, hidden_states
from abrun.backends.dtensor.experts import spread_experts
from abrun.backends.dtensor.fsdp import (
    DTYPES,
    ShardedParameters,
    forget_gathered,
    gathered_once,
    keeps_gathered,
    materialise,
    shard,
    shard_layers,
)
from abrun.backends.dtensor.layers import prepare_layers, take_liger_kernels
from abrun.backends.dtensor.tensor_parallel import TensorParallel
from abrun.backends.head import initial_value_weight
from abrun.backends.microbatches import Microbatch, Microbatches
from abrun.backends.packing import Packing
from abrun.backends.pieces import Held
from abrun.backends.policy import ValueBackend
from abrun.backends.ranks import Ranks
from abrun.models import facts_of
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Policy
from abrun.rl.batch import Sequences

HiddenStates = Callable[[Tensor, Packing | None], Tensor]


class Backbone(nn.Module):
    """A language model without its head."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        return hidden_states(self.base_model, token_ids, packing)


class ValueHead(nn.Linear):
    """A number for each hidden state."""

    def forward(self, input: Tensor) -> Tensor:  # [..., H] -> [...]
        return input @ self.weight[0] + self.bias


class DtensorValueModel(ValueBackend):
    """See abrun.backends.ValueModel.

    `backbone`: a network of its own, or what gives the policy's hidden states, on which the head then stands.
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
        self._tensor = tensor
        self._coefficient = 1.0
        # In float32 unless the recipe wants to see what bfloat16 masters and moments lose: they truncate.
        self.head = _head(hidden_size, seed, ranks.device, DTYPES[settings.value_head_dtype])
        if tensor:
            tensor.replicate(self.head)
        # Gathered in its own dtype, whatever the backbone's products compute in.
        shard(self.head, ranks.weights, settings.value_head_dtype)
        trained = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        if isinstance(backbone, nn.Module):
            self._hidden_states = self._sharded(backbone)
            trained |= dict(self._hidden_states.named_parameters())
        else:
            self._hidden_states = backbone
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        self._parameters = ShardedParameters(trained, settings.value_optimizer)

    def optimizer_step(self, learning_rate: float) -> float:
        return self._parameters.step(learning_rate)

    def local_state(self) -> dict[str, Tensor]:
        return self._parameters.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._parameters.load_local_state(state)
        for module in (self.head, self._hidden_states):
            if isinstance(module, nn.Module):  # not the policy's
                forget_gathered(module)

    def pieces(self) -> dict[str, Held]:
        return self._parameters.pieces("base_model.")

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._parameters.resident_tensors()

    def _run(
        self, microbatches: Microbatches[B], forward: Callable[[Microbatch[B]], Tensor], *, backward: bool
    ) -> None:
        backbone = self._hidden_states
        keeps = backward and keeps_gathered(self.settings) and isinstance(backbone, nn.Module)
        for microbatch in gathered_once(backbone, microbatches) if keeps else microbatches:
            loss = forward(microbatch)
            if backward:
                loss.backward()

    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        token_ids = packing.pack(batch.token_ids) if packing else batch.token_ids
        return self._in_rows(self.head(self._backbone_states(token_ids, packing)).float(), packing)

    def _backbone_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        if self._coefficient == 0:
            with torch.no_grad():
                return self._hidden_states(token_ids, packing)
        hidden = self._hidden_states(token_ids, packing)
        # Each tensor-parallel rank computes the whole loss, and their gradients of the states are added up.
        share = self._coefficient / (self._tensor.size if self._tensor else 1)
        if hidden.requires_grad and share != 1:
            hidden.register_hook(lambda gradient: gradient * share)
        return hidden

    def _sharded(self, network: Any) -> Backbone:
        enable_streams(network, self.settings)
        take_liger_kernels(network, self.settings)
        facts = facts_of(network)
        module = Backbone(facts.base)
        if not facts.head.weight.is_meta:
            module.to(self.ranks.device)
        if self._tensor:
            self._tensor.spread(network, facts, experts_are_spread=self.ranks.experts is not None)
        spread_experts(network, self.ranks, self.settings.dtype)
        prepare_layers(facts.layers, self.settings)
        shard_layers(facts.layers, self.ranks.weights, self.settings.dtype)
        shard(module, self.ranks.weights, self.settings.dtype)
        materialise(module, network, self.ranks.device)
        return module.train()


def _head(hidden_size: int, seed: int, device: torch.device, dtype: torch.dtype) -> ValueHead:
    head = ValueHead(hidden_size, 1)
    head.weight = nn.Parameter(initial_value_weight(hidden_size, seed).to(device, dtype))
    head.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    return head
