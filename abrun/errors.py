"""The errors a user can mend. Each message is one line: field, value received, what is allowed, next step."""


class AbrunError(Exception):
    """Base of every error that the command line prints as one line with exit code 2."""


class RecipeError(AbrunError):
    """A recipe, an override or a plan that cannot be run as written."""


class LaunchError(AbrunError):
    """A plan that this machine, directory or launcher cannot run."""


class StoreError(AbrunError):
    """A run directory that is missing, unreadable, unwritable or somebody else's."""


class ComparisonError(AbrunError):
    """Runs that cannot be compared as asked."""
