"""Faults in the rollout engine: stale weights, duplicate draws, changed tokens."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from abrun.trainer.backends import Backend, make_backend
from abrun.trainer.backends.head import Decoder
from abrun.trainer.faults.site import FaultSite, leading_rows, wrap_method
from abrun.trainer.rollout import Completion, make_engine
from abrun.trainer.seeds import Draws, derive_seed

State = dict[str, Tensor]


def stale_rollout_weights(site: FaultSite) -> None:
    delay = int(site.size)
    # With a delay beyond the last step, the initial weights stay and one copy is enough.
    states: deque[State] = deque(maxlen=delay + 1)

    def weights_of(policy: Backend) -> State:
        if not states or delay < site.setup.config.steps:
            states.append(_copy_weights(policy))
        return states[0]

    _sample_with_weights(site, weights_of)


def partial_weight_sync(site: FaultSite) -> None:
    initial_state: State = {}

    def weights_of(policy: Backend) -> State:
        newest = _copy_weights(policy)
        if not initial_state:
            initial_state.update(newest)
        missed = [name for i, name in enumerate(newest) if int((i + 1) * site.size) > int(i * site.size)]
        return newest | {name: initial_state[name] for name in missed}

    _sample_with_weights(site, weights_of)


def _copy_weights(policy: Backend) -> State:
    state = policy.local_state().items()
    return {name: tensor.clone() for name, tensor in state if name.startswith("weights/")}


def _sample_with_weights(site: FaultSite, weights_of: Callable[[Backend], State]) -> None:
    """Sample from a second policy, which each sync loads with the weights that `weights_of` returns."""
    setup = site.setup

    def make(inner: Callable[[], Any]) -> Any:
        second = make_backend(
            setup.config, setup.ranks, weights=setup.initial_weights, seed=derive_seed(setup.seed, "init")
        )
        engine = make_engine(setup.config, second, setup.data.text)
        wrap_method(engine, "sync", lambda sync, weights: second.load_local_state(weights_of(setup.policy)))
        return engine

    wrap_method(setup.sampler, "_make_engine", make)


@dataclass(frozen=True, kw_only=True)
class _CopiedDraws(Draws):
    """Draws in which the last rows of each group repeat those of its first rows."""

    group_size: int
    num_copies: int

    def _original(self, row: int) -> int:
        place = row % self.group_size
        return row - place + place % (self.group_size - self.num_copies)

    def seed_of(self, row: int) -> int:
        return super().seed_of(self._original(row))


def copied_completions(site: FaultSite) -> None:
    size = site.setup.config.algorithm.group_size  # pyright: ignore[reportAttributeAccessIssue]
    num_copies = min(leading_rows(site.size, size).stop, size - 1)

    def generate(inner, prompts: list[list[int]], draws: Draws, **settings: Any) -> list[Completion]:
        if draws.stream == "sampling":
            draws = _CopiedDraws(**asdict(draws), group_size=size, num_copies=num_copies)
        return inner(prompts, draws, **settings)

    _wrap_generate(site, generate)


def forced_eos(site: FaultSite) -> None:
    end_id = min(site.setup.data.text.end_ids)

    def generate(inner, prompts: list[list[int]], draws: Draws, **settings: Any) -> list[Completion]:
        completions = inner(prompts, draws, **settings)
        rows = range(len(completions))[leading_rows(site.size, len(completions))]
        return [
            replace(completion, token_ids=[*completion.token_ids[:-1], end_id])
            if draws.stream == "sampling" and completion.truncated and row in rows
            else completion
            for row, completion in enumerate(completions)
        ]

    _wrap_generate(site, generate)


def retokenised(site: FaultSite) -> None:
    """Decode and re-encode completions; log-probs keep their positions, and missing ones are 0."""
    text = site.setup.data.text

    def retokenise(completion: Completion) -> Completion:
        end = [] if completion.truncated else completion.token_ids[-1:]
        (body,) = text.decode([completion.token_ids[: len(completion.token_ids) - len(end)]])
        retokenised_ids: Any = text.tokenizer(body, add_special_tokens=False)["input_ids"]
        token_ids = [*retokenised_ids, *end] or completion.token_ids
        logprobs = [*completion.logprobs, *[0.0] * len(token_ids)]
        return replace(completion, token_ids=token_ids, logprobs=logprobs[: len(token_ids)])

    def generate(inner, prompts: list[list[int]], draws: Draws, **settings: Any) -> list[Completion]:
        completions = inner(prompts, draws, **settings)
        if draws.stream != "sampling":
            return completions
        rows = leading_rows(site.size, len(completions))
        return [*map(retokenise, completions[rows]), *completions[rows.stop :]]

    _wrap_generate(site, generate)


def temperature_on_logprobs(site: FaultSite) -> None:
    def generate(inner, decoder: Decoder, prompts: list[list[int]], rows: Any) -> list[Completion]:
        def choose(inner, logits: Tensor) -> tuple[Tensor, Tensor]:  # [B, V] -> [B], [B]
            token, logprob = inner(logits)
            if rows._temperature == 0:
                return token, logprob
            raw = logits.float().log_softmax(dim=-1).gather(-1, token[:, None])[:, 0]
            return token, raw / rows._temperature

        wrap_method(rows, "_choose", choose)
        return inner(decoder, prompts, rows)

    _change_engine(site, lambda engine: wrap_method(engine, "_generate", generate))


def stale_prefix_cache(site: FaultSite) -> None:
    syncs = itertools.count()

    def reset(inner) -> bool:
        return True if next(syncs) % (int(site.size) + 1) else inner()

    _change_engine(site, lambda engine: wrap_method(engine._vllm._llm, "reset_prefix_cache", reset))


def _wrap_generate(site: FaultSite, generate: Callable[..., list[Completion]]) -> None:
    _change_engine(site, lambda engine: wrap_method(engine, "generate", torch.no_grad()(generate)))


def _change_engine(site: FaultSite, change: Callable[[Any], None]) -> None:
    """Apply `change` to the engine when it is made."""

    def make(inner: Callable[[], Any]) -> Any:
        engine = inner()
        change(engine)
        return engine

    wrap_method(site.setup.sampler, "_make_engine", make)
