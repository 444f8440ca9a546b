"""Check of sequence lengths against the positions of the model."""

from collections.abc import Iterator, Sequence

from abrun.errors import RecipeError
from abrun.processes import progress
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.run import OwnRunConfig
from abrun.trainer.loop.data import Data, check_length
from abrun.trainer.models import Text
from abrun.trainer.models.text import TEXTS_PER_CALL
from abrun.trainer.tasks import Example
from abrun.trainer.tasks.problems import ProblemFile


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
