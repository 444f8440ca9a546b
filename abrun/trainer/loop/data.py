"""Training data of a run: the examples of a step as texts and token ids, and their rewards."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from abrun.errors import RecipeError, StoreError
from abrun.processes import progress
from abrun.recipe.algorithms import PolicyGradientSettings
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
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.models.text import TEXTS_PER_CALL, Text
from abrun.trainer.models.weights import config_of
from abrun.trainer.rl.batch import Sequences, collate
from abrun.trainer.rollout import Completion
from abrun.trainer.seeds import derive_seed
from abrun.trainer.tasks import Example, TrainingTask, hold_out, make_task
from abrun.trainer.tasks.problems import ProblemFile

Texts = Sequence[tuple[str, str]]  # prompts with their completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The task of a run, and the tokenizer of its model."""

    task: TrainingTask
    text: Text
    ranks: Ranks
    seed: int
    batch_size: int  # examples in a global batch, or in one fetch of a step
    fetches_per_step: int  # of which each step consists, unless it selects groups and fetches more
    held_out: list[Example]  # validation examples; [] without validation

    def examples(self, step: int, fetch: int = 0) -> list[Example]:
        """Return the examples of one fetch of a step's global batch, in order.

        The fetches of a step continue one stream, so that no prompt repeats before its epoch ends. Fetches
        beyond `fetches_per_step` redraw from another part of the epoch: the stream therefore does not depend
        on how often earlier steps fetched.
        """
        redraw, fetch = divmod(fetch, self.fetches_per_step)
        start = ((step - 1) * self.fetches_per_step + fetch) * self.batch_size
        return self.task.examples(derive_seed(self.seed, "data"), start, self.batch_size, redraw)

    def examples_of_steps(self, steps: range) -> list[Example]:
        """Return the examples of consecutive steps, in order, without redraws."""
        size = self.fetches_per_step * self.batch_size
        return self.task.examples(derive_seed(self.seed, "data"), (steps.start - 1) * size, len(steps) * size)

    def local_examples(self, step: int) -> list[Example]:
        return self.examples(step)[self.ranks.data_slice(self.batch_size)]

    def collate_texts(self, texts: Texts) -> Sequences:
        """Return this rank's prompts and completions as a batch on the CPU."""
        prompts, completions = zip(*texts, strict=True)
        return collate(
            self.text.encode_prompts(prompts),
            self.text.encode_completions(completions),
            pad_id=self.text.pad_id,
        )

    def check_and_move(self, batch: Sequences) -> Sequences:
        """Check a batch from `collate_texts` and move it to the device. Collective.

        Raises RecipeError on all ranks if a sequence is too long for the model, or if no completion has a
        token.
        """
        sizes = self.ranks.all_gather_data([(batch.token_ids.shape[1], int(batch.token_mask.sum()))])
        check_length(self.text, max(length for length, _ in sizes), "task: got an example")
        if not any(num_tokens for _, num_tokens in sizes):
            raise RecipeError(
                "task: got a batch of empty completions, and this model's tokenizer has no end token; remove "
                "empty completions"
            )
        return batch.to(self.ranks.device)

    def encode(self, texts: Texts) -> Sequences:
        """Return this rank's prompts and completions as a batch. Collective; errors: see `check_and_move`."""
        return self.check_and_move(self.collate_texts(texts))

    def rewards(self, examples: list[Example], completions: list[Completion]) -> list[float]:
        """Return the verifier's rewards of this rank's completions. Collective.

        Truncated completions are judged like any other. If a verifier fails on one rank, all ranks raise its
        RecipeError. Otherwise rank 0, which records failures, would wait for the others.
        """
        rewards, failure = [], ""
        try:
            texts = self.text.decode([completion.token_ids for completion in completions])
            for example, text in zip(examples, texts, strict=True):
                rewards.append(self.task.reward(example, text))
        except RecipeError as error:
            failure = str(error)
        if self.ranks.all_reduce_sum_data(bool(failure))[0]:
            raise RecipeError(next(filter(None, self.ranks.all_gather_world(failure))))
        return rewards


class PrefetchedBatches:
    """This rank's batches of texts, step by step.

    The batch of the next step is tokenized in a thread during the current step, so that the GPU does not
    wait.
    """

    def __init__(self, data: Data, texts_of: Callable[[list[Example]], Texts], num_steps: int) -> None:
        self._data, self._texts_of, self._num_steps = data, texts_of, num_steps
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._batches: dict[int, Future[Sequences]] = {}  # of the next step

    def batch(self, step: int) -> Sequences:
        """Return the batch of a step. Collective; errors as in `Data.check_and_move`."""
        batch = self._batches.pop(step, None) or self._prefetch(step)
        checked_batch = self._data.check_and_move(batch.result())
        if step < self._num_steps:
            self._batches = {step + 1: self._prefetch(step + 1)}
        return checked_batch

    def _prefetch(self, step: int) -> Future[Sequences]:
        return self._thread.submit(
            lambda: self._data.collate_texts(self._texts_of(self._data.local_examples(step)))
        )


