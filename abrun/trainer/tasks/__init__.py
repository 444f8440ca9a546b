"""Tasks: sources of prompts, and verifiers of completions."""

from dataclasses import dataclass, field
from typing import Protocol, Self

from abrun.recipe.tasks import Arithmetic, GeneratedTask, ReasoningGym, TaskConfig, Validation, WordProblems


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One problem."""

    prompt: str
    completion: str  # reference solution: the target of supervised steps, the chosen one of a preference
    answer: str = ""  # reference answer for the verifier, if the task has one
    rejected: str = ""  # the rejected completion, in a task of preferences
    source: str = field(default="", compare=False)  # file and line, for messages


class TrainingTask(Protocol):
    """A verifier, and a stream of examples that is a pure function of seed and position."""

    def examples(self, seed: int, start: int, count: int, redraw: int = 0) -> list[Example]:
        """Return the examples at positions start ... start + count - 1 of the endless stream of a seed.

        `redraw` k > 0 returns the k-th replacement of these examples.
        """
        ...

    def reward(self, example: Example, completion: str) -> float:
        """Return the reward of a completion: any finite number, 0 or 1 from the verifiers of abrun.

        Only the text counts: truncated completions are judged like any other. Tasks of type completions and
        preferences have no verifier; recipe validation prevents calls on them.
        """
        ...

    def held_out(self, count: int) -> list[Example]:
        """Return `count` examples, the same for every seed. Raises RecipeError if there are too few."""
        ...

    def without(self, prompts: frozenset[str]) -> Self:
        """Return the task without these prompts. Raises RecipeError if no prompts remain."""
        ...


def make_task(config: TaskConfig) -> TrainingTask:
    """Return the task of a recipe. Raises RecipeError if its file is missing or has an invalid line."""
    if isinstance(config, Arithmetic):
        from abrun.trainer.tasks.generated import arithmetic

        return arithmetic(config)
    if isinstance(config, WordProblems):
        from abrun.trainer.tasks.generated import word_problems

        return word_problems(config)
    if isinstance(config, ReasoningGym):
        from abrun.trainer.tasks.generated import reasoning_gym

        return reasoning_gym(config)
    from abrun.trainer.tasks.problems import make_problem_file

    return make_problem_file(config)


def hold_out(config: TaskConfig, validation: Validation) -> tuple[TrainingTask, list[Example]]:
    """Split the task into training task and validation examples, the same for every arm and seed.

    Training excludes all copies of a validation prompt, such as duplicate lines.
    """
    task = make_task(config)
    if validation.path is None or isinstance(config, GeneratedTask):
        examples = task.held_out(validation.num_prompts)
    else:
        from abrun.trainer.tasks.problems import read_problems

        problems = read_problems(config, validation.path, "validation.path")
        examples = problems.held_out(validation.num_prompts)
    return task.without(frozenset(example.prompt for example in examples)), examples
