"""Options of a launch, passed from the command line or Python to the launcher."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `abrun launch`, except those that change the recipe or the output."""

    runs_dir: Path = Path("runs")
    name: str | None = None  # folder of the experiment; None: the recipe's name
    launcher: str | None = None  # None: the recipe's, or local
    jobs: int | None = None  # maximum concurrent runs; None: as many as the devices allow
    resume: bool = False
    take_over: bool = False  # take the lock from a launcher on another machine
    detach: bool = False  # return once the jobs are queued on a cluster
    compare: bool = True  # compare the arms at the end
    until_decided: bool = False  # run pairs in stages, with an interim analysis after each
    max_seeds: int | None = None  # seeds of the last stage
    device_memory: str | None = None  # GPU memory such as "80GiB", to resolve `auto`; None: this machine's
