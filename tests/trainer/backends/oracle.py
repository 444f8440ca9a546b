"""What one process makes of a step, from the papers and in float64: rows one by one, nothing padded or cut.

Stock transformers networks, torch's autograd and AdamW, and nothing of the trainer.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm


@dataclass(kw_only=True)
class Row:
    """A prompt with its completion. `counted` False: it is filtered, and has only a reward."""

    prompt: list[int]
    completion: list[int]
    inference: list[float]
    reward: float = 0.0
    merge_counts: bool = True
    pad: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.completion) if self.merge_counts else 0

    @property
    def token_ids(self) -> list[int]:
        """All that the network reads: two tokens at least, as a filtered row still has a place."""
        ids = self.prompt + self.completion
        return ids if self.num_tokens else [*ids, self.pad][:2]


@dataclass(kw_only=True)
class Found:
    """Of a row: log-probs and entropies [tokens], values before each token, what the routers saw."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    routed: list[tuple[Tensor, Tensor]]  # a layer's probabilities [T, E] and choice [T, K]


def k3(x: Tensor) -> Tensor:
    return x.exp() - 1 - x


@dataclass
class Oracle:
    """A network with its optimizer, its reference and, of PPO, its critic."""

    network: Any
    config: Any  # a resolved run configuration
    head_seed: int = 0
    losses: list[float] = field(default_factory=list)  # of the updates of a step
    critic_losses: list[float] = field(default_factory=list)
    balances: list[dict[str, float]] = field(default_factory=list)
    parts: list[dict[str, Tensor]] = field(default_factory=list)  # of the rows of all its updates

    def __post_init__(self) -> None:
        self.network = _exact(self.network)
        self.reference = copy.deepcopy(self.network)
        self.algorithm, self.policy = self.config.algorithm, self.config.policy
        _watch(self.network)
        _watch(self.reference)
        self.optimizer = _adamw(self.network.parameters(), self.policy.optimizer)
        self.step_number = 0
        self.critic: Any = None
        if self.algorithm.type == "ppo":
            hidden = self.network.config.hidden_size
            generator = torch.Generator().manual_seed(self.head_seed)
            weight = torch.empty(1, hidden).normal_(std=1 / math.sqrt(hidden + 1), generator=generator)
            self.head = nn.Linear(hidden, 1).double()
            with torch.no_grad():
                self.head.weight.copy_(weight)
                self.head.bias.zero_()
            trained = list(self.head.parameters())
            self.critic = self.network
            if self.algorithm.value_backbone == "own":
                self.critic = copy.deepcopy(self.reference)
                _watch(self.critic)
                trained += list(self.critic.model.parameters())
            self.critic_optimizer = _adamw(trained, self.algorithm.value_optimizer)

    # --- one row ---

    def judged(self, network: Any, row: Row, routes: list[Tensor] | None = None) -> Found:
        temperature, _ = self.config.trained_distribution
        ids, first = torch.tensor(row.token_ids), len(row.prompt)
        network.seen, network.forced = [], routes
        z = network(ids[None]).logits[0, :-1] / temperature
        network.forced = None
        logprobs = z.log_softmax(dim=-1)
        each = logprobs.exp() * logprobs
        chosen = logprobs.gather(-1, ids[1:, None])[:, 0]
        keep = slice(first - 1, first - 1 + row.num_tokens)
        return Found(logprobs=chosen[keep], entropy=-each.sum(dim=-1)[keep], values=None, routed=network.seen)

    def valued(self, row: Row, *, graph: bool) -> Tensor:
        """Of completion tokens: computed before each, or after it."""
        coefficient, first = 1.0, len(row.prompt)
        if self.algorithm.value_backbone == "shared":
            given = self.algorithm.value_coefficient
            coefficient = 0.1 if given is None else given
        with torch.set_grad_enabled(graph):
            hidden = self.critic.model(torch.tensor(row.token_ids)[None]).last_hidden_state[0]
            hidden = hidden * coefficient + (1 - coefficient) * hidden.detach()
            values = self.head(hidden)[:, 0]
        shift = 1 if self.algorithm.right_shift else 0
        return values[first - shift : first - shift + row.num_tokens]

    # --- steps ---

    def step(self, rows: list[Row]) -> dict[str, float]:
        self.step_number += 1
        self.parts = []
        rl, metrics = self.algorithm, {}
        with torch.no_grad():
            first = [self.judged(self.network, row) for row in rows]
            old = [one.logprobs for one in first]
            reference: list[Any] = [
                self.judged(self.reference, row).logprobs if rl.kl_coefficient else None for row in rows
            ]
        self.routes = [[chosen for _, chosen in one.routed] for one in first]
        values = [self.valued(row, graph=False) for row in rows] if rl.type == "ppo" else None
        penalties = [torch.zeros_like(p) for p in old]
        if rl.kl_coefficient and rl.kl_in != "loss":
            penalties = [rl.kl_coefficient * _kl(p, r) for p, r in zip(old, reference, strict=True)]
        if values is None:
            advantages, returns = self._group_advantages(rows, penalties), None
        else:
            advantages, returns = self._gae(rows, penalties, values, metrics)
        groups = [index // rl.group_size for index in range(len(rows))]
        minibatches = [
            [index for index in range(len(rows)) if groups[index] % rl.minibatches_per_step == part]
            for part in range(rl.minibatches_per_step)
        ]
        updates = minibatches * rl.epochs_per_step
        norms, critic_norms = [], []
        for select in updates:
            norm, critic_norm = self._one_update(rows, select, old, reference, advantages, values, returns)
            norms.append(norm)
            critic_norms.append(critic_norm)
        return {
            **metrics,
            **self._reported(len(updates), values is not None),
            "train/grad_norm": sum(norms) / len(norms),
            "train/lr": self.rate(self.policy.optimizer),
            **({"train/critic/grad_norm": sum(critic_norms) / len(norms)} if values is not None else {}),
        }

    def _group_advantages(self, rows: list[Row], penalties: list[Tensor]) -> list[Tensor]:
        rl, found = self.algorithm, []
        rewards = [
            torch.tensor(row.reward).double() - p.sum() for row, p in zip(rows, penalties, strict=True)
        ]
        for start in range(0, len(rows), rl.group_size):
            group = torch.stack(rewards[start : start + rl.group_size])
            centred = group - group.mean()
            if rl.normalize_advantages:
                centred = centred / (group.std() + 1e-6)
            if bool((group == group[0]).all()):
                centred = torch.zeros_like(group)
            found += [
                a.expand(row.num_tokens)
                for a, row in zip(centred, rows[start : start + rl.group_size], strict=True)
            ]
        return found

    def _gae(self, rows: list[Row], penalties: list[Tensor], values: list[Tensor], metrics: Any) -> Any:
        rl, advantages, returns = self.algorithm, [], []
        for row, v, penalty in zip(rows, values, penalties, strict=True):
            r = -penalty.clone()
            if len(r):
                r[-1] += row.reward
            a, after, ahead = torch.zeros_like(v), 0.0, 0.0
            for t in reversed(range(len(v))):
                after = r[t] + rl.gamma * ahead - v[t] + rl.gamma * rl.gae_lambda * after
                ahead = v[t]
                a[t] = after
            advantages.append(a)
            returns.append(a + v)
        flat, of_values = torch.cat(advantages), torch.cat(values)
        of_returns = torch.cat(returns)
        metrics["train/critic/values_mean"] = float(of_values.mean())
        metrics["train/critic/returns_mean"] = float(of_returns.mean())
        spread = max(float(of_returns.var()), 1e-8)
        metrics["train/critic/explained_var"] = 1 - float((of_returns - of_values).var()) / spread
        if rl.normalize_advantages:
            advantages = [(a - flat.mean()) / (flat.std() + 1e-6) for a in advantages]
        return advantages, returns

    def _weights(self, rows: list[Row]) -> list[float]:
        """Of each row's tokens in the loss of these rows."""
        reduction = self.algorithm.loss_reduction
        tokens = sum(row.num_tokens for row in rows) or 1
        sequences = sum(row.num_tokens > 0 for row in rows) or 1
        return [
            {
                "token_mean": 1 / tokens,
                "sequence_mean": 1 / sequences / max(row.num_tokens, 1),
                "sequence_sum_constant": 1 / sequences / self.config.rollout.max_new_tokens,
                "document_sum": 1 / sequences,
            }[reduction]
            for row in rows
        ]

    def _gradient_factor(self, rows: list[Row]) -> float:
        """What a divisor of the gradient makes of the reduction's own."""
        tokens, documents = sum(row.num_tokens for row in rows), sum(row.num_tokens > 0 for row in rows)
        own = {
            "token_mean": tokens,
            "sequence_mean": documents,
            "sequence_sum_constant": documents * self.config.rollout.max_new_tokens,
            "document_sum": documents,
        }[self.algorithm.loss_reduction]
        given = self.algorithm.grad_divisor
        divisor = {None: own, "documents": documents, "documents_squared": documents**2}.get(given, given)
        return own / divisor

    def _one_update(
        self, rows: Any, select: Any, old: Any, reference: Any, advantages: Any, values: Any, returns: Any
    ) -> tuple[float, float]:
        rl, weights = self.algorithm, self._weights([rows[index] for index in select])
        critic_norm = 0.0
        records: list[dict[str, Tensor]] = []
        if values is not None:
            loss = torch.zeros(())
            for index, weight in zip(select, weights, strict=True):
                v = self.valued(rows[index], graph=True)
                each, clipped = (v - returns[index]) ** 2, torch.zeros_like(v)
                if rl.value_clip_range is not None:
                    low, high = values[index] - rl.value_clip_range, values[index] + rl.value_clip_range
                    bounded = (torch.minimum(torch.maximum(v, low), high) - returns[index]) ** 2
                    clipped = (bounded > each).double()
                    each = torch.maximum(each, bounded)
                loss = loss + weight * 0.5 * each.sum()
                records.append({"critic/clip_fraction": clipped})
            self.critic_losses.append(float(loss.detach()))
            loss.backward()
            critic_norm = _update(self.critic_optimizer, rl.value_optimizer, self.rate(rl.value_optimizer))
        replayed = self.policy.replay_routing
        found = [
            self.judged(self.network, rows[index], self.routes[index] if replayed else None)
            for index in select
        ]
        total = torch.zeros(())
        for place, (index, weight, one) in enumerate(zip(select, weights, found, strict=True)):
            c, p, a, g = (
                one.logprobs,
                old[index],
                advantages[index],
                torch.tensor(rows[index].inference).double(),
            )
            g = g[: len(c)]
            log_ratio = c - p
            if rl.loss == "gspo":
                log_ratio = log_ratio.mean().expand(len(c)) if len(c) else log_ratio
            rho = log_ratio.exp()
            bounded = rho.clamp(1 - rl.clip_low, 1 + rl.clip_high)
            each = torch.maximum(-a * rho, -a * bounded)
            clipped = -a * bounded > -a * rho
            if rl.dual_clip is not None:
                most = torch.where(a < 0, -a * rl.dual_clip, math.inf)
                clipped, each = clipped | (each > most), torch.minimum(each, most)
            if rl.importance_correction is not None:
                correction = rl.importance_correction
                each = each * (p - g).exp().clamp(correction.low, correction.high)
            penalty = torch.zeros_like(c)
            if rl.kl_coefficient and rl.kl_in == "loss":
                penalty = _kl(c, reference[index])
                each = each + rl.kl_coefficient * penalty
            each = each - rl.entropy_coefficient * one.entropy
            total = total + weight * each.sum()
            record = {
                "c": c,
                "p": p,
                "g": g,
                "rho": rho,
                "bounded": bounded,
                "clipped": clipped.double(),
                "a": a,
                "entropy": one.entropy,
                "kl": penalty,
            }
            record = {key: value.detach() for key, value in record.items()}
            self.parts.append({**record, **(records[place] if records else {})})
        balance: dict[str, float] = {}
        factor = self._gradient_factor([rows[index] for index in select])
        (total * factor + self._balance(found, balance)).backward()
        self.losses.append(float(total.detach()))
        self.balances.append(balance)
        norm = _update(self.optimizer, self.policy.optimizer, self.rate(self.policy.optimizer))
        return norm, critic_norm

    def _balance(self, found: list[Found], metrics: dict[str, float]) -> Tensor:
        layers = list(zip(*(one.routed for one in found), strict=True))
        if not layers:
            return torch.zeros(())
        probabilities = [torch.cat([p for p, _ in layer]) for layer in layers]
        num = probabilities[0].shape[1]
        counts = [
            torch.bincount(torch.cat([k.flatten() for _, k in layer]), minlength=num).double()
            for layer in layers
        ]
        joined = torch.cat(probabilities)
        shares = torch.stack(counts).sum(dim=0) / len(joined)
        loss = num * (shares * joined.mean(dim=0)).sum()
        entropies = -(joined * joined.log()).sum(dim=1)
        metrics["train/moe/aux_loss"] = float(loss.detach())
        metrics["train/moe/routing_entropy"] = float(entropies.mean())
        metrics["train/moe/max_load"] = max(float(c.max() / c.mean()) for c in counts)
        metrics["count"] = len(joined)
        return self.policy.router_aux_loss_coefficient * loss

    def _reported(self, num_updates: int, values: bool) -> dict[str, float]:
        rows = [part for part in self.parts if len(part["c"])]
        every = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        c, p, g, rho = (every[key] for key in ("c", "p", "g", "rho"))
        m = ((p.exp() + g.exp()) / 2).log()
        error = [(row["g"] - row["p"]).abs().exp().mean() for row in rows]
        weight = torch.cat([torch.full_like(row["c"], 1 / len(row["c"]) / len(rows)) for row in rows])
        correction = self.algorithm.importance_correction
        w = (p - g).exp()
        if correction is not None:
            w = w.clamp(correction.low, correction.high)
        means = {
            "token_mult_prob_error": (g - p).abs().exp(),
            "gen_kl_error": k3(p - g),
            "policy_kl_error": k3(g - p),
            "js_divergence_error": (k3(p - m) + k3(g - m)) / 2,
            "sampling_importance_ratio": w,
            "probs_ratio": rho,
            "probs_ratio_clamped": every["bounded"],
            "clip_fraction": every["clipped"],
            "approx_entropy": -(c - g).exp() * c,
            "entropy": every["entropy"],
            "advantages/mean": every["a"],
        }
        if self.algorithm.kl_coefficient and self.algorithm.kl_in == "loss":
            means["kl_penalty"] = every["kl"]
        if values:
            means["critic/clip_fraction"] = every["critic/clip_fraction"]
        found = {key: value.mean() for key, value in means.items()} | {
            "probs_ratio_max": rho.max(),
            "probs_ratio_min": rho.min(),
            "advantages/max": every["a"].max(),
            "advantages/min": every["a"].min(),
            "mean_seq_mult_prob_error": torch.stack(error).mean(),
            "max_seq_mult_prob_error": max(error),
            "min_seq_mult_prob_error": min(error),
            "loss": sum(self.losses) / num_updates,
        }
        if values:
            found["critic/loss"] = sum(self.critic_losses) / num_updates
        if self.algorithm.metrics == "full":
            found |= {
                "old_logprobs": (p * weight).sum(),
                "new_logprobs": (c * weight).sum(),
                "ratio_new_old": (rho * weight).sum(),
                "kl_new_old": ((rho - rho.log() - 1) * weight).sum(),
                "clipped_ratio_fraction": ((every["bounded"] != rho) * weight).sum(),
                "advantage": (every["a"] * weight).sum(),
                "document_entropy": (every["entropy"] * weight).sum(),
                "ratio_new_old_sum": rho.sum(),
                "ratio_new_old_squared_sum": rho.square().sum(),
                "num_tokens": len(rho),
                "max_advantage": every["a"].max(),
                "min_advantage": every["a"].min(),
            }
        if self.algorithm.metrics == "full" and self.algorithm.loss == "gspo":
            found["num_segments"] = len(rows)
            found["ratio_new_old_sum"] = sum(row["rho"][0] for row in rows)
            found["ratio_new_old_squared_sum"] = sum(row["rho"][0] ** 2 for row in rows)
        metrics = {f"train/{key}": float(value) for key, value in found.items()}
        if self.balances[0]:
            each = self.balances
            metrics["train/moe/aux_loss"] = sum(one["train/moe/aux_loss"] for one in each) / len(each)
            total = sum(one["count"] for one in each)
            key = "train/moe/routing_entropy"
            metrics[key] = sum(one[key] * one["count"] for one in each) / total
            metrics["train/moe/max_load"] = max(one["train/moe/max_load"] for one in each)
        self.losses, self.critic_losses, self.balances = [], [], []
        return metrics

    def rate(self, settings: Any) -> float:
        step, last = self.step_number, self.config.steps
        if step <= settings.warmup_steps:
            return settings.learning_rate * step / settings.warmup_steps
        if settings.schedule == "constant":
            return settings.learning_rate
        start = max(settings.warmup_steps, 1)
        x = (step - start) / max(last - start, 1)
        falls = {"linear": 1 - x, "cosine": 0.5 + 0.5 * math.cos(math.pi * x)}[settings.schedule]
        return settings.min_learning_rate + falls * (settings.learning_rate - settings.min_learning_rate)


def _kl(c: Tensor, r: Tensor) -> Tensor:
    return k3((r - c).clamp(-20, 20)).clamp(-10, 10)


def _update(optimizer: torch.optim.AdamW, settings: Any, rate: float) -> float:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
    scale = min(1.0, settings.max_grad_norm / (norm + 1e-6))
    for parameter in parameters:
        parameter.grad *= scale
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _adamw(parameters: Iterator[nn.Parameter] | list[nn.Parameter], settings: Any) -> torch.optim.AdamW:
    each = [{"params": [p], "weight_decay": settings.weight_decay if p.ndim > 1 else 0.0} for p in parameters]
    return torch.optim.AdamW(each, betas=(settings.beta1, settings.beta2), eps=settings.eps, foreach=False)


def _exact(network: Any) -> Any:
    """In float64 throughout: norms of transformers go through float32."""
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon)
    if hasattr(network.config, "num_experts"):
        network.set_experts_implementation("eager")
    network.double()
    network.requires_grad_(True)
    return network


def _watch(network: Any) -> None:
    """Let routers say what they see, and take routes that `forced` has."""
    network.seen, network.forced = [], None
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: rms_norm(x, x.shape[-1:], m.weight, m.variance_epsilon)
        if not type(module).__name__.endswith("TopKRouter"):
            continue

        def route(hidden: Tensor, router: Any = module) -> tuple[Tensor, Tensor, Tensor]:
            logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)
            probabilities = logits.softmax(dim=-1)
            weights, chosen = probabilities.topk(router.top_k)
            if network.forced is not None:
                chosen = network.forced[len(network.seen)]
                weights = probabilities.gather(-1, chosen)
            network.seen.append((probabilities, chosen))
            if router.norm_topk_prob:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights, chosen

        module.forward = route
