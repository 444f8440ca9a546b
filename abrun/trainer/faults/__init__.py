"""Injected faults, by their names in `abrun.recipe.faults`; a comparison must detect them.

Each fault is one public function of its seam's module. It receives a `FaultSite`, the objects of a run, and
wraps a method of one of them, so the training code knows nothing of faults. Without a fault nothing is
wrapped.
"""

from inspect import getmembers, isfunction

from abrun.trainer.faults import batch, engine, head, objective, optimizer
from abrun.trainer.faults import setup as setup_seam
from abrun.trainer.faults.site import FaultSite
from abrun.trainer.loop.setup import RunSetup

BY_SEAM = {
    module.__name__.rpartition(".")[2]: {
        name: function
        for name, function in getmembers(module, isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    for module in (batch, engine, head, objective, optimizer, setup_seam)
}


def inject(setup: RunSetup, algorithm: object) -> None:
    """Inject the recipe's `injected_fault`, if any. Raises RecipeError if the run lacks what it changes."""
    injected = setup.config.injected_fault
    if injected is not None:
        functions = {name: function for seam in BY_SEAM.values() for name, function in seam.items()}
        site = FaultSite(setup=setup, algorithm=algorithm, size=injected.amount, draw=injected.draw)
        functions[injected.name](site)
