"""Rollout engine that decodes with the policy's own modules and a key-value cache.

It shares the policy's weights, so it has nothing to sync and no memory to free. If the attention of the model
family allows it, the cache is filled in place, and on a GPU each decoding step is a CUDA graph. The graph is
captured anew in every call, because gathered weights may be at other addresses. Letters: B sequences, S =
max_new_tokens positions, T tokens of a completion, V vocabulary, W bytes of a support.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from abrun.processes import progress
from abrun.recipe.policy import Filters, Rollout
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend
from abrun.trainer.backends.head import Decoder
from abrun.trainer.models.checks import InPlaceCache, holds_all_tokens
from abrun.trainer.models.text import Text
from abrun.trainer.rl.sampling import filter_logits, filtered_logprobs, pack_bits, sample, sample_greedily
from abrun.trainer.rollout import Completion, RolloutEngine
from abrun.trainer.seeds import Draws

# CUDA graphs for a decoding step that always runs the same operators on the same memory.
# A small step on a GPU is bound by its thousands of kernel launches; a CUDA graph needs one launch. The
# graph is captured by hand, which costs about two steps. torch.compile would take longer to start than
# most rollouts.

Step = Callable[[], None]


class GraphReplayer:
    """Captures steps as CUDA graphs on one device; each graph has its own memory pool, freed at the end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # cuBLAS keeps a workspace for each stream; allocate it now, not from a pool that is freed later.
            torch.mm(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))

    @contextlib.contextmanager
    def __call__(self, step: Step) -> Iterator[Step]:
        """Yield a callable that runs `step` on its first call, captures and replays it on its second, and
        replays it from then on.

        If the first run synchronizes with the device, it fails halfway and is repeated, and `step` is never
        captured. So `step` must have no side effects before its end.
        """
        outer_stream, replayed_step = torch.cuda.current_stream(), _ReplayedStep(step)
        self._stream.wait_stream(outer_stream)
        try:
            with torch.cuda.stream(self._stream):
                yield replayed_step
        finally:
            outer_stream.wait_stream(self._stream)
            self._stream.synchronize()
            replayed_step.close()  # drops graph and pool: the last reference to the pool frees its memory


