"""Differentiable per-token log-probs and entropies of an LM head, in several implementations.

Letters used in this package: N tokens (any leading shape), H hidden size, V vocabulary, P ranks of the
vocabulary group.

Precision: every implementation accumulates the logits in float32, rounds them to `logits_dtype` (by default
the projection's dtype, as most frameworks do), and computes in float32 from there. On a GPU, float32 matmuls
use TF32 only if torch's setting allows it (torch.backends.cuda.matmul; IEEE by default).
"""

from .head import project
from .linear import DEFAULT_MEMORY_BUDGET_BYTES, TokenLoss, linear_logprobs, linear_policy_loss

__all__ = ["DEFAULT_MEMORY_BUDGET_BYTES", "TokenLoss", "linear_logprobs", "linear_policy_loss", "project"]
