"""PPO's value model on megatron-core: a scalar head on its own backbone or on the policy's."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from abrun.backends.head import init_value_weight
from abrun.backends.megatron.groups import is_last_stage
from abrun.backends.megatron.names import VALUE_HEAD, WeightNames
from abrun.backends.megatron.parameters import MegatronParameters
from abrun.backends.megatron.stages import StagedModel, Stages
from abrun.backends.packing import Packing
from abrun.backends.policy import ValueBackend
from abrun.backends.ranks import Ranks
from abrun.backends.shards import Piece, ShardSpec
from abrun.recipe.algorithms import Ppo
from abrun.recipe.policy import Megatron, Policy
from abrun.rl.batch import Sequences


class StageValueHead(MegatronModule):
    """A float32 linear head that maps each hidden state to a scalar, replicated on the last stage's ranks.

    Its weight is drawn with standard deviation 1 / sqrt(H + 1) (arXiv:2009.01325), the same on every rank.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, *, seed: int) -> None:
        super().__init__(config=config)
        if not is_last_stage():
            return
        self.weight = nn.Parameter(init_value_weight(config.hidden_size, seed).to(device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: Tensor) -> Tensor:  # [..., H] -> [...]
        return hidden.float() @ self.weight[0] + self.bias


class MegatronValueModel(StagedModel, ValueBackend):
    """See abrun.backends.ValueModel.

    `backbone` is either its own module, loaded from the transformers `network`, or the policy's module. In
    the second case `network` is None.
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
        self.head = StageValueHead(backbone.config, ranks.device, seed=seed)
        self._coefficient = 1.0
        has_own_backbone = network is not None
        if has_own_backbone:
            backbone.add_module(VALUE_HEAD, self.head)  # in one module, so that one gradient norm covers both
        else:
            self._coefficient = 0.1 if settings.value_coefficient is None else settings.value_coefficient
        self._weight_names = WeightNames(backbone, network) if has_own_backbone else None
        self._parameters = MegatronParameters(
            backbone if has_own_backbone else self.head,
            self._shard_spec,
            settings.value_optimizer,
            device=ranks.device,
            replicated=not has_own_backbone,
        )
        if self._weight_names is not None:
            self._weight_names.load(network, self._parameters.assign)
        self._module = self._parameters.module if has_own_backbone else backbone
        # Pipeline stages wait for each other's gradients, so with a pipeline the gradients are 0 instead.
        self._detached = self._coefficient == 0 and ranks.pipeline is None

    def _shard_spec(self, name: str) -> ShardSpec:
        """Return a parameter's spec, with the same tensor names as the dtensor backend's value model."""
        local_name = name.removeprefix(f"{VALUE_HEAD}.")
        if local_name in ("weight", "bias"):
            return ShardSpec.from_piece(
                f"head.{local_name}", Piece.full(getattr(self.head, local_name).shape)
            )
        assert self._weight_names is not None
        spec = self._weight_names.shard_spec(name)
        return replace(
            spec, pieces=tuple((hf_name.removeprefix("model."), piece) for hf_name, piece in spec.pieces)
        )

    def _forward(self, batch: Sequences, packing: Packing | None) -> Tensor:
        with torch.no_grad() if self._detached else nullcontext():
            hidden = self._stages.hidden_states(self._module, batch.token_ids, packing)
        if not self.is_last_stage:
            return hidden
        if hidden.requires_grad and self._coefficient != 1:
            hidden.register_hook(lambda gradient: gradient * self._coefficient)
        length = batch.token_ids.shape[1] if packing is None else packing.num_local_tokens
        return self._to_rows(self.head(self._stages.gather_for_replicated_head(hidden, length)), packing)
