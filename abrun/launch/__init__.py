"""From a plan to its runs: the directory of an experiment, the order of its runs, and what starts them."""

from abrun.launch.engine import make_engine
from abrun.launch.experiment import experiment_dir_of
from abrun.launch.supervisor import Observer, Outcome, launch

__all__ = ["Observer", "Outcome", "experiment_dir_of", "launch", "make_engine"]
