"""The end of a policy: from hidden states and the LM head's weight to log-probs, a loss of them, or logits.

Letters: T tokens in any shape, H hidden states, V vocabulary, P ranks that share it.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from abrun.backends.collectives import gathered
from abrun.backends.packing import Packing
from abrun.errors import RecipeError
from abrun.kernels import DEFAULT_MEMORY_BUDGET_BYTES, TokenLoss, linear_logprobs, linear_policy_loss, project
from abrun.models import cache_name
from abrun.recipe.policy import Filters, Logprobs
from abrun.rl.sampling import filtered_logprobs

IGNORED = -100

# Whether entropies are asked for: as a metric, or as a term of the loss.
Entropies = Literal["none", "value", "gradient"]


class HeadOutput(NamedTuple):
    """Results of one pass over tokens [...], float32, 0 where ignored."""

    logprobs: Tensor  # [...]
    entropies: Tensor | None  # [...], in nats
    loss: Tensor | None  # [], of a pass that computes one: it alone has a gradient
    balance: Tensor | None = None  # [], the experts' auxiliary loss, where the pass itself does not add it

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "HeadOutput":
        """With both per-token results changed."""
        entropies = None if self.entropies is None else change(self.entropies)
        return self._replace(logprobs=change(self.logprobs), entropies=entropies)


class Head:
    """The LM head of one policy: its own scale and soft cap, and the recipe's settings.

    `engine_dtype` is the precision of the logits that a rollout engine samples from; None: the trainer's.
    Log-probs are those of the distribution that a sampler at `temperature` with `filters` draws from.

    With a `group`, each of its ranks passes the same hidden states and its own rows of the weight,
    consecutive ones of ceil(`vocab_size` / P), the last ranks' maybe fewer. Each gets the same results; the
    gradient of the hidden states is then a partial sum, which the caller adds up.
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
        self._dtype, self._logits_dtype = _dtype(logprobs.head_dtype), _dtype(logprobs.logits_dtype)
        self._engine_dtype = _dtype(engine_dtype) or self._dtype
        self._chunk_size = logprobs.chunk_size
        budget_mib = logprobs.memory_budget_mib
        self._settings: dict[str, Any] = {
            "impl": logprobs.impl,
            "temperature": temperature,
            "logit_scale": scale,
            "logit_softcap": softcap,
            "ignore_index": IGNORED,
            "head_dtype": self._dtype,
            "logits_dtype": self._logits_dtype,
            "memory_budget_bytes": budget_mib * 2**20 if budget_mib else DEFAULT_MEMORY_BUDGET_BYTES,
            "vocab_size": vocab_size,
            "group": group,
        }

    def logprobs(
        self,
        hidden: Tensor,  # [..., H]
        weight: Tensor,  # [V, H], or this rank's rows of it
        target: Tensor,  # [...] int64, IGNORED where nothing is asked
        entropies: Entropies,
        token_loss: TokenLoss | None = None,
        support: Tensor | None = None,  # [..., W], what the sampler kept; see abrun.rl.sampling
    ) -> HeadOutput:
        """Log-probs and entropies of the targets; with `token_loss` the loss that it makes of them."""
        weight = self._shard(weight)
        asked = {"entropy": entropies != "none", "entropy_gradient": entropies == "gradient"}
        if token_loss is not None:
            loss, logprobs, entropy = linear_policy_loss(
                hidden, weight, target, token_loss, **asked, **self._settings
            )
            return HeadOutput(logprobs, entropy, loss)
        if self._filters.drop_tokens:
            logits = self._logits(hidden, weight, self._dtype, self._logits_dtype) / self._temperature
            logprobs, entropy = filtered_logprobs(
                logits, target, filters=self._filters, ignore_index=IGNORED, support=support
            )
            results = {"none": None, "value": entropy.detach(), "gradient": entropy}
            return HeadOutput(logprobs, results[entropies], loss=None)
        return HeadOutput(
            *linear_logprobs(hidden, weight, target, chunk_size=self._chunk_size, **asked, **self._settings),
            loss=None,
        )

    def set_temperature(self, temperature: float) -> None:
        """Compute log-probs at another temperature from now on."""
        self._temperature = self._settings["temperature"] = temperature

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:  # [..., H], [V, H] -> [..., V] float32
        """The rollout engine's logits, before any temperature; of the whole vocabulary on every rank."""
        return self._logits(hidden, self._shard(weight), self._engine_dtype, None)

    def decode(
        self,
        base: Any,
        weight: Tensor,
        token_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Any,
    ) -> tuple[Tensor, Any]:
        """The next tokens' logits on a transformers body, and its cache; see abrun.backends.Decoder."""
        name = cache_name(base)
        output = base(
            input_ids=token_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{name: cache},
            use_cache=True,
        )
        return self.logits(output.last_hidden_state[:, -1], weight), getattr(output, name)

    def _logits(
        self, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None, logits_dtype: torch.dtype | None
    ) -> Tensor:
        hidden, weight = hidden.to(dtype or weight.dtype), weight.to(dtype)
        logits = project(hidden, weight, logits_dtype or weight.dtype).float() * self._scale
        logits = logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
        if self._group is None:
            return logits
        whole: Any = _Gather.apply(logits, self._group)
        return whole[..., : self._vocab_size]

    def _shard(self, weight: Tensor) -> Tensor:
        if self._group is None or self._vocab_size is None:
            return weight
        return padded_shard(weight, self._vocab_size, self._group.size())


