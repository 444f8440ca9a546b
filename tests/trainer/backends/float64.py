"""The dtensor backend in float64, for what is exact: what computes in float32 is replaced in this process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from abrun.trainer.backends.dtensor import fsdp
from abrun.trainer.backends.head import IGNORE_INDEX, EntropyMode, HeadOutput, LmHead


def compute_in_float64(patch: Any) -> None:
    """By a `pytest.MonkeyPatch`: what FSDP gathers and reduces, and log-probs from hidden states."""
    patch.setitem(fsdp.DTYPES, "float32", torch.float64)
    patch.setattr(fsdp, "MixedPrecisionPolicy", _unreduced)
    patch.setattr(LmHead, "compute_logprobs", _logprobs)


def to_float64(network: Any) -> Any:
    """The network, its norms and routers in float64; transformers' own go through float32."""
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm(module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = _router(module)
    network.set_experts_implementation("eager")  # torch's grouped products take no float64
    return network.double()


def _unreduced(*, reduce_dtype: object, **settings: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(reduce_dtype=torch.float64, **settings)


def _logprobs(
    self: LmHead,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    entropies: EntropyMode,
    token_loss: None = None,
    support: None = None,
) -> HeadOutput:
    logprobs = (hidden @ weight.T).log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    keep = target != IGNORE_INDEX
    chosen = logprobs.gather(-1, target.where(keep, 0)[..., None])[..., 0]
    asked = None if entropies == "none" else torch.where(keep, entropy, 0.0)
    return HeadOutput(torch.where(keep, chosen, 0.0), asked, loss=None)


def _norm(module: Any) -> Any:
    return lambda x: nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _router(module: Any) -> Any:
    def route(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
        weights, chosen = torch.topk(logits.softmax(dim=-1), module.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

    return route
