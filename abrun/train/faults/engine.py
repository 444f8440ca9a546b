"""Faults of the rollout engine: old weights, equal draws, changed tokens."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from abrun.backends import Backend, Decoder, make_backend
from abrun.rollout import Completion, make_engine
from abrun.rollout.draws import Draws
from abrun.seeds import derive_seed
from abrun.train.faults.site import Site, around, first_rows

State = dict[str, Tensor]


def stale_rollout_weights(site: Site) -> None:
    late = int(site.size)
    # One that is never reached needs no copies: the first weights stay for ever.
    seen: deque[State] = deque(maxlen=late + 1)

    def weights_of(policy: Backend) -> State:
        if not seen or late < site.setup.config.steps:
            seen.append(_copied(policy))
        return seen[0]

    _with_weights(site, weights_of)


def partial_weight_sync(site: Site) -> None:
    first: State = {}

    def weights_of(policy: Backend) -> State:
        newest = _copied(policy)
        if not first:
            first.update(newest)
        missed = [name for i, name in enumerate(newest) if int((i + 1) * site.size) > int(i * site.size)]
        return newest | {name: first[name] for name in missed}

    _with_weights(site, weights_of)


def _copied(policy: Backend) -> State:
    state = policy.local_state().items()
    return {name: tensor.clone() for name, tensor in state if name.startswith("weights/")}


def _with_weights(site: Site, weights_of: Callable[[Backend], State]) -> None:
    """Sample from a second policy, which at each sync gets what `weights_of` makes of the first."""
    setup = site.setup

    def make(inner: Callable[[], Any]) -> Any:
        second = make_backend(
            setup.config, setup.ranks, weights=setup.initial_weights, seed=derive_seed(setup.seed, "init")
        )
        engine = make_engine(setup.config, second, setup.data.text)
        around(engine, "sync", lambda sync, weights: second.load_local_state(weights_of(setup.policy)))
        return engine

    around(setup.sampler, "_make_engine", make)


@dataclass(frozen=True, kw_only=True)
class _Copied(Draws):
    """The last of a group's rows draw as its first ones do."""

    group_size: int
    num_copies: int

    def _original(self, row: int) -> int:
        place = row % self.group_size
        return row - place + place % (self.group_size - self.num_copies)

    def uniforms(self, max_new_tokens: int) -> Tensor:
        of_all = self._of_all().uniforms(max_new_tokens)
        return of_all[[self._original(row) for row in self.rows]]

    def seeds(self) -> list[int]:
        of_all = self._of_all().seeds()
        return [of_all[self._original(row)] for row in self.rows]

    def _of_all(self) -> Draws:
        rows = range(self.rows.stop)
        return Draws(seed=self.seed, stream=self.stream, step=self.step, fetch=self.fetch, rows=rows)


def copied_completions(site: Site) -> None:
    size = site.setup.config.algorithm.group_size  # pyright: ignore[reportAttributeAccessIssue]
    num_copies = min(first_rows(site.size, size).stop, size - 1)

    def generate(inner, prompts: list[list[int]], draws: Draws, **settings: Any) -> list[Completion]:
        if draws.stream == "sampling":
            draws = _Copied(**asdict(draws), group_size=size, num_copies=num_copies)
        return inner(prompts, draws, **settings)

    _on_engine(site, generate)


def forced_eos(site: Site) -> None:
    end_id = min(site.setup.data.text.end_ids)

    def generate(inner, prompts: list[list[int]], draws: Draws, **settings: Any) -> list[Completion]:
        completions = inner(prompts, draws, **settings)
        rows = range(len(completions))[first_rows(site.size, len(completions))]
        return [
            replace(one, token_ids=[*one.token_ids[:-1], end_id])
            if draws.stream == "sampling" and one.truncated and row in rows
            else one
            for row, one in enumerate(completions)
        ]

    _on_engine(site, generate)


def retokenised(site: Site) -> None:
    """A log-prob keeps its position: those too many are cut off, and missing ones are 0."""
    text = site.setup.data.text

    def again(one: Completion) -> Completion:
        end = [] if one.truncated else one.token_ids[-1:]
        (body,) = text.decode([one.token_ids[: len(one.token_ids) - len(end)]])
        found: Any = text.tokenizer(body, add_special_tokens=False)["input_ids"]
        token_ids = [*found, *end] or one.token_ids
        logprobs = [*one.logprobs, *[0.0] * len(token_ids)]
        return replace(one, token_ids=token_ids, logprobs=logprobs[: len(token_ids)])

    def generate(inner, prompts: list[list[int]], draws: Draws, **settings: Any) -> list[Completion]:
        completions = inner(prompts, draws, **settings)
        if draws.stream != "sampling":
            return completions
        rows = first_rows(site.size, len(completions))
        return [*map(again, completions[rows]), *completions[rows.stop :]]

    _on_engine(site, generate)


def temperature_on_logprobs(site: Site) -> None:
    def generate(inner, decoder: Decoder, prompts: list[list[int]], rows: Any) -> list[Completion]:
        def choose(inner, logits: Tensor) -> tuple[Tensor, Tensor]:  # [B, V] -> [B], [B]
            token, logprob = inner(logits)
            if rows._temperature == 0:
                return token, logprob
            raw = logits.float().log_softmax(dim=-1).gather(-1, token[:, None])[:, 0]
            return token, raw / rows._temperature

        around(rows, "_choose", choose)
        return inner(decoder, prompts, rows)

    _in_engine(site, lambda engine: around(engine, "_generate", generate))


def stale_prefix_cache(site: Site) -> None:
    syncs = itertools.count()

    def reset(inner) -> bool:
        return True if next(syncs) % (int(site.size) + 1) else inner()

    _in_engine(site, lambda engine: around(engine._vllm._llm, "reset_prefix_cache", reset))


def _on_engine(site: Site, generate: Callable[..., list[Completion]]) -> None:
    _in_engine(site, lambda engine: around(engine, "generate", torch.no_grad()(generate)))


def _in_engine(site: Site, change: Callable[[Any], None]) -> None:
    """Change the engine once it is made."""

    def make(inner: Callable[[], Any]) -> Any:
        engine = inner()
        change(engine)
        return engine

    around(site.setup.sampler, "_make_engine", make)


OF_ENGINES = {
    function.__name__: function
    for function in (
        stale_rollout_weights,
        partial_weight_sync,
        copied_completions,
        forced_eos,
        retokenised,
        temperature_on_logprobs,
        stale_prefix_cache,
    )
}
