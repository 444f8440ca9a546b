"""How long sequences become, and for which the model has too few positions."""

from collections.abc import Iterator, Sequence

from abrun.errors import RecipeError
from abrun.models import Text
from abrun.models.text import AT_ONCE
from abrun.processes import progress
from abrun.recipe.algorithms import PolicyGradientSettings
from abrun.recipe.run import OwnRunConfig
from abrun.seeds import derive_seed
from abrun.tasks import Example
from abrun.tasks.problems import ProblemFile
from abrun.train.data import Data, check_length


def new_tokens(config: OwnRunConfig) -> int:
    """Tokens of the longest completion that is sampled in training; 0 where none is."""
    return config.rollout.max_new_tokens if isinstance(config.algorithm, PolicyGradientSettings) else 0


def longest_of(text: Text, examples: Sequence[Example], sampled: int) -> Iterator[int]:
    """Of each example the tokens of its longest sequence; `sampled`: of a completion, if not its own.

    A part of them after the other: token ids take much more memory than texts.
    """
    for start in range(0, len(examples), AT_ONCE):
        part = examples[start : start + AT_ONCE]
        completions = [sampled] * len(part)
        if not sampled:
            chosen = text.encode_completions([example.completion for example in part])
            rejected = text.encode_completions([example.rejected for example in part])
            completions = [max(map(len, pair)) for pair in zip(chosen, rejected, strict=True)]
        prompts = text.encode_prompts([example.prompt for example in part])
        for prompt, completion in zip(prompts, completions, strict=True):
            yield len(prompt) + completion


def refuse_too_long(data: Data, config: OwnRunConfig, first: int) -> None:
    """Raises RecipeError, on every rank, for a line of a file that is too long for the model. Collective.

    Of the lines that validation and the steps from `first` on take; what a tokenizer or a template makes
    longer than its bytes, the steps will tell.
    """
    most, sampled, failure = data.text.max_positions, new_tokens(config), ""
    check_length(data.text, sampled + 1, f"rollout.max_new_tokens: got {sampled}")
    lines = _lines(data, config, first)
    if most is None or not lines:
        return
    try:
        # A token is a byte at least: the texts of most files need not be tokenized for this
        [around] = longest_of(data.text, [min(lines, key=_num_bytes)], sampled)
        doubtful = [line for line in lines if around + _num_bytes(line) > most]
        mine = doubtful[data.ranks.rank :: data.ranks.size]
        for line, length in zip(mine, longest_of(data.text, mine, sampled), strict=True):
            progress.report("measuring texts", in_every_step=False)
            if length > most:
                drawn = f" with rollout.max_new_tokens {sampled}" if sampled else ""
                mend = "shorten or remove the line" + (", under another --name" if first > 1 else "")
                raise RecipeError(
                    f"task: {line.source}: makes a sequence of {length} tokens{drawn}; this model takes "
                    f"{most}: {mend}"
                )
    except RecipeError as error:
        failure = str(error)
    if failures := list(filter(None, data.ranks.all_gather_world(failure))):
        raise RecipeError(failures[0])


def _lines(data: Data, config: OwnRunConfig, first: int) -> list[Example]:
    """Each once."""
    task, algorithm = data.task, config.algorithm
    if not isinstance(task, ProblemFile):
        return []
    start, stop = (first - 1) * data.batch_size, config.steps * data.batch_size
    drawn = task.examples(derive_seed(data.seed, "data"), start, stop - start) if start < stop else []
    if isinstance(algorithm, PolicyGradientSettings) and algorithm.may_draw_again:
        drawn = task.problems  # which of them, the steps will tell
    return list({example.source: example for example in [*drawn, *data.held_out]}.values())


def _num_bytes(example: Example) -> int:
    return sum(len(text.encode()) for text in (example.prompt, example.completion, example.rejected))
