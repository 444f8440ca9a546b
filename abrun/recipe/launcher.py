"""What starts the runs: this machine, or a cluster that queues jobs, with what a user's own profile adds."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.recipe.exported import VARIABLE, JobSet, SkyPilot
from abrun.recipe.reading import parse_yaml
from abrun.recipe.refusals import shortened, validated
from abrun.recipe.secrets import refuse_secrets
from abrun.recipe.section import Count, FieldError, Section, line_of_text, word
from abrun.redaction import REFERENCE
from abrun.regular_files import read_regular

TIME = r"(\d+-)?\d+(:\d{1,2}){0,2}"  # minutes, minutes:seconds, hours:minutes:seconds, days-hours...
TAKEN = [
    "account",
    "array",
    "chdir",
    "constraint",
    "container-image",
    "cpus-per-task",
    "dependency",
    "error",
    "export",
    "gpus",
    "gpus-per-node",
    "gres",
    "job-name",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "partition",
    "qos",
    "requeue",
    "signal",
    "test-only",
    "time",
    "wait",
    "wrap",
]
MOST_PROFILE = 1 << 16  # bytes


class Local(Section):
    """Processes on this machine."""

    type: Literal["local"]


class Container(Section):
    """The image that ranks run in, by the pyxis plugin of Slurm. abrun has to be installed there, too."""

    image: str  # as `srun --container-image` takes it
    mounts: list[str] = Field(default=[])  # HOST_PATH:CONTAINER_PATH; the runs directory has to be among them


class Slurm(Section):
    """Jobs of Slurm. What is left open here is taken from the user's profile, then from Slurm's defaults."""

    type: Literal["slurm"]
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    # The limit of a job, as sbatch takes it ("2:00:00"). A run that takes longer goes on in the next one
    time: str | None = None
    save_s: Annotated[int, Field(ge=1, le=65535)] = 120  # before that limit runs save a checkpoint and stop
    requeues: Annotated[int, Field(ge=0)] = 20  # how often a job begins again after limit, preemption, fault
    cpus_per_rank: Count = 1
    interface: str | None = None  # the network that nodes talk over, such as ib0; default: the libraries' own
    python: str | None = None  # of the nodes or the container; default: the one that launches
    setup: list[str] = Field(default=[])  # lines of shell before that, such as: module load cuda
    container: Container | None = None
    sbatch: dict[str, str | int | bool] = Field(
        default={}
    )  # any other options of sbatch: {exclusive: true, mem: 64G}

    @field_validator("time")
    @classmethod
    def _time_is_one(cls, time: str | None) -> str | None:
        if time is not None and not re.fullmatch(TIME, time):
            raise FieldError(
                f"got {shortened(time)}; allowed: such as '90' (minutes), '2:00:00', '1-12:00:00'"
            )
        return time

    @field_validator("account", "partition", "qos", "constraint", "python")
    @classmethod
    def _is_a_line(cls, value: str | None) -> str | None:
        return value if value is None else line_of_text(value)

    @field_validator("interface")
    @classmethod
    def _is_a_word(cls, value: str | None) -> str | None:
        return value if value is None else word(value)

    @field_validator("setup")
    @classmethod
    def _setup_is_lines(cls, setup: list[str]) -> list[str]:
        return [line_of_text(line) for line in setup]

    @field_validator("sbatch")
    @classmethod
    def _options_are_free(cls, options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name, value in options.items():
            if not re.fullmatch("[a-z][a-z-]+", name):
                raise FieldError(
                    f"got {shortened(name)}; allowed: a long option without its dashes: mem, exclude"
                )
            if any(taken.startswith(name) for taken in TAKEN):  # sbatch takes beginnings of names, too
                raise FieldError(f"got {name}, which abrun sets itself, from the recipe; leave it out")
            line_of_text(str(value))
        return options


class Ray(Section):
    """A job of a Ray cluster. What is left open here is taken from the user's profile."""

    type: Literal["ray"]
    # Of the dashboard, http://HEAD:8265; auto: RAY_ADDRESS, or else the cluster that this machine is part of
    address: str = "auto"
    save_s: Annotated[int, Field(ge=1, le=3600)] = 120  # for a checkpoint, once the job is asked to stop
    restarts: Annotated[int, Field(ge=0)] = 20  # how often a run begins again after lost nodes
    cpus_per_rank: Count = 1
    # What else each node of a run has to have for it, in Ray's names: {"accelerator_type:H200": 0.001}
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default={})
    interface: str | None = None  # the network that nodes talk over, such as ib0; default: the libraries' own
    python: str | None = None  # of the cluster's machines; default: the one that launches
    # Variables of all processes. No secrets: Ray's dashboard shows them
    env: dict[str, str] = Field(default={})

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, address: str) -> str:
        if address != "auto" and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
            raise FieldError(
                f"got {shortened(address)}; allowed: 'auto', or a dashboard's: 'http://HEAD:8265' "
                "(for a cluster of this machine alone: ray start --head, and 'auto')"
            )
        return address

    @field_validator("python")
    @classmethod
    def _is_a_line(cls, value: str | None) -> str | None:
        return value if value is None else line_of_text(value)

    @field_validator("interface")
    @classmethod
    def _is_a_word(cls, value: str | None) -> str | None:
        return value if value is None else word(value)

    @field_validator("env")
    @classmethod
    def _env_is_of_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(VARIABLE, name):
                raise FieldError(f"got {shortened(name)}; allowed: names of environment variables")
            if REFERENCE.search(value):
                raise FieldError(
                    f"got {shortened(value)} for {name}, which nothing fills in here; give its value"
                )
        return env

    @field_validator("resources")
    @classmethod
    def _resources_are_others(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in resources:
            if name in ("CPU", "GPU", "bundle") or not line_of_text(name):
                raise FieldError(f"got {name}, which abrun sets itself, from the recipe; leave it out")
        return resources


LauncherSettings = Local | Slurm | Ray | JobSet | SkyPilot
LAUNCHERS: dict[str, type[LauncherSettings]] = {
    "local": Local,
    "slurm": Slurm,
    "ray": Ray,
    "jobset": JobSet,
    "skypilot": SkyPilot,
}


def limit_s(time: str) -> float:
    """The seconds of a limit as sbatch takes it (`TIME`); infinite for '0', which is none."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = parts + [0] * (3 - len(parts))
    else:
        hours, minutes, seconds = ([0] if len(parts) < 3 else []) + parts + ([0] if len(parts) == 1 else [])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def profile_path() -> Path:
    """The user's own defaults of launchers: a mapping of their types to their fields."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "abrun" / "launchers.yaml"


def launcher_settings(declared: LauncherSettings | None, kind: str | None) -> LauncherSettings | None:
    """What `--launcher` or else the recipe names, with the user's profile below it; without either: local.

    None for a name that no recipe may say. Raises RecipeError where profile and recipe do not fit.
    """
    if kind is None:
        kind = declared.type if declared else "local"
    if kind not in LAUNCHERS:
        return None
    path = profile_path()
    profile = _profile(path, kind)
    refuse_secrets(profile, f"{path}: {kind}")
    validated(LAUNCHERS[kind], {"type": kind, **profile}, f"{path}: {kind}")
    said = declared.model_dump(exclude_unset=True) if declared and declared.type == kind else {}
    return validated(LAUNCHERS[kind], {**profile, **said, "type": kind}, "launcher")


def _profile(path: Path, kind: str) -> Mapping[str, Any]:
    try:
        content = parse_yaml(read_regular(path, MOST_PROFILE).decode(), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(Code.UNREADABLE(path=path, error=str(error))) from None
    fits = isinstance(content, dict) and all(isinstance(each, dict) for each in content.values())
    if content is not None and not (fits and content.keys() <= LAUNCHERS.keys()):
        raise RecipeError(Code.PROFILE_INVALID(source=path, got=shortened(content), allowed=[*LAUNCHERS]))
    return (content or {}).get(kind, {})
