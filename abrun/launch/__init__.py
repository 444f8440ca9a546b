"""From a plan to its runs: the directory of an experiment, the order of its runs, and what starts them."""

from abrun.experiment.options import LaunchOptions
from abrun.launch.cancel import cancel
from abrun.launch.engine import make_engine, make_scheduler, queued_jobs
from abrun.launch.handover import hand_over, wait_for
from abrun.launch.ownership import experiment_dir_of
from abrun.launch.supervisor import Observer, Outcome, run_plan

__all__ = [
    "LaunchOptions",
    "Observer",
    "Outcome",
    "cancel",
    "experiment_dir_of",
    "hand_over",
    "make_engine",
    "make_scheduler",
    "queued_jobs",
    "run_plan",
    "wait_for",
]
