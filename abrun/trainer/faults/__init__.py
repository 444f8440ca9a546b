"""Injected faults, by their names in `abrun.recipe.faults`; a comparison must detect them.

Each fault is one function of a `FaultSite`, the objects of a run. It wraps a method of one of them, so the
training code knows nothing of faults. Without a fault nothing is wrapped.
"""

from abrun.trainer.faults.batch import BATCH_FAULTS
from abrun.trainer.faults.engine import ENGINE_FAULTS
from abrun.trainer.faults.head import HEAD_FAULTS
from abrun.trainer.faults.objective import OBJECTIVE_FAULTS
from abrun.trainer.faults.optimizer import OPTIMIZER_FAULTS
from abrun.trainer.faults.setup import SETUP_FAULTS
from abrun.trainer.faults.site import FaultSite
from abrun.trainer.loop.setup import RunSetup

BY_SEAM = {
    "engine": ENGINE_FAULTS,
    "batch": BATCH_FAULTS,
    "objective": OBJECTIVE_FAULTS,
    "head": HEAD_FAULTS,
    "optimizer": OPTIMIZER_FAULTS,
    "setup": SETUP_FAULTS,
}


def inject(setup: RunSetup, algorithm: object) -> None:
    """Inject the recipe's `injected_fault`, if any. Raises RecipeError if the run lacks what it changes."""
    injected = setup.config.injected_fault
    if injected is not None:
        functions = {name: function for seam in BY_SEAM.values() for name, function in seam.items()}
        site = FaultSite(setup=setup, algorithm=algorithm, size=injected.amount, draw=injected.draw)
        functions[injected.name](site)
