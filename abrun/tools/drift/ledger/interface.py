"""Functions that `abrun reference` calls."""

from abrun.tools.drift.ledger.command import add_to_ledger, ledger_maker, render_reference
from abrun.tools.drift.ledger.drift import EXCEEDED, is_over_budget

__all__ = ["EXCEEDED", "add_to_ledger", "is_over_budget", "ledger_maker", "render_reference"]
