"""Check of a recipe's task files before its runs start; `abrun launch` calls it."""

from collections.abc import Iterator

from abrun.errors import RecipeError
from abrun.messages.codes import Reason
from abrun.recipe.run import OwnRunConfig
from abrun.recipe.tasks import GeneratedTask, ReasoningGym
from abrun.trainer.tasks import hold_out
from abrun.trainer.tasks.problems import check_problems


def find_bad_files(config: OwnRunConfig) -> Iterator[Reason]:
    """Yield errors in the files of task and validation; of long files only the first lines are checked."""
    task, validation = config.task, config.validation
    try:
        if isinstance(task, ReasoningGym):
            return
        if isinstance(task, GeneratedTask):
            if validation:
                hold_out(task, validation)
            return
        trained = check_problems(task, task.path, "task.path")
        if validation:
            path = validation.path
            source = check_problems(task, path, "validation.path") if path else trained
            held_out = source.held_out(validation.num_prompts) if source else []
            if trained:
                trained.without(frozenset(example.prompt for example in held_out))
    except RecipeError as error:
        yield error.reason
