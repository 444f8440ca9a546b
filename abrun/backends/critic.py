"""PPO's value model on the dtensor backend: a scalar head on a backbone, its own or the policy's."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from abrun.backends import ValueObjective
from abrun.backends.dtensor import DtensorBackend
from abrun.backends.fsdp import ShardedParameters, shard, shard_layers
from abrun.backends.packing import Packing, enable_packing, hidden_states, microbatches, packing_of
from abrun.models import LanguageModel
from abrun.recipe import Ppo
from abrun.rl.batch import Batch
from abrun.rl.metrics import MetricParts, merge
from abrun.rl.values import right_shifted


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


class DtensorCritic:
    """See abrun.backends.Critic. `backbone` None: the head stands on the policy's hidden states."""

    def __init__(
        self, policy: DtensorBackend, settings: Ppo, backbone: LanguageModel | None, *, seed: int
    ) -> None:
        self._policy, self._settings = policy, settings
        self._coefficient = 1.0
        self.head = _head(policy.hidden_size, seed).to(policy.device)
        # Gathered in its own dtype, whatever the backbone's products compute in.
        shard(self.head, policy.mesh, settings.value_head_dtype)
        trained = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        if backbone is None:
            self._hidden_states: Any = policy.module.hidden_states
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        else:
            self._hidden_states = _sharded(backbone, policy)
            trained |= dict(self._hidden_states.named_parameters())
        self._parameters = ShardedParameters(trained, settings.value_optimizer)

    def values(self, batch: Batch) -> Tensor:
        out = torch.zeros(batch.token_ids.shape, device=self._policy.device)
        start = 0
        with torch.no_grad():
            for microbatch in self._microbatches(batch):
                values = self._values(microbatch)
                out[start : start + len(microbatch), : values.shape[1]] = values
                start += len(microbatch)
        return out

    def forward_backward(self, batch: Batch, objective: ValueObjective) -> MetricParts:
        parts = []
        for microbatch in self._microbatches(batch):
            values = self._values(microbatch)
            # FSDP averages gradients over its ranks, and the global loss is a sum over them.
            loss = objective.losses(microbatch, values).sum() * self._policy.group.size()
            loss.backward()
            parts.append(objective.metrics(microbatch, values.detach()))
        return merge(parts)

    def optimizer_step(self, learning_rate: float) -> float:
        return self._parameters.step(learning_rate)

    def local_state(self) -> dict[str, Tensor]:
        return self._parameters.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._parameters.load_local_state(state)

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._parameters.resident_tensors()

    def _microbatches(self, batch: Batch) -> Iterator[Batch]:
        return microbatches(batch, self._policy.settings, self._policy.group)

    def _values(self, batch: Batch) -> Tensor:
        """Values [B, S] float32: rows in and out, shifted as rows, so that no sequence sees another's."""
        packing = packing_of(batch.token_mask) if self._policy.settings.packing else None
        token_ids = packing.pack(batch.token_ids) if packing else batch.token_ids
        values = self.head(self._backbone_states(token_ids, packing)).float()
        values = packing.unpack(values) if packing else values
        return right_shifted(values) if self._settings.right_shift else values

    def _backbone_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        if self._coefficient == 0:
            with torch.no_grad():
                return self._hidden_states(token_ids, packing)
        hidden = self._hidden_states(token_ids, packing)
        if hidden.requires_grad and self._coefficient != 1:
            hidden.register_hook(lambda gradient: gradient * self._coefficient)
        return hidden


def _head(hidden_size: int, seed: int) -> ValueHead:
    """Weights of standard deviation 1 / sqrt(H + 1) (arXiv:2009.01325), alike on every rank."""
    head = ValueHead(hidden_size, 1)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(head.weight, std=1 / math.sqrt(hidden_size + 1), generator=generator)
    nn.init.zeros_(head.bias)
    return head


def _sharded(backbone: LanguageModel, policy: DtensorBackend) -> Backbone:
    network: Any = backbone.network
    if policy.settings.packing:
        enable_packing(network)
    if policy.settings.activation_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    module = Backbone(network.base_model).to(policy.device)
    shard_layers(module, policy.mesh, policy.settings.dtype)
    shard(module, policy.mesh, policy.settings.dtype)
    return module.train()
