"""What a launch is asked for: one record, from the command line or Python to whatever starts runs."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of `abrun launch`, but for those that change the recipe or what is printed."""

    runs_dir: Path = Path("runs")
    name: str | None = None  # folder of the experiment; None: the recipe's name
    launcher: str | None = None  # None: the recipe's, or local
    jobs: int | None = None  # runs at once; None: as many as the devices allow
    resume: bool = False
    take_over: bool = False  # of a lock that a launcher on another machine has
    detach: bool = False  # return once the jobs are in the queue of a cluster
    compare: bool = True  # the arms at the end
    until_decided: bool = False  # pairs in stages, judged after each
    max_seeds: int | None = None  # of the last stage
    device_memory: str | None = None  # of a GPU, such as "80GiB", for values of auto; None: this machine's
