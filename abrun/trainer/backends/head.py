"""The LM head of a policy: from hidden states and its weight to log-probs, a loss of them, or logits.

Letters: B sequences, S positions, T tokens of a packed stream, H hidden size, V vocabulary, P ranks that the
vocabulary is sharded over.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from abrun.errors import RecipeError
from abrun.recipe.policy import Filters, Logprobs
from abrun.trainer.backends.microbatches import Packing
from abrun.trainer.backends.ranks import all_gather
from abrun.trainer.kernels import (
    DEFAULT_MEMORY_BUDGET_BYTES,
    TokenLoss,
    linear_logprobs,
    linear_policy_loss,
    project,
)
from abrun.trainer.models.families import cache_name
from abrun.trainer.rl.sampling import filtered_logprobs

IGNORE_INDEX = -100

# Whether entropies are computed: not at all, as a metric, or as a differentiable term of the loss.
EntropyMode = Literal["none", "value", "gradient"]


class HeadOutput(NamedTuple):
    """Results of one pass over tokens [...], float32, 0 where ignored."""

    logprobs: Tensor  # [...]
    entropies: Tensor | None  # [...], in nats
    loss: Tensor | None  # [], if the pass computes one; then only this has a gradient
    aux_loss: Tensor | None = None  # [], the experts' auxiliary loss; None if the pass adds it itself

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> "HeadOutput":
        """Return a copy with `change` applied to log-probs and entropies."""
        entropies = None if self.entropies is None else change(self.entropies)
        return self._replace(logprobs=change(self.logprobs), entropies=entropies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One decoding step, given the cache of the previous ones."""

    step: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]
    in_place: bool  # after the prompts, a step also accepts abrun.trainer.models.InPlaceCache and their mask
    collective: bool  # a step communicates with other ranks

    def __call__(
        self, token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Return the next token's logits [B, V] float32, before any temperature, and the cache.

        `token_ids` and `position_ids` [B, S] describe the new tokens. `attention_mask` [B, all tokens so far]
        is 1 on real tokens. The cache of the first call is None.
        """
        return self.step(token_ids, attention_mask, position_ids, cache)


class LmHead:
    """The LM head of one policy, with the model's logit scale and soft cap and the recipe's settings.

    Log-probs are those of the distribution that a sampler at `temperature` with `filters` draws from. A
    rollout engine samples from logits computed in `engine_dtype`; None: in the trainer's dtype.

    With a `group`, every rank passes the same hidden states and its own consecutive rows of the weight,
    ceil(`vocab_size` / P) or, on the last ranks, fewer. All ranks get the same results. The gradient of the
    hidden states is then a partial sum, which the caller reduces.
    """

    def __init__(
        self,
        logprobs: Logprobs,
        *,
        temperature: float,
        filters: Filters,
        scale: float,
        softcap: float | None,
        engine_dtype: str | None = None,
        vocab_size: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        assert group is None or vocab_size is not None
        self._vocab_size, self._group = vocab_size, group
        self._temperature, self._filters, self._scale, self._softcap = temperature, filters, scale, softcap
        self._drops_tokens, self._cache_name = filters.drop_tokens, ""
        self._head_dtype = _parse_dtype(logprobs.head_dtype)
        self._logits_dtype = _parse_dtype(logprobs.logits_dtype)
        self._engine_dtype = _parse_dtype(engine_dtype) or self._head_dtype
        self._chunk_size = logprobs.chunk_size
        self._settings: dict[str, Any] = {
            "impl": logprobs.impl,
            "temperature": temperature,
            "logit_scale": scale,
            "logit_softcap": softcap,
            "ignore_index": IGNORE_INDEX,
            "head_dtype": self._head_dtype,
            "logits_dtype": self._logits_dtype,
            "memory_budget_bytes": DEFAULT_MEMORY_BUDGET_BYTES,
            "vocab_size": vocab_size,
            "group": group,
        }

    def compute_logprobs(
        self,
        hidden: Tensor,  # [..., H]
        weight: Tensor,  # [V, H], or this rank's rows of it
        target: Tensor,  # [...] int64, IGNORE_INDEX for tokens without a log-prob
        entropies: EntropyMode,
        token_loss: TokenLoss | None = None,
        support: Tensor | None = None,  # [..., W], the tokens that the sampler kept; see rl.sampling
    ) -> HeadOutput:
        """Compute log-probs and entropies of the targets, and, with `token_loss`, their loss."""
        weight = self._pad_shard(weight)
        entropy_options = {"entropy": entropies != "none", "entropy_gradient": entropies == "gradient"}
        if token_loss is not None:
            loss, logprobs, entropy = linear_policy_loss(
                hidden, weight, target, token_loss, **entropy_options, **self._settings
            )
            return HeadOutput(logprobs, entropy, loss)
        if self._drops_tokens:
            logits = self._compute_logits(hidden, weight, self._head_dtype, self._logits_dtype)
            logits = logits / self._temperature
            logprobs, entropy = filtered_logprobs(
                logits, target, filters=self._filters, ignore_index=IGNORE_INDEX, support=support
            )
            results = {"none": None, "value": entropy.detach(), "gradient": entropy}
            return HeadOutput(logprobs, results[entropies], loss=None)
        return HeadOutput(
            *linear_logprobs(
                hidden, weight, target, chunk_size=self._chunk_size, **entropy_options, **self._settings
            ),
            loss=None,
        )

    def set_temperature(self, temperature: float) -> None:
        """Compute log-probs at another temperature from now on."""
        self._temperature = self._settings["temperature"] = temperature

    def compute_logits(
        self, hidden: Tensor, weight: Tensor
    ) -> Tensor:  # [..., H], [V, H] -> [..., V] float32
        """Return the rollout engine's logits before temperature, over the full vocabulary on every rank."""
        return self._compute_logits(hidden, self._pad_shard(weight), self._engine_dtype, None)

    def decode(
        self,
        base: Any,
        weight: Tensor,
        token_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Any,
    ) -> tuple[Tensor, Any]:
        """Run a transformers model without its head for one decoding step; see `Decoder`."""
        name = self._cache_name = self._cache_name or cache_name(base)
        output = base(
            input_ids=token_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{name: cache},
            use_cache=True,
        )
        return self.compute_logits(output.last_hidden_state[:, -1], weight), getattr(output, name)

    def _compute_logits(
        self, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None, logits_dtype: torch.dtype | None
    ) -> Tensor:
        hidden, weight = hidden.to(dtype or weight.dtype), weight.to(dtype)
        logits = project(hidden, weight, logits_dtype or weight.dtype).float() * self._scale
        logits = logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
        if self._group is None:
            return logits
        full_logits: Any = _GatherVocabulary.apply(logits, self._group)
        return full_logits[..., : self._vocab_size]

    def _pad_shard(self, weight: Tensor) -> Tensor:
        if self._group is None or self._vocab_size is None:
            return weight
        return pad_vocab_shard(weight, self._vocab_size, self._group.size())


def compute_token_logprobs(
    head: LmHead,
    hidden: Tensor,  # [B, S, H], or this rank's tokens of a packed stream [1, T/P, H]
    weight: Tensor,  # [V, H], or this rank's rows of it
    token_ids: Tensor,  # [B, S], or packed [1, T]
    token_mask: Tensor,  # [B, S] bool, or packed [1, T]: the tokens whose log-probs are computed
    entropies: EntropyMode,
    token_loss: TokenLoss | None,
    packing: Packing | None,
    support: Tensor | None,  # [B, S, W], or packed [1, T, W]
) -> HeadOutput:
    """Compute log-probs and entropies, shaped as `token_ids`; 0 outside the mask.

    A token's log-prob comes from the hidden state before it, so a sequence's first token has none. Its mask
    is false, and so a packed stream is treated as one row. With `token_loss` the output also has the sum of
    that loss, computed on slices of the B * (S - 1) tokens.
    """
    target = torch.where(token_mask, token_ids, IGNORE_INDEX)[:, 1:]
    support = None if support is None else support[:, 1:]
    split = packing.split if packing else None
    if packing is None or split is None:
        hidden = hidden[:, :-1]
    else:
        target = split.to_local(target, IGNORE_INDEX)
        support = None if support is None else packing.to_local(support)
    output = head.compute_logprobs(hidden, weight, target, entropies, token_loss, support)
    if split is not None:
        output = output.map_tokens(lambda values: split.to_full(values)[:, : token_ids.shape[1] - 1])
    return output.map_tokens(lambda values: nn.functional.pad(values, (1, 0)))


def _parse_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


class _GatherVocabulary(torch.autograd.Function):
    """All-gathers the last dimension. Backward slices: all ranks compute the same loss and full gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: ProcessGroup) -> Tensor:  # [..., V/P] -> [..., V]
        ctx.rank, ctx.size = group.rank(), shard.shape[-1]
        return all_gather(shard, -1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, ctx.rank * ctx.size, ctx.size), None


def init_value_weight(hidden_size: int, seed: int) -> Tensor:  # [1, H]
    """Draw a value head weight, standard deviation 1 / sqrt(H + 1) (arXiv:2009.01325), same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return nn.init.normal_(
        torch.empty(1, hidden_size), std=1 / math.sqrt(hidden_size + 1), generator=generator
    )


def pad_vocab_shard(weight: Tensor, vocab_size: int, num_shards: int) -> Tensor:
    """Pad a vocabulary shard with rows of 0 to the size of the other ranks' shards."""
    num_missing_rows = -(-vocab_size // num_shards) - weight.shape[0]
    return nn.functional.pad(weight, (0, 0, 0, num_missing_rows)) if num_missing_rows else weight


def check_logprob_kernel(logprobs: Logprobs, device: torch.device) -> None:
    """Raise RecipeError if the log-prob kernel cannot run, before the first rollouts are generated."""
    no_tokens = torch.empty(0, dtype=torch.int64, device=device)
    hidden, weight = torch.empty(0, 1, device=device), torch.empty(1, 1, device=device)
    try:
        linear_logprobs(hidden, weight, no_tokens, impl=logprobs.impl)
    except ValueError as error:
        raise RecipeError(f"policy.logprobs.{error}") from None
