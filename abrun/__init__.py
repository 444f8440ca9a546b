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


class _CallableModule(ModuleType):
    """The package abrun.launch, which is abrun.api.launch when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("abrun.api").launch(*arguments, **options)


class _Package(ModuleType):
    """abrun itself: when the import system sets its package `launch`, that becomes callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "launch" and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("abrun")
    if name == "launch":
        return import_module("abrun.launch")
    if name in __all__:
        return getattr(import_module("abrun.api"), name)
    raise AttributeError(f"module 'abrun' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
