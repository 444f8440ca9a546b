"""Tasks: where prompts come from and how completions are judged."""

from dataclasses import dataclass, field
from typing import Protocol, Self

from abrun.recipe.tasks import GENERATED, Arithmetic, ReasoningGym, TaskConfig, Validation, WordProblems


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One problem."""

    prompt: str
    completion: str  # a reference solution: what supervised steps imitate, and preferences choose
    answer: str = ""  # what the verifier compares with, in a task that has one
    rejected: str = ""  # a worse completion, in a task of preferences
    source: str = field(default="", compare=False)  # where it stands, for messages


class Task(Protocol):
    """A stream of examples that is a pure function of the seed and the position, and a verifier."""

    def examples(self, seed: int, start: int, count: int) -> list[Example]:
        """The examples at positions start ... start + count - 1 of the seed's endless stream."""
        ...

    def reward(self, example: Example, completion: str) -> float:
        """The verifier's reward for a completion's text: any finite number, 0 or 1 of abrun's own verifiers.

        The text is all that counts: a completion that was truncated is judged like any other. A task of
        completions or preferences alone has no verifier, and recipes ask none of it.
        """
        ...

    def held_out(self, count: int) -> list[Example]:
        """`count` examples that depend on the task alone. Raises RecipeError where it has too few."""
        ...

    def without(self, prompts: frozenset[str]) -> Self:
        """The task whose stream never has these prompts. Raises RecipeError where nothing is left."""
        ...


def make_task(config: TaskConfig) -> Task:
    """The task of a recipe. Raises RecipeError where its file is missing or has a line that does not fit."""
    if isinstance(config, Arithmetic):
        from abrun.tasks.arithmetic import arithmetic

        return arithmetic(config)
    if isinstance(config, WordProblems):
        from abrun.tasks.word_problems import word_problems

        return word_problems(config)
    if isinstance(config, ReasoningGym):
        from abrun.tasks.reasoning import reasoning_gym

        return reasoning_gym(config)
    from abrun.tasks.problems import problem_file

    return problem_file(config)


def hold_out(config: TaskConfig, validation: Validation) -> tuple[Task, list[Example]]:
    """The task without its validation prompts, and those: the same for every arm and seed.

    A prompt that training could also draw from elsewhere (a line that comes twice, say) is not trained on.
    """
    task = make_task(config)
    if validation.path is None or isinstance(config, GENERATED):
        examples = task.held_out(validation.num_prompts)
    else:
        from abrun.tasks.problems import read_problems

        problems = read_problems(config, validation.path, "validation.path")
        examples = problems.held_out(validation.num_prompts)
    return task.without(frozenset(example.prompt for example in examples)), examples
