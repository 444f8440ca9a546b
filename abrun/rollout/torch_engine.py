"""The embedded engine: the policy's own modules with a key-value cache.

Weights are shared, so there is nothing to sync, and no memory of its own to give away. Where a family's
attention allows it, the cache is filled in place, and on a GPU a step is a CUDA graph: recorded anew in every
call, as the weights of the next one lie elsewhere. Letters: B sequences, T tokens a completion may have.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from abrun.backends import Backend, Decoder
from abrun.models import Places, Text, has_all_tokens
from abrun.processes import progress
from abrun.recipe.policy import Filters, Rollout
from abrun.recipe.run import OwnRunConfig
from abrun.rl.sampling import filtered_logprobs, keep, packed, sample, sample_greedily
from abrun.rollout import Completion
from abrun.rollout.draws import Draws
from abrun.rollout.replay import Replays, Step, as_it_is

FIRST_ROOM = 512  # tokens that a cache has places for at first; it doubles, as completions need it
STEPS_BETWEEN_LOOKS = 16  # of a GPU at whether any sequence still runs: each look waits for it


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
        on_gpu = self._device.type == "cuda"
        self._replays = Replays(self._device) if on_gpu else None
        self._steps_between_looks = STEPS_BETWEEN_LOOKS if on_gpu else 1

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        with_support = temperature is None and self._rollout.records_support
        temperature = self._rollout.temperature if temperature is None else temperature
        uniforms = draws.uniforms(self._rollout.max_new_tokens)
        own = self._backend.ranks.context_slice(len(prompts))
        prompts, uniforms = prompts[own], uniforms[own]
        size = self._rollout.batch_size or max(len(prompts), 1)
        completions: list[Completion] = []
        with self._backend.decoding() as decoder:
            for start in range(0, len(prompts), size):
                part = slice(start, start + size)
                settings = self._settings(prompts[part], temperature)
                rows = _Rows(uniforms[part].to(self._device), **settings, with_support=with_support)
                completions.extend(self._generate(decoder, prompts[part], rows))
        return self._backend.ranks.all_gather_context(completions)

    @torch.no_grad()
    def score(
        self,
        prompts: list[list[int]],
        completions: list[list[int]],
        support: list[Tensor] | None = None,  # [tokens, W] of each: what filters kept; None: what they keep
    ) -> list[list[float]]:
        """Log-probs of completions that are given: as if they were drawn, by the same steps.

        Each ends with an end token, or has `max_new_tokens`. On one rank.
        """
        most, temperature = self._rollout.max_new_tokens, self._rollout.temperature
        filled = [tokens + [self._pad_id] * (most - len(tokens)) for tokens in completions]
        given = torch.tensor(filled, device=self._device)
        kept = None if support is None else self._filled(support, most)
        size = self._rollout.batch_size or max(len(prompts), 1)
        scored: list[Completion] = []
        with self._backend.decoding() as decoder:
            for start in range(0, len(prompts), size):
                part = slice(start, start + size)
                settings = self._settings(prompts[part], temperature)
                rows = _Given(given[part], None if kept is None else kept[part], **settings)
                scored.extend(self._generate(decoder, prompts[part], rows))
        return [each.logprobs for each in scored]

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Nothing: the weights are the policy's."""

    def sleep(self) -> int:
        """Nothing: cache and graphs end with each call."""
        return 0

    def wake(self) -> bool:
        """Nothing."""
        return False

    def close(self) -> None:
        """Nothing."""

    def _filled(self, support: list[Tensor], most: int) -> Tensor:  # [tokens, W] each -> [B, most, W]
        filled = torch.zeros(len(support), most, support[0].shape[1], dtype=torch.uint8)
        for row, kept in enumerate(support):
            filled[row, : len(kept)] = kept
        return filled.to(self._device)

    def _settings(self, prompts: list[list[int]], temperature: float) -> dict[str, Any]:
        return {
            "num_tokens": torch.tensor([len(prompt) for prompt in prompts], device=self._device),
            "end_ids": self._end_ids,
            "pad_id": self._pad_id,
            "filters": self._rollout.filters,
            "temperature": temperature,
        }

    def _generate(self, decoder: Decoder, prompts: list[list[int]], rows: "_Rows") -> list[Completion]:
        progress.report()
        token_ids, attention_mask = self._left_padded(prompts)
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        logits, cache = decoder(token_ids, attention_mask, position_ids, None)
        rows.draw(logits)
        if decoder.in_place and has_all_tokens(cache):
            self._decode_in_place(decoder, rows, cache, attention_mask.bool())
        else:
            self._decode_growing(decoder, rows, cache, attention_mask)
        return rows.completions()

    def _decode_growing(self, decoder: Decoder, rows: "_Rows", cache: Any, attention_mask: Tensor) -> None:
        """With whatever cache the family has."""
        for step in range(1, self._rollout.max_new_tokens):
            progress.report()
            if self._is_time_to_look(step) and rows.all_ended():
                return
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
            logits, cache = decoder(rows.token_ids, attention_mask, rows.position_ids, cache)
            rows.draw(logits)

    def _decode_in_place(self, decoder: Decoder, rows: "_Rows", cache: Any, real: Tensor) -> None:
        """With places for so many tokens at a time, and more where they are needed."""
        num_drawn, most = 1, self._rollout.max_new_tokens
        while num_drawn < most and not rows.all_ended():
            room = min(max(num_drawn, FIRST_ROOM), most - num_drawn)
            cache = cache.grown(room) if isinstance(cache, Places) else Places(cache, real, room)
            with self._stepping(decoder, rows, cache) as step:
                for _ in range(room):
                    progress.report()
                    step()
                    num_drawn += 1
                    if self._is_time_to_look(num_drawn) and rows.all_ended():
                        return

    def _stepping(
        self, decoder: Decoder, rows: "_Rows", places: Places
    ) -> contextlib.AbstractContextManager[Step]:
        def step() -> None:
            places.take()
            logits, _ = decoder(rows.token_ids, places.mask, rows.position_ids, places)
            rows.draw(logits)
            places.advance()

        if self._replays is None or decoder.collective:
            return as_it_is(step)
        return self._replays(step)

    def _is_time_to_look(self, num_drawn: int) -> bool:
        return num_drawn % self._steps_between_looks == 0

    def _left_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        token_ids = [[self._pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        attention_mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._device
        return torch.tensor(token_ids, device=device), torch.tensor(attention_mask, device=device)


class _Rows:
    """Sequences as they are drawn, in memory that stays where it is."""

    def __init__(
        self,
        uniforms: Tensor,  # [B, T]
        *,
        num_tokens: Tensor,  # [B] of the prompts
        end_ids: Tensor,
        pad_id: int,
        filters: Filters,
        temperature: float,
        with_support: bool = False,
    ) -> None:
        self._uniforms, self._end_ids, self._pad_id = uniforms, end_ids, pad_id
        self._filters, self._temperature = filters, temperature
        device = uniforms.device
        self.token_ids = num_tokens.new_zeros(len(uniforms), 1)  # the last ones drawn
        self.position_ids = num_tokens[:, None] - 1  # theirs
        self._num_drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._running = torch.ones(len(uniforms), dtype=torch.bool, device=device)
        self._lengths = torch.zeros_like(num_tokens)
        self._sampled = torch.zeros(uniforms.shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(uniforms.shape, device=device)
        self._with_support = with_support
        self._support: Tensor | None = None

    def draw(self, logits: Tensor) -> None:  # [B, V], the network's
        """A token of each sequence; of those that have ended, padding."""
        token, logprob = self._choose(logits)
        token = torch.where(self._running, token, self._pad_id)
        self._sampled.index_copy_(1, self._num_drawn, token[:, None])
        self._logprobs.index_copy_(1, self._num_drawn, logprob[:, None])
        self._lengths += self._running
        self._running &= (token[:, None] != self._end_ids).all(dim=1)
        self.token_ids.copy_(token[:, None])
        self.position_ids += 1
        self._num_drawn += 1

    def all_ended(self) -> bool:
        return not self._running.any()

    def completions(self) -> list[Completion]:
        of_each = (self._sampled, self._logprobs, self._running, self._lengths)
        support = [None] * len(self._sampled) if self._support is None else self._support.cpu()
        rows = zip(*(tensor.tolist() for tensor in of_each), support, strict=True)
        return [
            Completion(
                token_ids=tokens[:length],
                logprobs=logprobs[:length],
                support=None if kept is None else kept[:length].clone(),
                truncated=unfinished,
            )
            for tokens, logprobs, unfinished, length, kept in rows
        ]

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._temperature == 0:
            return sample_greedily(logits)
        uniform = self._uniforms.index_select(1, self._num_drawn)[:, 0]
        logits = keep((logits / self._temperature).float(), self._filters)
        if self._with_support:
            self._record(packed(logits > float("-inf")))
        return sample(logits, uniform)

    def _record(self, kept: Tensor) -> None:  # [B, W]
        if self._support is None:  # with the first draw, which is before any step that is replayed
            self._support = kept.new_zeros(*self._sampled.shape, kept.shape[1])
        self._support.index_copy_(1, self._num_drawn, kept[:, None])


class _Given(_Rows):
    """Sequences whose tokens are known, drawn as if by chance."""

    def __init__(
        self,
        given: Tensor,  # [B, T]
        kept: Tensor | None,  # [B, T, W]
        **settings: Any,
    ) -> None:
        super().__init__(given, **settings)
        self._given, self._kept = given, kept

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token = self._given.index_select(1, self._num_drawn)[:, 0]
        kept = None if self._kept is None else self._kept.index_select(1, self._num_drawn)[:, 0]
        logprobs, _ = filtered_logprobs(
            logits / self._temperature, token, filters=self._filters, ignore_index=-1, support=kept
        )
        return token, logprobs
