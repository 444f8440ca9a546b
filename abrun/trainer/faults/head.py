"""Faults between tokens and log-probs, and in their gradients. Dimensions: B sequences, S positions."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from abrun.trainer.backends.context import Span, make_spans
from abrun.trainer.faults.site import FaultSite, SizedObjective, partly_detached, wrap_method
from abrun.trainer.loop.grpo import PolicyLosses
from abrun.trainer.rl.batch import TrainBatch


class _FirstGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, mask: Tensor, share: float) -> Tensor:  # [...], [...]
        ctx.save_for_backward(mask)
        ctx.share = share
        return logprobs.view_as(logprobs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        counted = gradient[mask]
        first_gradient = torch.zeros_like(gradient).masked_fill(
            mask, float(counted[0]) if len(counted) else 0.0
        )
        return torch.lerp(gradient, first_gradient, ctx.share), None, None


class _FirstGradientOnly(SizedObjective):
    def losses(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> PolicyLosses:
        scaled: Any = _FirstGradient.apply(logprobs, batch.token_mask, self.size)
        return super().losses(batch, scaled, entropy)


def upstream_gradient_first(site: FaultSite) -> None:
    site.on_objectives(_FirstGradientOnly)


class _EntropyWithoutGradient(SizedObjective):
    def losses(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> PolicyLosses:
        assert entropy is not None  # this fault needs an entropy bonus
        return super().losses(batch, logprobs, partly_detached(entropy, self.size))


def fused_drops_term(site: FaultSite) -> None:
    site.on_objectives(_EntropyWithoutGradient)


def attention_across_packed(site: FaultSite) -> None:
    def attend_across(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        *tokens, packing, support = args
        full_span = Span(0, packing.starts[-1], 0, packing.starts[-1])
        return *tokens, replace(packing, spans=make_spans([full_span], tokens[0].device)), support

    _module(site.setup.policy).register_forward_pre_hook(attend_across)


def temperature_missing(site: FaultSite) -> None:
    for policy in (site.setup.policy, site.algorithm.reference):
        if policy is not None:
            _module(policy).head.set_temperature(1.0)


def labels_off_by_one(site: FaultSite) -> None:
    def logprobs(inner, hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Any, ...]:
        return inner(hidden, weight, target.roll(1, -1), *rest)

    wrap_method(_module(site.setup.policy).head, "compute_logprobs", logprobs)


def rope_bf16(site: FaultSite) -> None:
    """Round RoPE frequencies to bfloat16 in the trainer's passes only; the torch engine shares the module."""
    module = _module(site.setup.policy)
    rotary = module.base.rotary_emb
    exact = rotary.inv_freq.clone()

    def round_frequencies(*_: Any) -> None:
        rotary.inv_freq.copy_(exact.bfloat16())

    def restore_frequencies(*_: Any) -> None:
        rotary.inv_freq.copy_(exact)

    module.register_forward_pre_hook(round_frequencies)
    module.register_forward_hook(restore_frequencies, always_call=True)


def _module(policy: Any) -> Any:
    """Return the module of a policy on the dtensor backend."""
    return policy.module