class _ReplayedStep:
    """A step that runs, is captured and is replayed on successive calls; see GraphReplayer."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tried, self._waits = False, False

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._waits:
            self._step()
        elif not self._tried:
            self._try()
        else:
            self._graph = self._record_graph()
            self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._pool = None

    def _try(self) -> None:
        """Run the step once, so that libraries initialise, and detect whether it synchronizes."""
        assert self._pool is not None
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.use_mem_pool(self._pool):
                self._step()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self._waits = True
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self._tried = True
        if self._waits:
            self._step()

    def _record_graph(self) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph, which empties the allocator's cache, including the trainer's, every time.
        assert self._pool is not None
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._pool.id
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._step()
        finally:
            graph.capture_end()
        return graph


INITIAL_SLOTS = 512  # initial capacity of a cache in tokens; it doubles when completions need more
STEPS_BETWEEN_CHECKS = 16  # on a GPU: checking whether all sequences have ended synchronizes with the device


def make_engine(config: OwnRunConfig, backend: Backend, text: Text) -> "TorchEngine":
    """See abrun.trainer.rollout.make_engine."""
    return TorchEngine(config.rollout, backend, text)


class TorchEngine(RolloutEngine):
    """See abrun.trainer.rollout.RolloutEngine."""

    def __init__(self, rollout: Rollout, backend: Backend, text: Text) -> None:
        self._rollout, self._backend = rollout, backend
        self._filters, self._records_support = rollout.filters, rollout.records_support
        self._device = backend.ranks.device
        self._end_ids = torch.tensor(sorted(text.end_ids), device=self._device)
        self._pad_id = text.pad_id
        on_gpu = self._device.type == "cuda"
        self._replayer = GraphReplayer(self._device) if on_gpu else None
        self._steps_between_checks = STEPS_BETWEEN_CHECKS if on_gpu else 1

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        with_support = temperature is None and self._records_support
        temperature = self._rollout.temperature if temperature is None else temperature
        uniforms = draws.uniforms(self._rollout.max_new_tokens)
        local_rows = self._backend.ranks.context_slice(len(prompts))
        prompts, uniforms = prompts[local_rows], uniforms[local_rows]

        def make_batch(rows: slice, **settings: Any) -> _DecodingBatch:
            return _DecodingBatch(uniforms[rows].to(self._device), **settings, with_support=with_support)

        completions = self._decode(prompts, temperature, make_batch)
        return self._backend.ranks.all_gather_context(completions)

    @torch.no_grad()
    def score(
        self,
        prompts: list[list[int]],
        completions: list[list[int]],
        support: list[Tensor] | None = None,  # [T, W] for each completion; None: apply the filters
    ) -> list[list[float]]:
        """Return the log-probs of given completions, computed by the same decoding steps as in `generate`.

        Each completion must end with an end token or have `max_new_tokens` tokens. One rank only.
        """
        max_new_tokens, temperature = self._rollout.max_new_tokens, self._rollout.temperature
        padded = [tokens + [self._pad_id] * (max_new_tokens - len(tokens)) for tokens in completions]
        forced_tokens = torch.tensor(padded, device=self._device)
        padded_support: Tensor | None = None
        if support is not None:
            padded_support = torch.zeros(len(support), max_new_tokens, support[0].shape[1], dtype=torch.uint8)
            for row, token_support in enumerate(support):
                padded_support[row, : len(token_support)] = token_support
            padded_support = padded_support.to(self._device)

        def make_batch(rows: slice, **settings: Any) -> _DecodingBatch:
            kept = None if padded_support is None else padded_support[rows]
            return _ForcedBatch(forced_tokens[rows], kept, **settings)

        scored = self._decode(prompts, temperature, make_batch)
        return [completion.logprobs for completion in scored]

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Do nothing: the engine shares the policy's weights."""

    def sleep(self) -> int:
        """Do nothing: cache and graphs are freed after each call."""
        return 0

    def wake(self) -> bool:
        """Do nothing: the policy's weights are always there."""
        return False

    def _decode(
        self, prompts: list[list[int]], temperature: float, make_batch: Callable[..., "_DecodingBatch"]
    ) -> list[Completion]:
        """Decode the prompts, `rollout.batch_size` at a time; `make_batch` makes the batch of some rows."""
        size = self._rollout.batch_size or max(len(prompts), 1)
        completions: list[Completion] = []
        with self._backend.decoding() as decoder:
            for start in range(0, len(prompts), size):
                rows = slice(start, start + size)
                settings = {
                    "num_tokens": torch.tensor(
                        [len(prompt) for prompt in prompts[rows]], device=self._device
                    ),
                    "end_ids": self._end_ids,
                    "pad_id": self._pad_id,
                    "filters": self._filters,
                    "temperature": temperature,
                }
                sequences = make_batch(rows, **settings)
                completions.extend(self._generate(decoder, prompts[rows], sequences))
        return completions

    def _generate(
        self, decoder: Decoder, prompts: list[list[int]], sequences: "_DecodingBatch"
    ) -> list[Completion]:
        progress.report()
        token_ids, attention_mask = self._left_padded(prompts)
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        logits, cache = decoder(token_ids, attention_mask, position_ids, None)
        sequences.draw(logits)
        if decoder.in_place and holds_all_tokens(cache):
            self._decode_in_place(decoder, sequences, cache, attention_mask.bool())
        else:
            self._decode_growing(decoder, sequences, cache, attention_mask)
        return sequences.completions()

    def _decode_growing(
        self, decoder: Decoder, sequences: "_DecodingBatch", cache: Any, attention_mask: Tensor
    ) -> None:
        """Decode with the cache that the model family provides, which grows with every token."""
        for step in range(1, self._rollout.max_new_tokens):
            progress.report()
            if self._should_check_ends(step) and sequences.all_ended():
                return
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
            logits, cache = decoder(sequences.token_ids, attention_mask, sequences.position_ids, cache)
            sequences.draw(logits)

    def _decode_in_place(
        self, decoder: Decoder, sequences: "_DecodingBatch", cache: Any, is_token: Tensor
    ) -> None:
        """Decode with a preallocated cache, which is enlarged when completions need more slots."""
        num_drawn, max_new_tokens = 1, self._rollout.max_new_tokens
        while num_drawn < max_new_tokens and not sequences.all_ended():
            num_slots = min(max(num_drawn, INITIAL_SLOTS), max_new_tokens - num_drawn)
            cache = (
                cache.grown(num_slots)
                if isinstance(cache, InPlaceCache)
                else InPlaceCache(cache, is_token, num_slots)
            )
            with self._make_step(decoder, sequences, cache) as step:
                for _ in range(num_slots):
                    progress.report()
                    step()
                    num_drawn += 1
                    if self._should_check_ends(num_drawn) and sequences.all_ended():
                        return

    def _make_step(
        self, decoder: Decoder, sequences: "_DecodingBatch", cache: InPlaceCache
    ) -> contextlib.AbstractContextManager[Step]:
        def step() -> None:
            cache.take()
            logits, _ = decoder(sequences.token_ids, cache.mask, sequences.position_ids, cache)
            sequences.draw(logits)
            cache.advance()

        if self._replayer is None or decoder.collective:
            return contextlib.nullcontext(step)
        return self._replayer(step)

    def _should_check_ends(self, num_drawn: int) -> bool:
        return num_drawn % self._steps_between_checks == 0

    def _left_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        token_ids = [[self._pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        attention_mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._device
        return torch.tensor(token_ids, device=device), torch.tensor(attention_mask, device=device)


class _DecodingBatch:
    """The sequences of a batch during sampling, in tensors with fixed addresses."""

    def __init__(
        self,
        uniforms: Tensor,  # [B, S]
        *,
        num_tokens: Tensor,  # [B], tokens of each prompt
        end_ids: Tensor,
        pad_id: int,
        filters: Filters,
        temperature: float,
        with_support: bool = False,
    ) -> None:
        self._uniforms, self._end_ids, self._pad_id = uniforms, end_ids, pad_id
        self._filters, self._temperature = filters, temperature
        device = uniforms.device
        self.token_ids = num_tokens.new_zeros(len(uniforms), 1)  # the most recent token of each sequence
        self.position_ids = num_tokens[:, None] - 1  # their positions
        self._num_drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._running = torch.ones(len(uniforms), dtype=torch.bool, device=device)
        self._lengths = torch.zeros_like(num_tokens)
        self._sampled = torch.zeros(uniforms.shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(uniforms.shape, device=device)
        self._with_support = with_support
        self._support: Tensor | None = None

    def draw(self, logits: Tensor) -> None:  # [B, V], unscaled
        """Draw the next token of each sequence; padding for those that have ended."""
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
        tensors = (self._sampled, self._logprobs, self._running, self._lengths)
        support = [None] * len(self._sampled) if self._support is None else self._support.cpu()
        rows = zip(*(tensor.tolist() for tensor in tensors), support, strict=True)
        return [
            Completion(
                token_ids=tokens[:length],
                logprobs=logprobs[:length],
                support=None if token_support is None else token_support[:length].clone(),
                truncated=unfinished,
            )
            for tokens, logprobs, unfinished, length, token_support in rows
        ]

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._temperature == 0:
            return sample_greedily(logits)
        uniform = self._uniforms.index_select(1, self._num_drawn)[:, 0]
        logits = filter_logits((logits / self._temperature).float(), self._filters)
        if self._with_support:
            support = pack_bits(logits > float("-inf"))  # [B, W]
            if self._support is None:  # allocated at the first draw, which is before any graph capture
                self._support = support.new_zeros(*self._sampled.shape, support.shape[1])
            self._support.index_copy_(1, self._num_drawn, support[:, None])
        return sample(logits, uniform)


class _ForcedBatch(_DecodingBatch):
    """Sequences with given tokens, which are scored as if they were drawn."""

    def __init__(
        self,
        forced_tokens: Tensor,  # [B, S]
        support: Tensor | None,  # [B, S, W]
        **settings: Any,
    ) -> None:
        super().__init__(forced_tokens, **settings)
        self._given, self._kept = forced_tokens, support

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token = self._given.index_select(1, self._num_drawn)[:, 0]
        support = None if self._kept is None else self._kept.index_select(1, self._num_drawn)[:, 0]
        logprobs, _ = filtered_logprobs(
            logits / self._temperature, token, filters=self._filters, ignore_index=-1, support=support
        )
        return token, logprobs
