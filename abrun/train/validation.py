"""Validation: what the policy makes of prompts that no training sees, the same for every arm and seed.

At step k it judges the policy after k updates; at step 0 the initial one, before any arm was treated. It
leaves training's numbers as they are: its draws come from a stream of its own, its time is not in the step's.
A task with a verifier judges completions of the prompts, whatever the algorithm; with any other task, the
algorithm judges the policy by its loss on the held-out examples.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from abrun.backends.dtensor import DtensorBackend
from abrun.recipe import Completions, Preferences, Validation
from abrun.rollout.torch_engine import TorchEngine
from abrun.tasks import Example
from abrun.train.recorder import Recorder
from abrun.train.seeds import sampling_uniforms
from abrun.train.setup import Setup, check_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the policy makes of some examples, the same on every rank."""

    rewards: list[float]  # one an example
    lengths: list[int]  # completion tokens
    metrics: dict[str, float]


@runtime_checkable
class Evaluator(Protocol):
    """What judges the policy: the completions' verifier below, or an algorithm that has no need of one."""

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """What the policy makes of these examples after `step` updates, spread over the ranks. Collective."""
        ...


class Validator:
    """Judges a run's policy on its held-out examples, and records what it found."""

    def __init__(self, setup: Setup, settings: Validation, recorder: Recorder, algorithm: object) -> None:
        self._setup = setup
        self._settings = settings
        self._recorder = recorder
        if isinstance(setup.config.task, Completions | Preferences):
            assert isinstance(algorithm, Evaluator), "recipes ask it of no other algorithm"
            self._evaluator: Evaluator = algorithm
        else:
            self._evaluator = Completer(setup, settings)

    def is_due(self, step: int) -> bool:
        """Every k steps, and after the last one."""
        return step % self._settings.every == 0 or step == self._setup.config.steps

    def validate(self, step: int) -> dict[str, float]:
        """Record the rewards of all prompts, and return the metrics, the same on every rank. Collective."""
        examples = self._setup.validation_examples
        found = self._evaluator.evaluate(examples, step)
        prompts = (example.prompt for example in examples)
        self._recorder.validation(step, prompts, found.rewards, found.lengths)
        seconds, _ = self._setup.phases.collect()
        return found.metrics | {"timing/validation/total_s": seconds["timing/train/total_step_time_s"]}


class Completer:
    """Completes prompts, and asks the task's verifier."""

    def __init__(self, setup: Setup, settings: Validation) -> None:
        self._setup = setup
        self._temperature = settings.temperature
        assert isinstance(setup.backend, DtensorBackend)  # whose modules the embedded engine runs
        self._engine = TorchEngine(setup.backend, setup.model, setup.config.rollout)
        max_new_tokens = setup.config.rollout.max_new_tokens
        longest = max(map(len, self._prompts(setup.validation_examples))) + max_new_tokens
        check_length(setup.model, longest, f"rollout.max_new_tokens: got {max_new_tokens} for validation")

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """The rewards of one completion a prompt.

        `validation/accuracy` is their mean (with a verifier of 0 and 1: the share that is right),
        `validation/avg_length` the mean number of completion tokens.
        """
        setup, mine = self._setup, self._setup.share(len(examples))
        max_new_tokens = setup.config.rollout.max_new_tokens
        uniforms = sampling_uniforms(setup.seed, step, len(examples), max_new_tokens, stream="validation")
        completions = self._engine.generate(
            self._prompts(examples[mine]), uniforms[mine], temperature=self._temperature
        )
        rewards = setup.gather(setup.rewards(examples[mine], completions))
        lengths = setup.gather([len(completion.token_ids) for completion in completions])
        truncated = setup.gather([completion.truncated for completion in completions])
        metrics = {
            "validation/accuracy": math.fsum(rewards) / len(rewards),
            "validation/avg_length": sum(lengths) / len(lengths),
            "validation/truncation_rate": sum(truncated) / len(truncated),
        }
        return Evaluation(rewards=rewards, lengths=lengths, metrics=metrics)

    def _prompts(self, examples: list[Example]) -> list[list[int]]:
        return [self._setup.model.encode_prompt(example.prompt) for example in examples]
