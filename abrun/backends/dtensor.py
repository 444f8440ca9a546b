"""The dtensor backend: FSDP2 (`fully_shard`) over all ranks, on gloo or nccl.

The log-prob kernel is called inside the root module's forward, so that FSDP's hooks see an ordinary forward
and the head's weight is whole when the kernel needs it. Master weights and optimizer state are float32;
`dtype` is what the products compute in.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from abrun.backends import Objective
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
        token_ids: Tensor,  # [B, S], right-padded
        token_mask: Tensor | None = None,  # [B, S] bool: the tokens to judge
        token_loss: TokenLoss | None = None,
        **decode: Any,
    ) -> tuple[Any, ...]:
        """Log-probs and entropy [B, S], float32, 0 outside the mask.

        With `token_loss`, first the sum of that loss [] over the B * (S - 1) tokens that have a log-prob, cut
        into slices, and it alone has a gradient. Padding stands after every real token, so causal attention
        never sees it and no attention mask is passed. Without a mask this is one decoding step: the next
        token's logits [B, V] over the temperature, and the cache.
        """
        if token_mask is None:
            output = self.network.base_model(input_ids=token_ids, use_cache=True, **decode)
            return self._logits(output.last_hidden_state[:, -1]), output.past_key_values
        hidden = self.network.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        target = torch.where(token_mask, token_ids, IGNORED)[:, 1:]
        *loss, logprobs, entropy = self._judge(hidden[:, :-1], target, token_loss)
        return *loss, nn.functional.pad(logprobs, (1, 0)), nn.functional.pad(entropy, (1, 0))

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
        self._policy = policy
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data_parallel",))
        self.group = mesh.get_group()
        self.module = PolicyModule(model.network, policy, rollout).to(device)
        if policy.activation_checkpointing:
            model.network.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
        compute = torch.bfloat16 if policy.dtype == "bfloat16" else None
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for layer in _layers(self.module.network):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        # FSDP keeps the root's weights gathered until the backward pass, which a frozen policy never has.
        reshard = None if trainable else True
        fully_shard(self.module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
        self.module.train()
        self.module.requires_grad_(trainable)
        self._optimizer = self._make_optimizer() if trainable else None

    def logprobs(self, batch: Batch, micro_batch_size: int | None) -> Tensor:
        out = torch.zeros(batch.token_ids.shape, device=self.device)
        start = 0
        with torch.no_grad():
            for microbatch in batch.split(micro_batch_size):
                logprobs, _ = self.module(microbatch.token_ids, microbatch.token_mask)
                out[start : start + len(microbatch), : logprobs.shape[1]] = logprobs
                start += len(microbatch)
        return out

    def forward_backward(
        self, batch: Batch, micro_batch_size: int | None, objective: Objective
    ) -> MetricParts:
        parts = []
        for microbatch in batch.split(micro_batch_size):
            loss, logprobs, entropy = self._forward(microbatch, objective)
            loss.backward()
            parts.append(objective.metrics(microbatch, logprobs.detach(), entropy.detach()))
        return merge(parts)

    def _forward(self, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """The loss [] to go back from, log-probs and entropy [B, S]."""

        def losses(tokens: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            # FSDP averages gradients over its ranks, and the global loss is a sum over them: cancel it, once.
            return objective.losses(tokens, logprobs, entropy) * self.group.size()

        if not self._policy.logprobs.one_pass:
            logprobs, entropy = self.module(batch.token_ids, batch.token_mask)
            return losses(batch, logprobs, entropy).sum(), logprobs, entropy
        tokens = batch.predicted_tokens()
        return self.module(
            batch.token_ids,
            batch.token_mask,
            lambda logprobs, entropy, part: losses(tokens[part], logprobs, entropy),
        )

    def optimizer_step(self, learning_rate: float) -> float:
        assert self._optimizer is not None
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._policy.optimizer.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[PolicyModule]:
        """The policy with whole weights on every rank, for sampling; no collective runs inside."""
        shards = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        for shard in shards:
            shard.set_reshard_after_forward(False, recurse=False)
            shard.unshard()
        self.module.eval()
        try:
            yield self.module
        finally:
            self.module.train()
            for shard in shards:
                shard.set_reshard_after_forward(shard is not self.module, recurse=False)
                shard.reshard()

    def local_state(self) -> dict[str, Tensor]:
        state = {f"weights/{name}": _local(p) for name, p in self._parameters()}
        if self._optimizer is not None:
            for name, parameter in self._parameters():
                for key, value in self._optimizer.state[parameter].items():
                    state[f"optimizer/{key}/{name}"] = _local(value)
        return state

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        if self._optimizer is not None:
            for _, parameter in self._parameters():
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self.device),  # where the fused AdamW wants it
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        for name, tensor in self.local_state().items():
            tensor.copy_(state[name])

    def full_weights(self) -> dict[str, Tensor]:
        weights = {}
        for name, parameter in self._parameters():
            whole = parameter.full_tensor().detach()
            if dist.get_rank() == 0:
                weights[name.removeprefix("network.")] = whole.cpu()
        return weights

    def resident_tensors(self) -> Sequence[Tensor]:
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = [*self.module.parameters(), *(tensor for state in states for tensor in state.values())]
        return [_local(tensor) for tensor in tensors]

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_parameters()

    def _make_optimizer(self) -> torch.optim.AdamW:
        settings = self._policy.optimizer
        parameters = list(self.module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )


def _check_available(logprobs: Logprobs, device: torch.device) -> None:
    """Raises RecipeError where the kernel cannot run, now rather than after the first rollouts."""
    no_tokens = torch.empty(0, dtype=torch.int64, device=device)
    hidden, weight = torch.empty(0, 1, device=device), torch.empty(1, 1, device=device)
    try:
        linear_logprobs(hidden, weight, no_tokens, impl=logprobs.impl)
    except ValueError as error:
        raise RecipeError(f"policy.logprobs.{error}") from None


def _layers(network: Any) -> Iterator[nn.Module]:
    """The decoder's repeated blocks: what FSDP gathers and frees one by one."""
    for module in network.modules():
        if isinstance(module, nn.ModuleList):
            yield from module
            return
    raise RecipeError(f"model: got {type(network).__name__}, which has no list of layers to shard")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
