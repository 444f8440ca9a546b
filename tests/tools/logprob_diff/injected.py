"""Rollout engines that are wrong in one way each, for a budget to find."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import Backend, make_backend
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.models.text import Text
from abrun.trainer.rl.batch import collate
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.torch_engine import TorchEngine
from abrun.trainer.seeds import Draws, derive_seed


def stale(config: OwnRunConfig, backend: Backend, text: Text) -> TorchEngine:
    """Keeps the weights that a run with seed 0 began with."""
    frozen = make_backend(config, backend.ranks, weights=None, seed=derive_seed(0, "init"), trainable=False)
    return TorchEngine(config.rollout, frozen, text)


def untempered(config: OwnRunConfig, backend: Backend, text: Text) -> TorchEngine:
    """Draws and scores at temperature 1, whatever the recipe says."""
    return TorchEngine(config.rollout.model_copy(update={"temperature": 1.0}), backend, text)


class Float32Head(TorchEngine):
    """Says of what it drew what the trainer would with a head in float32, which that one has not."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        super().__init__(config.rollout, backend, text)
        assert isinstance(backend, DtensorBackend)
        self._policy, self._text = backend, text

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        drawn = super().generate(prompts, draws, temperature=temperature)
        batch = collate(prompts, [each.token_ids for each in drawn], pad_id=self._text.pad_id)
        head = self._policy.module.head
        settings = dict(head._settings)
        head._settings["head_dtype"] = torch.float32
        try:
            logprobs = self._policy.compute_logprobs(batch)
        finally:
            head._settings = settings
        return [
            replace(each, logprobs=row[mask].tolist())
            for each, row, mask in zip(drawn, logprobs, batch.token_mask, strict=True)
        ]


class Noisy(TorchEngine):
    """Log-probs off by a hundredth, up or down, as no change of the trainer's explains."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        super().__init__(config.rollout, backend, text)

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        signs: Iterator[float] = iter(_signs())
        found = super().generate(prompts, draws, temperature=temperature)
        return [
            replace(each, logprobs=[logprob + 0.01 * next(signs) for logprob in each.logprobs])
            for each in found
        ]


class Lower(TorchEngine):
    """Log-probs lower by a tenth: the importance weight of a token is 1.1, however a processor rounds."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        super().__init__(config.rollout, backend, text)

    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        completions = super().generate(prompts, draws, temperature=temperature)
        return [replace(each, logprobs=[value - 0.1 for value in each.logprobs]) for each in completions]


def _signs() -> list[float]:
    flips: Tensor = torch.randint(2, (10_000,), generator=torch.Generator().manual_seed(1))
    return (2.0 * flips - 1.0).tolist()
