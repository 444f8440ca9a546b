"""Small policies and batches for the backend tests, and their plain counterparts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from abrun.recipe.policy import Filters, Policy
from abrun.trainer.backends import B
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.dtensor.fsdp import full_tensor
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.rl.batch import Sequences, collate
from abrun.trainer.rl.losses import TokenLosses
from abrun.trainer.rl.metrics import MetricParts

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # model type, settings
    "llama": ("llama", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "granite": ("granite", {"logits_scaling": 2.5}),
    "experts": ("qwen3_moe", EXPERTS),
    "cohere": ("cohere", {"logit_scale": 0.4}),
}


def tiny(kind: str = "llama", **settings: Any) -> Any:
    """A network with random weights, the same at every call."""
    model_type, of_kind = KINDS[kind]
    torch.manual_seed(8)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TINY | of_kind | settings))


def make_backend(
    kind: str = "llama",
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    trainable: bool = True,
    expert_parallel: int = 1,
    **policy: Any,
) -> DtensorBackend:
    settings = Policy.model_validate(policy)
    return DtensorBackend(
        partial(tiny, kind),
        settings,
        make_ranks(CPU, settings.backend.shape, expert_parallel=expert_parallel),
        temperature=temperature,
        filters=Filters(top_p=top_p),
        trainable=trainable,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advised(Sequences):
    """What `WeightedLoss` is of."""

    advantages: Tensor  # [B, S]


def some_batch(seed: int = 0, size: int = 8) -> Advised:
    """Prompts and completions of different lengths."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(3, 99, (length,), generator=draw).tolist()

    batch = collate([tokens(1, 7) for _ in range(size)], [tokens(1, 9) for _ in range(size)], pad_id=0)
    return batch.with_fields(Advised, advantages=torch.randn(batch.token_ids.shape, generator=draw))


def rows(batch: B, start: int, stop: int) -> B:
    return batch[start:stop]


@dataclass(frozen=True)
class WeightedLoss:
    """Mean over `num_tokens` of -advantage * log-prob - 0.1 * entropy: a different weight on every token."""

    num_tokens: float
    shapes: list[torch.Size] = field(default_factory=list)  # of the log-probs that it was asked about

    @property
    def entropies(self) -> EntropyMode:
        return "gradient"

    def losses(self, batch: Advised, logprobs: Tensor, entropy: Tensor | None) -> TokenLosses:
        self.shapes.append(logprobs.shape)
        assert entropy is not None
        per_token = -batch.advantages * logprobs - 0.1 * entropy
        return TokenLosses(shares=torch.where(batch.token_mask, per_token, 0.0) / self.num_tokens)

    def metrics(
        self, batch: Advised, logprobs: Tensor, entropy: Tensor | None, losses: TokenLosses
    ) -> MetricParts:
        assert entropy is not None and not (logprobs.requires_grad or entropy.requires_grad)
        loss = losses.shares.sum().double()
        return MetricParts(sums={"loss": loss}, maxima={}, minima={})


def plain_logprobs(network: nn.Module, batch: Sequences, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, S] from the stock forward pass and torch's cross-entropy, row by row."""
    dtype = next(network.parameters()).dtype
    logprobs, entropies = (torch.zeros(batch.token_ids.shape, dtype=dtype) for _ in range(2))
    for row, (token_ids, mask) in enumerate(zip(batch.token_ids, batch.token_mask, strict=True)):
        length = int(mask.nonzero().max()) + 1
        logits = network(token_ids[None, :length]).logits[0, :-1] / temperature
        targets = token_ids[1:length]
        found = -nn.functional.cross_entropy(logits, targets, reduction="none")
        probabilities = logits.softmax(dim=-1)
        entropy = -(probabilities * probabilities.log()).sum(dim=-1)
        keep = mask[1:length]
        logprobs[row, 1:length] = torch.where(keep, found, 0.0)
        entropies[row, 1:length] = torch.where(keep, entropy, 0.0)
    return logprobs, entropies


def plain_loss(network: nn.Module, batch: Advised, temperature: float = 1.0) -> Tensor:
    logprobs, entropy = plain_logprobs(network, batch, temperature)
    return torch.where(batch.token_mask, -batch.advantages * logprobs - 0.1 * entropy, 0.0).sum() / int(
        batch.token_mask.sum()
    )


def plain_adamw(network: nn.Module, settings: dict[str, float]) -> torch.optim.AdamW:
    """torch's own, with decay of matrices alone."""
    return torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": settings["weight_decay"] if p.ndim > 1 else 0.0}
            for p in network.parameters()
        ],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        fused=False,
        foreach=False,
    )


def plain_steps(
    network: nn.Module,
    settings: dict[str, float],
    learning_rates: Sequence[float],
    *,
    temperature: float = 1.0,
    balance: float = 0.0,
) -> dict[str, Any]:
    """Train a network in place, a step a learning rate, with `balance` times the routers' auxiliary loss.

    Losses, gradient norms before clipping, and gradients of the first step.
    """
    optimizer = plain_adamw(network, settings)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for step, learning_rate in enumerate(learning_rates):
        optimizer.zero_grad()
        batch = some_batch(step)
        loss = plain_loss(network, batch, temperature)
        (loss + balance * plain_imbalance(network, batch) if balance else loss).backward()
        found["losses"].append(float(loss.detach()))
        if not step:
            found["gradients"] = {
                n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None
            }
        norm = nn.utils.clip_grad_norm_(network.parameters(), settings["max_grad_norm"])
        found["norms"].append(float(norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    return found


def routers(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if type(module).__name__.endswith("TopKRouter")]


def router_logits(network: nn.Module, token_ids: Tensor) -> list[Tensor]:
    """Of each layer [T, E], in a stock forward pass; what it reports itself are probabilities before 5.6."""
    seen: list[Tensor] = []

    def see(router: Any, inputs: tuple[Tensor]) -> None:
        seen.append(nn.functional.linear(inputs[0].reshape(-1, router.hidden_dim), router.weight))

    hooks = [router.register_forward_pre_hook(see) for router in routers(network)]
    network(token_ids)
    for hook in hooks:
        hook.remove()
    return seen


def plain_imbalance(network: Any, batch: Sequences) -> Tensor:
    """E * sum of f_e P_e over the tokens of all sequences of a batch, row by row."""
    config, num_tokens = network.config, 0
    counts, probabilities = torch.zeros(config.num_experts), torch.zeros(config.num_experts)
    for token_ids, mask in zip(batch.token_ids, batch.token_mask, strict=True):
        length = int(mask.nonzero().max()) + 1
        for logits in router_logits(network, token_ids[None, :length]):
            weights = logits.softmax(dim=-1)
            chosen = weights.topk(config.num_experts_per_tok).indices.flatten()
            counts = counts + torch.bincount(chosen, minlength=config.num_experts)
            probabilities = probabilities + weights.sum(dim=0)
            num_tokens += length
    return config.num_experts * (counts * probabilities).sum() / num_tokens**2


def gradients(backend: DtensorBackend) -> dict[str, Tensor]:
    """Whole gradients by their Hugging Face names. Collective."""
    return whole_gradients(backend.module, "network.")


def whole_gradients(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Of what has one, by names without the prefix. Collective."""
    return {
        name.removeprefix(prefix): full_tensor(parameter.grad).clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def parameters(backend: DtensorBackend) -> dict[str, Tensor]:
    """Whole parameters by their names in the network. Collective."""
    named: Any = backend.module.named_parameters()
    return {
        name.removeprefix("network."): full_tensor(parameter.detach()).clone() for name, parameter in named
    }
