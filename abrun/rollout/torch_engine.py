"""The embedded engine: the policy's own modules with a key-value cache.

Weights are shared, so there is no sync.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from abrun.backends.dtensor import DtensorBackend
from abrun.models import LanguageModel
from abrun.recipe import Rollout
from abrun.rl.sampling import most_likely, sample
from abrun.rollout import Completion


class TorchEngine:
    """See abrun.rollout.RolloutEngine."""

    def __init__(self, backend: DtensorBackend, model: LanguageModel, rollout: Rollout) -> None:
        self._backend = backend
        self._end_ids = torch.tensor(sorted(model.end_ids), device=backend.device)
        self._pad_id = model.pad_id
        self._rollout = rollout

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], uniforms: Tensor, *, temperature: float | None = None
    ) -> list[Completion]:
        size = self._rollout.batch_size or len(prompts)
        completions: list[Completion] = []
        with self._backend.gathered() as policy:
            for start in range(0, len(prompts), size):
                rows = slice(start, start + size)
                completions.extend(self._generate(policy, prompts[rows], uniforms[rows], temperature))
        return completions

    def _generate(
        self, policy: Any, prompts: list[list[int]], uniforms: Tensor, temperature: float | None
    ) -> Iterator[Completion]:
        device = self._backend.device
        token_ids, attention_mask = self._left_padded(prompts)
        uniforms = uniforms.to(device)
        running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        cache, sampled, logprobs = None, [], []
        for step in range(self._rollout.max_new_tokens):
            logits, cache = policy(
                token_ids,
                attention_mask=attention_mask,
                position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -token_ids.shape[1] :],
                past_key_values=cache,
            )
            token, logprob = self._choose(logits, uniforms[:, step], temperature)
            sampled.append(torch.where(running, token, self._pad_id))
            logprobs.append(logprob)
            attention_mask = torch.cat([attention_mask, running[:, None].long()], dim=1)
            running = running & ~torch.isin(token, self._end_ids)
            if not running.any():
                break
            token_ids = sampled[-1][:, None]
        return self._collect(
            torch.stack(sampled, dim=1), torch.stack(logprobs, dim=1), running, attention_mask
        )

    def _choose(self, logits: Tensor, uniform: Tensor, temperature: float | None) -> tuple[Tensor, Tensor]:
        """Token [B] and log-prob [B] from logits [B, V] that are over the recipe's temperature."""
        if temperature == 0:
            return most_likely(logits)
        if temperature is not None and temperature != self._rollout.temperature:
            logits = logits * (self._rollout.temperature / temperature)
        return sample(logits, uniform, self._rollout.top_p)

    def _collect(
        self,
        sampled: Tensor,  # [B, T]
        logprobs: Tensor,  # [B, T]
        running: Tensor,  # [B] bool: never met an end token
        attention_mask: Tensor,  # [B, prompt + T]: 1 on what was sampled while running
    ) -> Iterator[Completion]:
        lengths = attention_mask[:, -sampled.shape[1] :].sum(dim=1).tolist()
        rows = zip(sampled.tolist(), logprobs.tolist(), running.tolist(), lengths, strict=True)
        for tokens, token_logprobs, unfinished, length in rows:
            yield Completion(
                token_ids=tokens[:length], logprobs=token_logprobs[:length], truncated=unfinished
            )

    def _left_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        token_ids = [[self._pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        attention_mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._backend.device
        return torch.tensor(token_ids, device=device), torch.tensor(attention_mask, device=device)
