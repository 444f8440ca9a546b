"""Validation of the policy on prompts that are excluded from training, the same for every arm and seed.

Step k evaluates the policy after k updates; step 0 evaluates the initial policy, before arms differ.
Validation does not affect training: it has its own stream of draws, and its time is not part of the step
time. Tasks with a verifier judge sampled completions, whatever the algorithm. For other tasks, the algorithm
evaluates the policy by its loss on the held-out examples.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from abrun.processes import progress
from abrun.recipe.tasks import CompletionsTask, PreferencesTask, Validation
from abrun.trainer.loop.data import check_length
from abrun.trainer.loop.recorder import Recorder
from abrun.trainer.loop.setup import RunSetup
from abrun.trainer.seeds import Draws
from abrun.trainer.tasks import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of a policy on some examples, the same on every rank."""

    rewards: list[float]  # one for each example
    lengths: list[int]  # completion tokens of each example
    metrics: dict[str, float]


@runtime_checkable
class Evaluator(Protocol):
    """Interface of evaluators: `CompletionEvaluator` below, or an algorithm that needs no verifier."""

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """Evaluate the policy after `step` updates on these examples, split over the ranks. Collective."""
        ...


class Validator:
    """Evaluates the policy of a run on its held-out examples, and records the results."""

    def __init__(self, setup: RunSetup, settings: Validation, recorder: Recorder, algorithm: object) -> None:
        self._setup = setup
        self._settings = settings
        self._recorder = recorder
        if isinstance(setup.config.task, CompletionsTask | PreferencesTask):
            assert isinstance(algorithm, Evaluator), "recipe validation allows no other algorithm"
            self._evaluator: Evaluator = algorithm
        else:
            self._evaluator = CompletionEvaluator(setup, settings)

    def is_due(self, step: int) -> bool:
        """Return True every k steps and at the last one."""
        return step % self._settings.every == 0 or step == self._setup.config.steps

    def validate(self, step: int) -> dict[str, float]:
        """Record the rewards of all prompts; return the metrics, the same on every rank. Collective."""
        examples = self._setup.data.held_out
        progress.report("validation", in_every_step=False)
        evaluation = self._evaluator.evaluate(examples, step)
        prompts = (example.prompt for example in examples)
        self._recorder.validation(step, prompts, evaluation.rewards, evaluation.lengths)
        seconds, _ = self._setup.phases.collect()
        return evaluation.metrics | {"timing/validation/total_s": seconds["timing/train/total_step_time_s"]}


class CompletionEvaluator:
    """Evaluator that samples completions and judges them with the task's verifier."""

    def __init__(self, setup: RunSetup, settings: Validation) -> None:
        self._setup = setup
        self._temperature = settings.temperature
        max_new_tokens = setup.config.rollout.max_new_tokens
        longest = max(map(len, self._prompts(setup.data.held_out))) + max_new_tokens
        check_length(setup.data.text, longest, f"rollout.max_new_tokens: got {max_new_tokens} for validation")

    def evaluate(self, examples: list[Example], step: int) -> Evaluation:
        """Return the rewards of one completion for each prompt. Collective.

        `validation/accuracy` is their mean (for 0/1 rewards, the share of correct ones);
        `validation/avg_length` is the mean number of completion tokens.
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
