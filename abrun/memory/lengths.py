"""`python -m abrun.memory.lengths JOB_DIR`: how long an arm's sequences become, as far as its task tells."""

import math
import sys
from pathlib import Path

from abrun.errors import AbrunError
from abrun.experiment.probe import read_job, refuse, row_writer
from abrun.memory.step import own_sequences
from abrun.models import config_of, load_text, positions_of
from abrun.recipe.run import OwnRunConfig
from abrun.tasks import make_task
from abrun.train.lengths import longest_of, new_tokens

MOST_EXAMPLES = 4096  # of a task, among which the longest is looked for


def longest(config: OwnRunConfig) -> int:
    """Tokens of the longest sequence to expect of a run."""
    text, task = load_text(config.model, weights=None), make_task(config.task)
    examples = task.examples(0, 0, min(config.steps * config.algorithm.batch_size, MOST_EXAMPLES))
    most = max(longest_of(text, examples, new_tokens(config)))
    return min(most, text.max_positions or most)


def largest_microbatch(config: OwnRunConfig) -> tuple[int, int]:
    """Sequences, and tokens of each: of a rank's largest microbatch to expect, by its budget or its task.

    What fills a budget are few sequences, as long as the model takes.
    """
    num_sequences, budget = own_sequences(config), config.policy.micro_batch_tokens
    if not budget:
        return num_sequences, longest(config)
    # A sequence that is longer than the budget has a microbatch of its own
    length = max(budget // num_sequences, longest(config))
    parts = math.ceil(length / (positions_of(config_of(config.model)) or length))
    return num_sequences * parts, math.ceil(length / parts)


def main() -> int:
    directory = Path(sys.argv[1])
    try:
        config = OwnRunConfig.model_validate(read_job(directory)["config"])
        row_writer(directory).write({"longest": longest(config)})
    except AbrunError as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
