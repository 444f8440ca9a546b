"""abrun: paired A/B runs of RL post-training, and a verdict on whether they converge the same way.

    import abrun

    experiment = abrun.launch("quickstart")     # or abrun.load("quickstart")
    result = abrun.compare(experiment)          # or of any runs: abrun.compare("a.csv", "b.csv")
    result.verdict, result.claims, result.metrics, result.report

See abrun.api. Nothing slow is imported before it is asked for.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abrun.api import Experiment, Result, compare, launch, load

    __version__: str

__all__ = ["Experiment", "Result", "__version__", "compare", "launch", "load"]

_FUNCTIONS_AND_MODULES = ("compare", "launch")  # names that both abrun.api and a package of abrun's have


class _CallableModule(ModuleType):
    """A package that, when called, is the function of abrun.api of its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module("abrun.api"), self.__name__.removeprefix("abrun."))(
            *arguments, **options
        )


class _Package(ModuleType):
    """abrun itself: what the import system sets of its packages can be called, where that has a meaning."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FUNCTIONS_AND_MODULES and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("abrun")
    if name in _FUNCTIONS_AND_MODULES:
        return import_module(f"abrun.{name}")
    if name in __all__:
        return getattr(import_module("abrun.api"), name)
    raise AttributeError(f"module 'abrun' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
