"""Faults injected on purpose, by the names of `abrun.recipe.faults`: what a comparison must find.

Each is one function of what a run has built (`Site`), which wraps a method of one of its objects: the code
that trains knows nothing of faults. Without one nothing is wrapped.
"""

from abrun.train.faults.batch import OF_BATCHES
from abrun.train.faults.engine import OF_ENGINES
from abrun.train.faults.head import OF_HEADS
from abrun.train.faults.objective import OF_OBJECTIVES
from abrun.train.faults.optimizer import OF_OPTIMIZERS
from abrun.train.faults.setup import OF_SETUPS
from abrun.train.faults.site import Site
from abrun.train.setup import Setup

BY_SEAM = {
    "engine": OF_ENGINES,
    "batch": OF_BATCHES,
    "objective": OF_OBJECTIVES,
    "head": OF_HEADS,
    "optimizer": OF_OPTIMIZERS,
    "setup": OF_SETUPS,
}


def inject(setup: Setup, algorithm: object) -> None:
    """Break what the recipe's `injected_fault` names, if any. Raises RecipeError where that is not there."""
    injected = setup.config.injected_fault
    if injected is not None:
        functions = {name: function for seam in BY_SEAM.values() for name, function in seam.items()}
        site = Site(setup=setup, algorithm=algorithm, size=injected.amount, draw=injected.draw)
        functions[injected.name](site)
