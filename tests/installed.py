"""A process that sees the trainer's packages installed, be they or not."""

import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from abrun.recipe import extras

VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "math-verify": "0.8.0"}


def see_trainer_installed(patch: pytest.MonkeyPatch) -> None:
    """For launches of fakes, and for what is suggested to somebody who can train."""
    modules = set(extras.EXTRAS["train"])
    find_spec, find_version = importlib.util.find_spec, importlib.metadata.version

    def spec_of(name: str, package: str | None = None) -> ModuleSpec | None:
        return find_spec(name, package) or (ModuleSpec(name, None) if name in modules else None)

    def version_of(name: str) -> str:
        try:
            return find_version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in VERSIONS:
                raise
            return VERSIONS[name]

    patch.setattr(importlib.util, "find_spec", spec_of)
    patch.setattr(importlib.metadata, "version", version_of)


# For a program of `python -c` whose path has the repository
SEES_TRAINER = (
    "import pytest; from tests.installed import see_trainer_installed; "
    "see_trainer_installed(pytest.MonkeyPatch())\n"
)
