"""Functions that `abrun compare --fleet` calls."""

from abrun.tools.drift.fleet.classify import EXIT_CODES
from abrun.tools.drift.fleet.command import compare_fleet
from abrun.tools.drift.fleet.recipes import FleetOptions
from abrun.tools.drift.fleet.report import render_terminal

__all__ = ["EXIT_CODES", "FleetOptions", "compare_fleet", "render_terminal"]
