"""Faults of the rollout engine: old weights, equal draws, changed tokens."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from abrun.backends import Backend, make_backend
from abrun.rollout import Completion, make_engine
from abrun.rollout.draws import Draws
from abrun.seeds import derive
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
            setup.config, setup.ranks, weights=setup.initial_weights, seed=derive(setup.seed, "init")
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


def _on_engine(site: Site, generate: Callable[..., list[Completion]]) -> None:
    def make(inner: Callable[[], Any]) -> Any:
        engine = inner()
        around(engine, "generate", torch.no_grad()(generate))
        return engine

    around(site.setup.sampler, "_make_engine", make)


OF_ENGINES = {
    function.__name__: function
    for function in (stale_rollout_weights, partial_weight_sync, copied_completions, forced_eos)
}
