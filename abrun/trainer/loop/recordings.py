"""Recorded rollouts in training: what this run records, and what it trains on instead of sampling."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import StoreError
from abrun.recipe.run import OwnRunConfig
from abrun.runs.redaction import printable
from abrun.runs.rollouts import (
    Origin,
    RecordedCompletion,
    RecordedGroup,
    RecordedStep,
    find_rollouts,
    hash_steps,
    read_step,
    step_path,
)
from abrun.trainer.models import Text, config_of
from abrun.trainer.rollout import Completion

# Groups: a prompt with its completions and their rewards.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one prompt."""

    prompt: list[int]
    completions: list[Completion]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ, so that advantages relative to their mean are not all 0."""
        return any(reward != self.rewards[0] for reward in self.rewards)


class RecordedRollouts:
    """The rollouts that a run trains on instead of sampling, checked against its recipe."""

    def __init__(self, config: OwnRunConfig, text: Text, run_path: Path, seed: int) -> None:
        """Raises StoreError if there are none for this seed, or too few steps."""
        self._config, self._text = config, text
        self._corrects = getattr(config.algorithm, "importance_correction", None) is not None
        self.has_logprobs = True  # the groups read last have the log-probs of their sampler
        self._origin = origin_of(config, text, seed)
        source, last = config.rollout.source or "", config.steps
        self.folder = find_rollouts(source, run_path, seed)
        steps = range(last, 0, -1)
        recorded = next((step for step in steps if step_path(self.folder, step).exists()), 0)
        if recorded < last:
            raise self._unfit(
                f"it holds {recorded} steps, but the run takes {last}", f"use steps: {recorded}"
            )
        self.sha256 = hash_steps(self.folder, last)

    def groups(self, step: int, fetch: int, num_groups: int, group_size: int) -> list[Group]:
        """Return all groups of a fetch, in the order of the global batch.

        Raises StoreError if they are missing or damaged, or do not fit the run.
        """
        recorded = read_step(self.folder, step)
        self._check(recorded)
        groups = [group for group in recorded.groups if group.fetch == fetch]
        sizes = {len(group.completions) for group in groups}
        if len(groups) != num_groups or sizes != {group_size}:
            found = f"{len(groups)} groups of {' or '.join(map(str, sorted(sizes))) or 0} completions"
            raise self._unfit(
                f"step {step} holds {found} in fetch {fetch + 1}, but the run asks for {num_groups} of "
                f"{group_size}",
                "use the recording's prompts_per_step and group_size",
            )
        self.has_logprobs = all(
            completion.logprobs is not None for group in groups for completion in group.completions
        )
        return [self._to_group(group, step) for group in groups]

    def _check(self, recorded: RecordedStep) -> None:
        """Raise StoreError if the rollouts are not of this seed, model, tokenizer or temperature."""
        problems = {
            "seed": "give the recording of this seed",
            "model": "use the model of the recording",
            "tokenizer": "use the tokenizer of the recording",
            "temperature": "use the rollout.temperature of the recording",
        }
        for name, remedy in problems.items():
            got, needed = getattr(recorded.origin, name), getattr(self._origin, name)
            if got is not None and got != needed:
                raise self._unfit(f"recorded with {name} {str(got)[:40]}, but the run has {needed}", remedy)

    def _to_group(self, group: RecordedGroup, step: int) -> Group:
        rollout, limit = self._config.rollout, self._text.max_positions
        longest = max(len(completion.token_ids) for completion in group.completions)
        if longest > rollout.max_new_tokens:
            raise self._unfit(
                f"step {step} has a completion of {longest} tokens, above rollout.max_new_tokens "
                f"{rollout.max_new_tokens}",
                f"use {longest} or more",
            )
        if limit is not None and len(group.prompt) + longest > limit:
            raise self._unfit(
                f"step {step} has a sequence of {len(group.prompt) + longest} tokens, above the model's "
                f"{limit}",
                "use the model of the recording",
            )
        largest = max(max(group.prompt), *(max(completion.token_ids) for completion in group.completions))
        vocab_size = config_of(self._config.model).get_text_config().vocab_size
        if largest >= vocab_size:
            raise self._unfit(
                f"step {step} has token {largest}, beyond the model's vocabulary of {vocab_size}",
                "use the model of the recording",
            )
        completions = []
        for completion in group.completions:
            if completion.logprobs is None and self._corrects:
                raise self._unfit(
                    f"step {step} has no log-probs of its sampler, which importance_correction needs",
                    "use importance_correction: null",
                )
            completions.append(
                Completion(
                    token_ids=list(completion.token_ids),
                    logprobs=list(completion.logprobs or [math.nan] * len(completion.token_ids)),
                    truncated=completion.truncated,
                )
            )
        return Group(
            prompt=list(group.prompt),
            completions=completions,
            rewards=[completion.reward for completion in group.completions],
        )

    def _unfit(self, problem: str, remedy: str) -> StoreError:
        return StoreError(f"rollout.from: {self.folder}: {printable(problem)}; {remedy}")


def origin_of(config: OwnRunConfig, text: Text, seed: int) -> Origin:
    """Return what a run's recording says about its sampler."""
    network = config_of(config.model).get_text_config()
    vocabulary = json.dumps(sorted(text.tokenizer.get_vocab().items()))
    return Origin(
        seed=seed,
        model=f"{network.model_type} of {network.num_hidden_layers} x {network.hidden_size}",
        tokenizer=hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
        temperature=config.rollout.temperature,
    )


def record_groups(step: int, fetched: Sequence[tuple[int, Group]], origin: Origin) -> RecordedStep:
    """Return the groups of a step, with the fetch of each, as a recording."""
    groups = [
        RecordedGroup(
            prompt=group.prompt,
            fetch=fetch,
            completions=[
                RecordedCompletion(
                    token_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    reward=reward,
                    truncated=completion.truncated,
                )
                for completion, reward in zip(group.completions, group.rewards, strict=True)
            ],
        )
        for fetch, group in fetched
    ]
    return RecordedStep(step=step, groups=groups, origin=origin)
