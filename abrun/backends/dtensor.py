"""The dtensor backend: FSDP2 (`fully_shard`) over all ranks, on gloo or nccl.

The log-prob kernel is called inside the root module's forward, so that FSDP's hooks see an ordinary forward
and the head's weight is whole when the kernel needs it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from abrun.backends import Objective
from abrun.backends.fsdp import ShardedParameters, make_mesh, shard, shard_layers
from abrun.backends.packing import Packing, enable_packing, hidden_states, microbatches, packing_of
from abrun.errors import RecipeError
from abrun.kernels import (
    DEFAULT_MEMORY_BUDGET_BYTES,
    TokenLoss,
    linear_logprobs,
    linear_policy_loss,
)
from abrun.models import LanguageModel
from abrun.recipe import Logprobs, Policy, Rollout
from abrun.rl.batch import Batch
from abrun.rl.metrics import MetricParts, merge
from abrun.rl.sampling import filtered_logprobs

IGNORED = -100


class PolicyModule(nn.Module):
    """A causal language model whose forward ends in log-probs, or in a loss of them, not in logits."""

    def __init__(self, network: nn.Module, policy: Policy, rollout: Rollout) -> None:
        super().__init__()
        self.network: Any = network
        self._temperature, self._top_p = rollout.temperature, rollout.top_p
        self._chunk_size = policy.logprobs.chunk_size
        self._head_dtype = torch.float32 if policy.logprobs.head_dtype == "float32" else None
        config = self.network.config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma
        # Cohere multiplies by logit_scale, Granite divides by logits_scaling.
        self._scale = getattr(config, "logit_scale", None) or 1.0 / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        if self.network.get_output_embeddings().bias is not None:
            raise RecipeError(
                "model: got an LM head with a bias; the log-prob kernels take heads without one"
            )
        budget_mib = policy.logprobs.memory_budget_mib
        self._settings: dict[str, Any] = {
            "impl": policy.logprobs.impl,
            "entropy": True,
            "temperature": self._temperature,
            "logit_scale": self._scale,
            "logit_softcap": self._softcap,
            "ignore_index": IGNORED,
            "head_dtype": self._head_dtype,
            "memory_budget_bytes": budget_mib * 2**20 if budget_mib else DEFAULT_MEMORY_BUDGET_BYTES,
        }

    def forward(
        self,
        token_ids: Tensor,  # [B, S] right-padded, or [1, S] packed
        token_mask: Tensor | None = None,  # [B, S] bool: the tokens to judge
        token_loss: TokenLoss | None = None,
        packing: Packing | None = None,
        **decode: Any,
    ) -> tuple[Any, ...]:
        """Log-probs and entropy [B, S], float32, 0 outside the mask.

        With `token_loss`, first the sum of that loss [] over the B * (S - 1) tokens that have a log-prob, cut
        into slices, and it alone has a gradient. A sequence's first token is never judged, so a packed
        stream, one row, is judged like any other. Without a mask this is one decoding step: the next token's
        logits [B, V] over the temperature, and the cache.
        """
        if token_mask is None:
            output = self.network.base_model(input_ids=token_ids, use_cache=True, **decode)
            return self._logits(output.last_hidden_state[:, -1]), output.past_key_values
        hidden = hidden_states(self.network.base_model, token_ids, packing)
        target = torch.where(token_mask, token_ids, IGNORED)[:, 1:]
        *loss, logprobs, entropy = self._judge(hidden[:, :-1], target, token_loss)
        return *loss, nn.functional.pad(logprobs, (1, 0)), nn.functional.pad(entropy, (1, 0))

    def hidden_states(self, token_ids: Tensor, packing: Packing | None) -> Tensor:
        """The last hidden states, for a value head on this backbone: [B, S, H], or [1, T, H] packed."""
        return hidden_states(self.network.base_model, token_ids, packing)

    def _judge(self, hidden: Tensor, target: Tensor, token_loss: TokenLoss | None) -> tuple[Any, ...]:
        weight = self.network.get_output_embeddings().weight
        if token_loss is not None:
            return linear_policy_loss(hidden, weight, target, token_loss, **self._settings)
        if self._top_p < 1:
            return filtered_logprobs(self._logits(hidden), target, top_p=self._top_p, ignore_index=IGNORED)
        return linear_logprobs(hidden, weight, target, chunk_size=self._chunk_size, **self._settings)

    def _logits(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., V] float32, over the temperature
        weight = self.network.get_output_embeddings().weight
        dtype = self._head_dtype or weight.dtype
        logits = nn.functional.linear(hidden.to(dtype), weight.to(dtype)).float() * self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits / self._temperature


class DtensorBackend:
    """See abrun.backends.Backend."""

    def __init__(
        self,
        model: LanguageModel,
        policy: Policy,
        rollout: Rollout,
        device: torch.device,
        *,
        trainable: bool = True,
    ) -> None:
        _check_available(policy.logprobs, device)
        self.device = device
        self.settings = policy
        self.mesh = make_mesh(device)
        self.group = self.mesh.get_group()
        if policy.packing:
            enable_packing(model.network)
        self.module = PolicyModule(model.network, policy, rollout).to(device)
        self.hidden_size: int = self.module.network.get_output_embeddings().weight.shape[1]
        if policy.activation_checkpointing:
            model.network.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
        shard_layers(self.module.network, self.mesh, policy.dtype)
        # FSDP keeps the root's weights gathered until the backward pass, which a frozen policy never has.
        shard(self.module, self.mesh, policy.dtype, reshard_after_forward=None if trainable else True)
        register_fsdp_forward_method(self.module, "hidden_states")
        self.module.train()
        self.module.requires_grad_(trainable)
        self._parameters = ShardedParameters(
            dict(self.module.named_parameters()), policy.optimizer if trainable else None
        )

    def logprobs(self, batch: Batch) -> Tensor:
        out = torch.zeros(batch.token_ids.shape, device=self.device)
        start = 0
        with torch.no_grad():
            for microbatch in microbatches(batch, self.settings, self.group):
                packing = packing_of(microbatch.token_mask) if self.settings.packing else None
                logprobs, _ = self._judged(microbatch, packing)
                out[start : start + len(microbatch), : logprobs.shape[1]] = logprobs
                start += len(microbatch)
        return out

    def forward_backward(self, batch: Batch, objective: Objective) -> MetricParts:
        parts = []
        for microbatch in microbatches(batch, self.settings, self.group):
            loss, logprobs, entropy = self._forward(microbatch, objective)
            loss.backward()
            parts.append(objective.metrics(microbatch, logprobs.detach(), entropy.detach()))
        return merge(parts)

    def _forward(self, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """The loss [] to go back from, log-probs and entropy [B, S]."""

        def losses(tokens: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            # FSDP averages gradients over its ranks, and the global loss is a sum over them: cancel it, once.
            return objective.losses(tokens, logprobs, entropy) * self.group.size()

        packing = packing_of(batch.token_mask) if self.settings.packing else None
        if not self.settings.logprobs.one_pass:
            logprobs, entropy = self._judged(batch, packing)
            return losses(batch, logprobs, entropy).sum(), logprobs, entropy
        tokens = (batch.mapped(packing.pack) if packing else batch).predicted_tokens()
        return self._judged(
            batch, packing, lambda logprobs, entropy, part: losses(tokens[part], logprobs, entropy)
        )

    def _judged(
        self, batch: Batch, packing: Packing | None, token_loss: TokenLoss | None = None
    ) -> tuple[Any, ...]:
        """The policy's forward pass: rows [B, S] in and out, whatever stands between."""
        if packing is None:
            return self.module(batch.token_ids, batch.token_mask, token_loss)
        token_ids, token_mask = packing.pack(batch.token_ids), packing.pack(batch.token_mask)
        *loss, logprobs, entropy = self.module(token_ids, token_mask, token_loss, packing)
        return *loss, packing.unpack(logprobs), packing.unpack(entropy)

    def optimizer_step(self, learning_rate: float) -> float:
        return self._parameters.step(learning_rate)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[PolicyModule]:
        """The policy with whole weights on every rank, for sampling; no collective runs inside."""
        sharded = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        for part in sharded:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self.module.eval()
        try:
            yield self.module
        finally:
            self.module.train()
            for part in sharded:
                part.set_reshard_after_forward(part is not self.module, recurse=False)
                part.reshard()

    def local_state(self) -> dict[str, Tensor]:
        return self._parameters.local_state()

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        self._parameters.load_local_state(state)

    def full_weights(self) -> dict[str, Tensor]:
        weights = {}
        for name, weight in self._parameters.full_weights():
            if dist.get_rank() == 0:
                weights[name.removeprefix("network.")] = weight.cpu()
        return weights

    def resident_tensors(self) -> Sequence[Tensor]:
        return self._parameters.resident_tensors()


def _check_available(logprobs: Logprobs, device: torch.device) -> None:
    """Raises RecipeError where the kernel cannot run, now rather than after the first rollouts."""
    no_tokens = torch.empty(0, dtype=torch.int64, device=device)
    hidden, weight = torch.empty(0, 1, device=device), torch.empty(1, 1, device=device)
    try:
        linear_logprobs(hidden, weight, no_tokens, impl=logprobs.impl)
    except ValueError as error:
        raise RecipeError(f"policy.logprobs.{error}") from None
