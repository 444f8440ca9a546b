"""A second rollout engine and a second backend, a line each in the registry: nothing else knows of them.

Both are plain transformers, so what they train and sample is what ours does, to rounding.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abrun.errors import RecipeError
from abrun.recipe.algorithms import Ppo
from abrun.recipe.implementations import BACKENDS, ENGINES
from abrun.recipe.policy import Policy
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.backends import B, Backend, Objective
from abrun.trainer.backends.head import Decoder
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.shards import ShardSpec
from abrun.trainer.kernels import linear_logprobs
from abrun.trainer.models.families import cache_name
from abrun.trainer.models.text import Text
from abrun.trainer.models.weights import load_network, save_network
from abrun.trainer.rl.batch import Sequences
from abrun.trainer.rl.metrics import MetricParts
from abrun.trainer.rl.sampling import sample
from abrun.trainer.rollout import Completion
from abrun.trainer.seeds import Draws
from tests.trainer.loop.runs import group, train_here
from tests.written_runs import make_run, run_config

__all__ = ["group"]


class PlainEngine:
    """A network of its own, filled by `sync`, that completes one prompt after the other without a cache."""

    def __init__(self, config: OwnRunConfig, backend: Backend, text: Text) -> None:
        self._network: Any = load_network(config.model, weights=None, seed=99)
        self._rollout, self._text, self._asleep = config.rollout, text, True

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], draws: Draws, *, temperature: float | None = None
    ) -> list[Completion]:
        assert not self._asleep
        uniforms = draws.uniforms(self._rollout.max_new_tokens)
        return [
            self._complete(prompt, row, temperature) for prompt, row in zip(prompts, uniforms, strict=True)
        ]

    def _complete(self, prompt: list[int], uniforms: Tensor, temperature: float | None) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        for uniform in uniforms:
            logits = self._network(torch.tensor([prompt + tokens])).logits[:, -1]
            if temperature == 0:
                token, logprob = logits.argmax(dim=-1), torch.zeros(1)
            else:
                token, logprob = sample(logits / self._rollout.temperature, uniform[None])
            tokens.append(int(token))
            logprobs.append(float(logprob))
            if tokens[-1] in self._text.end_ids:
                return Completion(token_ids=tokens, logprobs=logprobs, truncated=False)
        return Completion(token_ids=tokens, logprobs=logprobs, truncated=True)

    def sync(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        mine = dict(self._network.named_parameters())
        taken = {name for name, weight in weights if mine[name].data.copy_(weight) is not None}
        assert taken == mine.keys()

    def sleep(self) -> int:
        self._asleep = True
        return 0

    def wake(self) -> None:
        self._asleep = False

    def close(self, *, finished: bool = False) -> None:
        self._network = None


class PlainBackend:
    """One rank, one microbatch, torch's own AdamW."""

    def __init__(
        self, load_initial: Any, policy: Policy, ranks: Ranks, *, temperature: float, **_: Any
    ) -> None:
        self.ranks, self._network = ranks, load_initial()
        self.around_forward = contextlib.nullcontext
        settings = policy.optimizer
        self._max_grad_norm, self._temperature = settings.max_grad_norm, temperature
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(),
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=0,
        )

    def _judged(self, batch: Sequences) -> tuple[Tensor, Tensor]:
        hidden = self._network.model(batch.token_ids, use_cache=False).last_hidden_state[:, :-1]
        target = torch.where(batch.token_mask, batch.token_ids, -100)[:, 1:]
        logprobs, entropy = linear_logprobs(
            hidden,
            self._network.lm_head.weight,
            target,
            impl="logits",
            entropy=True,
            temperature=self._temperature,
        )
        assert entropy is not None
        return torch.nn.functional.pad(logprobs, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))

    def compute_logprobs(self, batch: Sequences) -> Tensor:
        with torch.no_grad():
            return self._judged(batch)[0]

    def forward_backward(self, batch: B, objective: Objective[B]) -> MetricParts:
        logprobs, entropy = self._judged(batch)
        losses = objective.losses(batch, logprobs, entropy)
        losses.shares.sum().backward()
        with torch.no_grad():
            return objective.metrics(batch, logprobs.detach(), entropy.detach(), losses)

    def optimizer_step(self, learning_rate: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._max_grad_norm)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._network.named_parameters())

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoder]:
        def decode(token_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any) -> Any:
            name = cache_name(self._network)
            out = self._network(
                token_ids, attention_mask=attention_mask, position_ids=position_ids, **{name: cache}
            )
            return out.logits[:, -1], getattr(out, name)

        yield Decoder(step=decode, in_place=False, collective=False)

    def save(self, directory: Path) -> None:
        save_network(self._network, directory, self.gather_weights())

    def make_value_model(self, settings: Ppo, seed: int) -> Any:
        raise RecipeError("algorithm.type: got 'ppo', and this backend has no value model; use grpo")

    def local_state(self) -> dict[str, Tensor]:
        return dict(self.gather_weights())

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {}  # its checkpoints are its own

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        for name, weight in self.gather_weights():
            weight.copy_(state[name])

    def resident_tensors(self) -> Sequence[Tensor]:
        return [weight for _, weight in self.gather_weights()]


IMPLEMENTATIONS = {
    "engine": (ENGINES, "vllm", "tests.trainer.loop.test_implementations:PlainEngine", "rollout.engine=vllm"),
    "backend": (
        BACKENDS,
        "megatron",
        "tests.trainer.loop.test_implementations:PlainBackend",
        "policy.backend.type=megatron",
    ),
}


@pytest.mark.parametrize("seam", IMPLEMENTATIONS)
def test_a_second_implementation_trains_as_ours_does(
    seam: str, tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, name, implementation, override = IMPLEMENTATIONS[seam]
    monkeypatch.setitem(registry, name, implementation)
    settings = (
        "steps=2",
        "policy.optimizer={learning_rate: 1.0e-2, warmup_steps: 0}",
        "validation={every: 2}",
    )
    overrides = (*settings, "task.max_operand=1", "validation.num_prompts=4", "validation.temperature=0.0")
    rows = [
        train_here(make_run(tmp_path / each, run_config(*overrides, *more, "task=" + verifier(tmp_path))))
        for each, more in (("ours", ()), ("second", (override,)))
    ]
    assert rows[0].keys() == rows[1].keys() == {0, 1, 2}
    for ours, second in zip(*(each.values() for each in rows), strict=True):
        assert ours.keys() == second.keys()
        for key, value in ours.items():
            if not key.startswith(("timing/", "performance/", "memory/")):
                assert second[key] == pytest.approx(value, rel=2e-3, abs=1e-5), key
    assert rows[0][1]["train/grad_norm"] > 0


def verifier(folder: Path) -> str:
    """A task whose reward depends on what random weights say: how many completion characters are digits."""
    (folder / "task.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40))
    )
    return f"{{type: jsonl, path: {folder}/task.jsonl, verifier: '{__name__}:digits'}}"


def digits(prompt: str, completion: str, answer: str) -> float:
    return float(sum(character.isdigit() for character in completion))
