"""From a plan to its runs: the directory of an experiment, the order of its runs, and what starts them."""

from abrun.launch.cancel import cancel
from abrun.launch.engine import make_engine, make_scheduler, queued_jobs
from abrun.launch.experiment import experiment_dir_of
from abrun.launch.handover import hand_over, launch_or_hand_over
from abrun.launch.supervisor import Observer, Outcome, launch

__all__ = [
    "Observer",
    "Outcome",
    "cancel",
    "experiment_dir_of",
    "hand_over",
    "launch",
    "launch_or_hand_over",
    "make_engine",
    "make_scheduler",
    "queued_jobs",
]