def logprobs_of_tokens(
    head: Head,
    hidden: Tensor,  # [B, S, H], or this rank's tokens of a packed stream [1, own, H]
    weight: Tensor,  # [V, H], or this rank's rows of it
    token_ids: Tensor,  # [B, S], or packed [1, T]
    token_mask: Tensor,  # [B, S] bool, or packed [1, T]: the tokens whose log-probs are computed
    entropies: Entropies,
    token_loss: TokenLoss | None,
    packing: Packing | None,
    support: Tensor | None,  # [B, S, W], or packed [1, T, W]
) -> HeadOutput:
    """Log-probs and entropies, shaped as `token_ids`, each from the hidden state before its token; 0 outside
    the mask.

    With `token_loss` also the sum of that loss over the B * (S - 1) tokens that have a log-prob, cut into
    slices. A sequence's first token has none, so a packed stream, one row, is treated like any other.
    """
    target = torch.where(token_mask, token_ids, IGNORED)[:, 1:]
    support = None if support is None else support[:, 1:]
    split = packing.split if packing else None
    if packing is None or split is None:
        hidden = hidden[:, :-1]
    else:
        target = split.cut(target, IGNORED)
        support = None if support is None else packing.own(support)
    output = head.logprobs(hidden, weight, target, entropies, token_loss, support)
    if split is not None:
        output = output.mapped(lambda values: split.whole(values)[:, : token_ids.shape[1] - 1])
    return output.mapped(lambda values: nn.functional.pad(values, (1, 0)))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


class _Gather(torch.autograd.Function):
    """The last dimension of all ranks. Each computes the same loss of it, and so has its whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:  # [..., V/P] -> [..., V]
        ctx.rank, ctx.size = group.rank(), part.shape[-1]
        return gathered(part, -1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, ctx.rank * ctx.size, ctx.size), None


def initial_value_weight(hidden_size: int, seed: int) -> Tensor:  # [1, H]
    """A value head's: of standard deviation 1 / sqrt(H + 1) (arXiv:2009.01325), alike on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return nn.init.normal_(
        torch.empty(1, hidden_size), std=1 / math.sqrt(hidden_size + 1), generator=generator
    )


def padded_shard(weight: Tensor, vocab_size: int, num_shards: int) -> Tensor:
    """A shard of a vocabulary, filled up with rows of 0 to the size of the others."""
    missing = -(-vocab_size // num_shards) - weight.shape[0]
    return nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def check_available(logprobs: Logprobs, device: torch.device) -> None:
    """Raises RecipeError where the kernel cannot run, now rather than after the first rollouts."""
    no_tokens = torch.empty(0, dtype=torch.int64, device=device)
    hidden, weight = torch.empty(0, 1, device=device), torch.empty(1, 1, device=device)
    try:
        linear_logprobs(hidden, weight, no_tokens, impl=logprobs.impl)
    except ValueError as error:
        raise RecipeError(f"policy.logprobs.{error}") from None
