"""The errors a user can mend. Each message is one line: field, value received, what is allowed, next step."""

from abrun.messages import sentence
from abrun.reasons import Code, Reason


class AbrunError(Exception):
    """Base of every error that the command line prints as one line with exit code 2."""

    def __init__(self, reason: Reason | str) -> None:
        super().__init__(reason)
        self.reason = reason if isinstance(reason, Reason) else None

    @property
    def code(self) -> Code | None:
        return self.reason.code if self.reason else None

    def __str__(self) -> str:
        return sentence(self.reason) if self.reason else str(self.args[0])


def reason_of(error: AbrunError) -> Reason:
    """Return why something was refused; a plain message is a reason without a code of its own."""
    return error.reason or Code.FOREIGN_TEXT(text=str(error))


class RecipeError(AbrunError):
    """A recipe, an override or a plan that cannot be run as written."""


class LaunchError(AbrunError):
    """A plan that this machine, directory or launcher cannot run."""


class StoreError(AbrunError):
    """A run directory that is missing, unreadable, unwritable or somebody else's."""


class ComparisonError(AbrunError):
    """Runs that cannot be compared as asked."""