def check_length(text: Text, longest: int, got: str) -> None:
    """Raise RecipeError if sequences of `longest` tokens exceed the model's positions.

    `got` is the setting or example that requires them; the message starts with it.
    """
    if text.max_positions is not None and longest > text.max_positions:
        raise RecipeError(
            f"{got}, which needs sequences of {longest} tokens; this model allows {text.max_positions}: "
            "shorten them"
        )


def make_data(config: OwnRunConfig, text: Text, ranks: Ranks, seed: int) -> Data:
    """Load the task of a run. Raises RecipeError if its files do not fit the recipe."""
    algorithm = config.algorithm
    if config.validation:
        task, held_out = hold_out(config.task, config.validation)
    else:
        task, held_out = make_task(config.task), []
    return Data(
        task=task,
        text=text,
        ranks=ranks,
        seed=seed,
        batch_size=algorithm.batch_size,
        fetches_per_step=algorithm.fetches_per_step if isinstance(algorithm, PolicyGradientSettings) else 1,
        held_out=held_out,
    )


# Check of sequence lengths against the positions of the model.


def max_sampled_tokens(config: OwnRunConfig) -> int:
    """Return the maximum length of sampled completions in tokens; 0 if the algorithm samples none."""
    return config.rollout.max_new_tokens if isinstance(config.algorithm, PolicyGradientSettings) else 0


def sequence_lengths_of(text: Text, examples: Sequence[Example], num_sampled: int) -> Iterator[int]:
    """Yield the tokens of each example's longest sequence.

    `num_sampled` replaces the length of the completion if it is sampled; 0 uses the example's own
    completions. Examples are tokenized in chunks, because token ids take much more memory than texts.
    """
    for start in range(0, len(examples), TEXTS_PER_CALL):
        chunk = examples[start : start + TEXTS_PER_CALL]
        completions = [num_sampled] * len(chunk)
        if not num_sampled:
            chosen = text.encode_completions([example.completion for example in chunk])
            rejected = text.encode_completions([example.rejected for example in chunk])
            completions = [max(map(len, pair)) for pair in zip(chosen, rejected, strict=True)]
        prompts = text.encode_prompts([example.prompt for example in chunk])
        for prompt, completion in zip(prompts, completions, strict=True):
            yield len(prompt) + completion


def check_example_lengths(data: Data, config: OwnRunConfig, first_step: int) -> None:
    """Raise RecipeError, on all ranks, for a line of a file that is too long for the model. Collective.

    It checks the lines for validation and for the steps from `first_step` on. Lines that the tokenizer or a
    chat template expands beyond the estimate from their bytes are only found by the step that uses them.
    """
    max_positions, num_sampled, failure = data.text.max_positions, max_sampled_tokens(config), ""
    check_length(data.text, num_sampled + 1, f"rollout.max_new_tokens: got {num_sampled}")
    lines = _examples_to_check(data, config, first_step)
    if max_positions is None or not lines:
        return
    try:
        # A token has at least one byte, so most texts need not be tokenized.
        [overhead] = sequence_lengths_of(data.text, [min(lines, key=_num_bytes)], num_sampled)
        candidates = [line for line in lines if overhead + _num_bytes(line) > max_positions]
        local_candidates = candidates[data.ranks.rank :: data.ranks.size]
        for line, length in zip(
            local_candidates, sequence_lengths_of(data.text, local_candidates, num_sampled), strict=True
        ):
            progress.report("measuring texts", in_every_step=False)
            if length > max_positions:
                with_sampled = f" with rollout.max_new_tokens {num_sampled}" if num_sampled else ""
                fix = "shorten or remove the line" + (", under another --name" if first_step > 1 else "")
                raise RecipeError(
                    f"task: {line.source}: needs a sequence of {length} tokens{with_sampled}; this model "
                    f"allows {max_positions}: {fix}"
                )
    except RecipeError as error:
        failure = str(error)
    if failures := list(filter(None, data.ranks.all_gather_world(failure))):
        raise RecipeError(failures[0])


def _examples_to_check(data: Data, config: OwnRunConfig, first_step: int) -> list[Example]:
    """Return the examples of a file that the run will use, without duplicates."""
    task, algorithm = data.task, config.algorithm
    if not isinstance(task, ProblemFile):
        return []
    drawn = data.examples_of_steps(range(first_step, config.steps + 1))
    if isinstance(algorithm, PolicyGradientSettings) and algorithm.selects_groups:
        drawn = task.problems  # any of them may be drawn
    return list({example.source: example for example in [*drawn, *data.held_out]}.values())


def _num_bytes(example: Example) -> int:
    return sum(len(text.encode()) for text in (example.prompt, example.completion, example.rejected))


# Recorded rollouts in training: what this run records, and what it trains on instead of sampling.


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


class RecordedGroups:
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
