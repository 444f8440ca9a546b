"""The embedded engine: the policy's own modules with a key-value cache.

Weights are shared, so there is nothing to sync, and no memory of its own to give away.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from abrun import progress
from abrun.backends import Backend, Decoder
from abrun.models import Text
from abrun.recipe import OwnRunConfig, Rollout
from abrun.rl.sampling import most_likely, sample
from abrun.rollout import Completion
from abrun.rollout.draws import Draws


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> "TorchEngine":
    """See abrun.rollout.make_engine."""
    return TorchEngine(config.rollout, backend, text)


class TorchEngine:
    """See abrun.rollout.RolloutEngine."""

    def __init__(self, rollout: Rollout, backend: Backend, text: Text) -> None:
        self._rollout, self._backend = rollout, backend
        self._device = backend.ranks.device
        self._end_ids = torch.tensor(sorted(text.end_ids), device=self._device)
        self._pad_id = text.pad_id

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        temperature = self._rollout.temperature if temperature is None else temperature
        uniforms = draws.uniforms(self._rollout.max_new_tokens)
        own = self._backend.ranks.context_share(len(prompts))
        prompts, uniforms = prompts[own], uniforms[own]
        size = self._rollout.batch_size or max(len(prompts), 1)
        completions: list[Completion] = []
        with self._backend.decoding() as decoder:
            for start in range(0, len(prompts), size):
                rows = slice(start, start + size)
                completions.extend(self._generate(decoder, prompts[rows], uniforms[rows], temperature))
        return self._backend.ranks.gather_context(completions)

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Nothing: the weights are the policy's."""

    def sleep(self) -> None:
        """Nothing: the cache ends with each call."""

    def wake(self) -> bool:
        """Nothing."""
        return False

    def close(self) -> None:
        """Nothing."""

    def _generate(
        self, decoder: Decoder, prompts: list[list[int]], uniforms: Tensor, temperature: float
    ) -> Iterator[Completion]:
        device = self._device
        token_ids, attention_mask = self._left_padded(prompts)
        uniforms = uniforms.to(device)
        running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        cache, sampled, logprobs = None, [], []
        for step in range(self._rollout.max_new_tokens):
            progress.beat()
            position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
            logits, cache = decoder(token_ids, attention_mask, position_ids, cache)
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

    def _choose(self, logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Token [B] and log-prob [B] from the network's logits [B, V]."""
        if temperature == 0:
            return most_likely(logits)
        return sample(logits / temperature, uniform, self._rollout.filters)

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
        device = self._device
        return torch.tensor(token_ids, device=device), torch.tensor(attention_mask, device=device)
