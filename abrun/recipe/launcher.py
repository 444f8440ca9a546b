"""Launcher sections of a recipe (this machine, or a cluster that queues jobs) and the user's profile."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from abrun.errors import RecipeError
from abrun.messages.numbers import listed
from abrun.recipe.implementations import find_scheduler, scheduler_names
from abrun.recipe.reading import parse_yaml, refuse_secrets
from abrun.recipe.refusals import shortened, type_name, validated
from abrun.recipe.section import Count, FieldError, Section, check_line, check_word, matching
from abrun.runs.files import read_regular
from abrun.runs.redaction import REFERENCE

# Minutes, minutes:seconds, hours:minutes:seconds, days-hours...
TIME_PATTERN = r"(\d{1,9}-)?\d{1,9}(:\d{1,2}){0,2}"
RESERVED_SBATCH_OPTIONS = (  # noqa: SIM905 (set by abrun from the recipe)
    "account array chdir constraint container-image cpus-per-task dependency error export gpus gpus-per-node "
    "gres job-name no-requeue nodes ntasks ntasks-per-node open-mode output parsable partition qos requeue "
    "signal test-only time wait wrap"
).split()
MAX_PROFILE_BYTES = 1 << 16
VARIABLE_PATTERN = "[A-Za-z_][A-Za-z0-9_]*"


Duration = Annotated[str, matching(TIME_PATTERN, "'90' (minutes), '2:00:00' or '1-12:00:00'")]
Word = Annotated[str, AfterValidator(check_word)]
Line = Annotated[str, AfterValidator(check_line)]
Lines = Annotated[list[str], AfterValidator(lambda lines: [check_line(line) for line in lines])]


class Local(Section):
    """Processes on this machine."""

    type: Literal["local"]


class Container(Section):
    """Container image for the ranks, run by Slurm's pyxis plugin. abrun must be installed in it."""

    image: str  # value for `srun --container-image`
    mounts: list[str] = Field(default=[])  # HOST_PATH:CONTAINER_PATH; must include the runs directory


class Slurm(Section):
    """Slurm jobs. Missing values come from the user's profile, then from Slurm's defaults."""

    type: Literal["slurm"]
    account: Line | None = None
    partition: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    # Time limit of a job in sbatch's format ("2:00:00"). A longer run resumes in the next job
    time: Duration | None = None
    # Seconds before the time limit at which runs save a checkpoint and stop
    save_s: Annotated[int, Field(ge=1, le=65535)] = 120
    # Maximum restarts of a job after its time limit, preemption or a fault
    requeues: Annotated[int, Field(ge=0)] = 20
    cpus_per_rank: Count = 1
    # Network interface between nodes, such as ib0; default: the libraries' choice
    interface: Word | None = None
    python: Line | None = None  # interpreter on the nodes or in the container; default: the launching one
    setup: Lines = Field(default=[])  # shell lines to run first, such as: module load cuda
    container: Container | None = None
    # Other options of sbatch: {exclusive: true, mem: 64G}
    sbatch: dict[str, str | int | bool] = Field(default={})

    @field_validator("sbatch")
    @classmethod
    def _check_sbatch_options(cls, options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name, value in options.items():
            if not re.fullmatch("[a-z][a-z-]+", name):
                raise FieldError(
                    f"got {shortened(name)}; allowed: a long option without dashes, such as mem or exclude"
                )
            # sbatch accepts unambiguous prefixes of option names, too
            if any(reserved.startswith(name) for reserved in RESERVED_SBATCH_OPTIONS):
                raise FieldError(f"got {name}, which abrun sets from the recipe; drop it")
            check_line(str(value))
        return options


class Ray(Section):
    """Jobs on a Ray cluster. Missing values come from the user's profile."""

    type: Literal["ray"]
    # Address of the dashboard, http://HEAD:8265; auto: RAY_ADDRESS, or else this machine's cluster
    address: str = "auto"
    save_s: Annotated[int, Field(ge=1, le=3600)] = 120  # seconds to save a checkpoint after a stop request
    restarts: Annotated[int, Field(ge=0)] = 20  # maximum restarts of a run after losing nodes
    cpus_per_rank: Count = 1
    # Other Ray resources that each node of a run needs: {"accelerator_type:H200": 0.001}
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default={})
    # Network interface between nodes, such as ib0; default: the libraries' choice
    interface: Word | None = None
    python: Line | None = None  # interpreter on the cluster's machines; default: the launching one
    # Environment variables of all processes. No secrets: Ray's dashboard shows them
    env: dict[str, str] = Field(default={})

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if address != "auto" and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
            raise FieldError(
                f"got {shortened(address)}; allowed: 'auto', or a dashboard's address 'http://HEAD:8265' "
                "(for a cluster on this machine only: run ray start --head and use 'auto')"
            )
        return address

    @field_validator("env")
    @classmethod
    def _check_env_names(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(VARIABLE_PATTERN, name):
                raise FieldError(f"got {shortened(name)}; allowed: names of environment variables")
            if REFERENCE.search(value):
                raise FieldError(
                    f"got {shortened(value)} for {name}, but no reference is expanded here; write the value"
                )
        return env

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in resources:
            if name in ("CPU", "GPU", "bundle") or not check_line(name):
                raise FieldError(f"got {name}, which abrun sets from the recipe; drop it")
        return resources


LauncherSettings = Local | Slurm | Ray
LAUNCHER_TYPES: dict[str, type[LauncherSettings]] = {
    str(type_name(model)): model for model in get_args(LauncherSettings)
}


def parse_time_limit(time: str) -> float:
    """Return the seconds of a time limit in sbatch's format (`TIME_PATTERN`); infinity for '0', no limit."""
    days, dash, rest = time.rpartition("-")
    units = [int(digits) for digits in rest.split(":")]
    if dash:
        hours, minutes, seconds = units + [0] * (3 - len(units))
    else:
        hours, minutes, seconds = ([0] if len(units) < 3 else []) + units + ([0] if len(units) == 1 else [])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or math.inf


def profile_path() -> Path:
    """Return the path of the user's launcher defaults: a mapping from launcher types to their fields."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "abrun" / "launchers.yaml"


def resolve_launcher_settings(declared: LauncherSettings | None, kind: str | None) -> LauncherSettings | None:
    """Return the launcher from `--launcher`, else the recipe, else local, merged over the user's profile.

    None if nothing has the name `kind`. That of another package has a class attribute `settings`, a Section,
    with values only from the profile. Raises RecipeError if profile or recipe are invalid.
    """
    if kind is None:
        kind = declared.type if declared else "local"
    model = LAUNCHER_TYPES.get(kind) or getattr(find_scheduler(kind), "settings", None)
    if model is None:
        return None
    path = profile_path()
    profile = _read_profile(path, kind)
    refuse_secrets(profile, f"{path}: {kind}")
    validated(model, {"type": kind, **profile}, f"{path}: {kind}")
    recipe_values = declared.model_dump(exclude_unset=True) if declared and declared.type == kind else {}
    return validated(model, {**profile, **recipe_values, "type": kind}, "launcher")


def _read_profile(path: Path, kind: str) -> Mapping[str, Any]:
    try:
        content = parse_yaml(read_regular(path, MAX_PROFILE_BYTES).decode(), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    content = {} if content is None else content
    is_known = isinstance(content, dict) and content.keys() <= {*LAUNCHER_TYPES, *scheduler_names()}
    if not is_known or not all(isinstance(settings, dict) for settings in content.values()):
        raise RecipeError(
            f"{path}: got {shortened(content)}; allowed: mappings under {listed([*LAUNCHER_TYPES])}"
        )
    return content.get(kind, {})
