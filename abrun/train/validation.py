"""Validation: what the policy makes of prompts that no training sees, the same for every arm and seed.

At step k it judges the policy after k updates; at step 0 the initial one, before any arm was treated. It
leaves training's numbers as they are: its draws come from a stream of its own, its time is not in the step's.
A task with a verifier judges completions of the prompts, whatever the algorithm; with any other task, the
algorithm judges the policy by its loss on the held-out examples.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from abrun.processes import progress
from abrun.recipe.tasks import CompletionsTask, PreferencesTask, Validation
from abrun.rollout.draws import Draws
from abrun.tasks import Example
from abrun.train.data import check_length
from abrun.train.recorder import Recorder
from abrun.train.setup import Setup


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
        if isinstance(setup.config.task, CompletionsTask | PreferencesTask):
            assert isinstance(algorithm, Evaluator), "recipes ask it of no other algorithm"
            self._evaluator: Evaluator = algorithm
        else:
            self._evaluator = Completer(setup, settings)

    def is_due(self, step: int) -> bool:
        """Every k steps, and after the last one."""
        return step % self._settings.every == 0 or step == self._setup.config.steps

    def validate(self, step: int) -> dict[str, float]:
        """Record the rewards of all prompts, and return the metrics, the same on every rank. Collective."""
        examples = self._setup.data.held_out
        progress.report("validation", in_every_step=False)
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
        max_new_tokens = setup.config.rollout.max_new_tokens
        longest = max(map(len, self._prompts(setup.data.held_out))) + max_new_tokens
        check_length(setup.data.text, longest, f"rollout.max_new_tokens: got {max_new_tokens} for validation")

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """The rewards of one completion a prompt.

        `validation/accuracy` is their mean (with a verifier of 0 and 1: the share that is right),
        `validation/avg_length` the mean number of completion tokens.
        """
        setup, ranks = self._setup, self._setup.ranks
        mine = ranks.data_slice(len(examples))
        draws = Draws(seed=setup.seed, stream="validation", step=step, rows=range(len(examples))[mine])
        with setup.sampler.awake() as engine:
            progress.report("validation", in_every_step=False)
            completions = engine.generate(self._prompts(examples[mine]), draws, temperature=self._temperature)
        rewards = ranks.all_gather_data(setup.data.rewards(examples[mine], completions))
        lengths = ranks.all_gather_data([len(completion.token_ids) for completion in completions])
        truncated = ranks.all_gather_data([completion.truncated for completion in completions])
        metrics = {
            "validation/accuracy": math.fsum(rewards) / len(rewards),
            "validation/avg_length": sum(lengths) / len(lengths),
            "validation/truncation_rate": sum(truncated) / len(truncated),
        }
        return Evaluation(rewards=rewards, lengths=lengths, metrics=metrics)

    def _prompts(self, examples: list[Example]) -> list[list[int]]:
        return self._setup.data.text.encode_prompts([example.prompt for example in examples])
