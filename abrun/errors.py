"""Errors that a user can fix. Each message is one line: field, value received, what is allowed, next step."""

from abrun.messages import sentence
from abrun.messages.codes import Code, Reason, in_words


class AbrunError(Exception):
    """Base of every error that the command line prints as one line with exit code 2."""

    def __init__(self, reason: Reason | str) -> None:
        super().__init__(reason)
        self.reason = reason if isinstance(reason, Reason) else in_words(reason)

    @property
    def code(self) -> Code:
        return self.reason.code

    def __str__(self) -> str:
        return sentence(self.reason)


class RecipeError(AbrunError):
    """Error in a recipe, an override or a plan."""


class LaunchError(AbrunError):
    """Error of a plan that this machine, directory or launcher cannot run."""


class StoreError(AbrunError):
    """Error of a run directory that is missing, unreadable, unwritable or owned by someone else."""


class ComparisonError(AbrunError):
    """Error of runs that cannot be compared as requested."""


class UnknownRunsError(ComparisonError):
    """Error of runs whose arms or seeds cannot be told. Its message ends with a command that tells them."""
