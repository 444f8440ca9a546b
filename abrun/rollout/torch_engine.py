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

from abrun import progress
from abrun.backends import Backend, Decoder
from abrun.models import Places, Text, has_all_tokens
from abrun.recipe import Filters, OwnRunConfig, Rollout
from abrun.rl.sampling import most_likely, sample
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
        """Nothing: cache and graphs end with each call."""

    def wake(self) -> bool:
        """Nothing."""
        return False

    def close(self) -> None:
        """Nothing."""

    def _generate(
        self, decoder: Decoder, prompts: list[list[int]], uniforms: Tensor, temperature: float
    ) -> list[Completion]:
        progress.beat()
        token_ids, attention_mask = self._left_padded(prompts)
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        rows = _Rows(
            attention_mask.sum(dim=1),
            uniforms.to(self._device),
            end_ids=self._end_ids,
            pad_id=self._pad_id,
            filters=self._rollout.filters,
            temperature=temperature,
        )
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
            progress.beat()
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
                    progress.beat()
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
        num_tokens: Tensor,  # [B] of the prompts
        uniforms: Tensor,  # [B, T]
        *,
        end_ids: Tensor,
        pad_id: int,
        filters: Filters,
        temperature: float,
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
        rows = zip(*(tensor.tolist() for tensor in of_each), strict=True)
        return [
            Completion(token_ids=tokens[:length], logprobs=logprobs[:length], truncated=unfinished)
            for tokens, logprobs, unfinished, length in rows
        ]

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._temperature == 0:
            return most_likely(logits)
        uniform = self._uniforms.index_select(1, self._num_drawn)[:, 0]
        return sample(logits / self._temperature, uniform, self._filters)
