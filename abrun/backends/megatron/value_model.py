"""PPO's value model on megatron-core: a scalar head on a backbone, its own or the policy's."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from abrun.backends.head import initial_value_weight
from abrun.backends.megatron.groups import is_last_stage
from abrun.backends.megatron.names import OF_HEAD, Names
from abrun.backends.megatron.sharded import Sharded
from abrun.backends.megatron.stages import StagedLoop, Stages
from abrun.backends.packing import Packing
from abrun.backends.pieces import Held, Piece
from abrun.backends.policy import ValueBackend
from abrun.backends.ranks import Ranks
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Megatron, Policy
from abrun.rl.batch import Sequences


class ValueHead(MegatronModule):
    """A number for each hidden state, float32, whole on every rank of the last stage.

    Weights of standard deviation 1 / sqrt(H + 1) (arXiv:2009.01325), alike on every rank.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, *, seed: int) -> None:
        super().__init__(config=config)
        if not is_last_stage():
            return
        self.weight = nn.Parameter(initial_value_weight(config.hidden_size, seed).to(device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:  # [..., H] -> [...]
        return hidden.float() @ self.weight[0] + self.bias


class MegatronValueModel(StagedLoop, ValueBackend):
    """See abrun.backends.ValueModel.

    `backbone`: one of its own, with the weights of the transformers `network`; or the policy's module, on
    whose hidden states the head then stands, without a `network`.
    """

    def __init__(
        self,
        settings: Ppo,
        policy: Policy,
        ranks: Ranks,
        stages: Stages,
        backbone: Any,
        network: Any,
        *,
        seed: int,
    ) -> None:
        assert isinstance(policy.backend, Megatron)
        self.settings, self.ranks, self.right_shift = policy, ranks, settings.right_shift
        self._stages = stages
        self.head = ValueHead(backbone.config, ranks.device, seed=seed)
        self._coefficient = 1.0
        own = network is not None
        if own:
            backbone.add_module(OF_HEAD, self.head)  # one module, so that one norm is clipped
        else:
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        self._sharded = Sharded(
            backbone if own else self.head,
            settings.value_optimizer,
            distributed=policy.backend.distributed_optimizer,
            device=ranks.device,
            replicated=not own,
        )
        self._names = Names(backbone, network) if own else None
        if self._names is not None:
            self._names.load(network, self._sharded.assign)
        self._module = self._sharded.module if own else backbone
        # A pipeline's stages wait for each other's gradients, so there these are 0.
        self._detached = self._coefficient == 0 and ranks.pipeline is None

    def optimizer_step(self, learning_rate: float) -> float:
        return self._sharded.step(learning_rate)

    def local_state(self) -> dict[str, Tensor]:
        return self._sharded.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._sharded.load_local_state(state)

    def pieces(self) -> dict[str, Held]:
        return self._sharded.pieces(self._held)

    def _held(self, name: str) -> Held:
        """Of a parameter, by names as the other backend's value model has them."""
        inside = name.removeprefix(f"{OF_HEAD}.")
        if inside in ("weight", "bias"):
            return Held.one(f"head.{inside}", Piece.all_of(getattr(self.head, inside).shape))
        assert self._names is not None
        held = self._names.held(name)
        return replace(held, pieces=tuple((of.removeprefix("model."), piece) for of, piece in held.pieces))

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._sharded.resident_tensors()

    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        with torch.no_grad() if self._detached else nullcontext():
            hidden = self._stages.hidden_states(self._module, batch.token_ids, packing)
        if not self.is_last_stage:
            return hidden
        if hidden.requires_grad and self._coefficient != 1:
            hidden.register_hook(lambda gradient: gradient * self._coefficient)
        length = batch.token_ids.shape[1] if packing is None else packing.num_own
        return self._in_rows(self.head(self._stages.for_everyone(hidden, length)), packing)
