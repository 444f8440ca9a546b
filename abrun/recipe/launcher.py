"""Launcher sections of a recipe (this machine, or a cluster that queues jobs) and the user's profile."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from abrun.errors import RecipeError
from abrun.reasons import Code
from abrun.recipe.reading import parse_yaml
from abrun.recipe.refusals import shortened, type_name, validated
from abrun.recipe.secrets import refuse_secrets
from abrun.recipe.section import Count, FieldError, Section, check_line, check_word
from abrun.redaction import REFERENCE
from abrun.regular_files import read_regular

TIME_PATTERN = r"(\d+-)?\d+(:\d{1,2}){0,2}"  # minutes, minutes:seconds, hours:minutes:seconds, days-hours...
RESERVED_SBATCH_OPTIONS = (  # noqa: SIM905 (set by abrun from the recipe)
    "account array chdir constraint container-image cpus-per-task dependency error export gpus gpus-per-node "
    "gres job-name no-requeue nodes ntasks ntasks-per-node open-mode output parsable partition qos requeue "
    "signal test-only time wait wrap"
).split()
MAX_PROFILE_BYTES = 1 << 16
VARIABLE_PATTERN = "[A-Za-z_][A-Za-z0-9_]*"
# Checks of the Kubernetes server beyond its schema: names of objects, keys and values of labels
OBJECT_PATTERN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL_PATTERN = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _require_match(
    pattern: str, allowed: str, max_length: int = 253, *, values: bool = False
) -> AfterValidator:
    """Return a validator of a text, of a list's texts, or of a mapping's keys (or its `values`)."""

    def check(value: Any) -> Any:
        texts = value.values() if values else [value] if isinstance(value, str) else value
        for text in texts:
            if len(text) > max_length or not re.fullmatch(pattern, text):
                raise FieldError(f"got {shortened(text)}; allowed: {allowed}")
        return value

    return AfterValidator(check)


Word = Annotated[str, AfterValidator(check_word)]
Line = Annotated[str, AfterValidator(check_line)]
Lines = Annotated[list[str], AfterValidator(lambda lines: [check_line(line) for line in lines])]
CHECK_OBJECT_NAME = _require_match(OBJECT_PATTERN, "lower-case letters, digits, '-' and '.'")
CHECK_LABEL_KEY = _require_match(
    rf"({OBJECT_PATTERN}/)?{LABEL_PATTERN}", "such as nvidia.com/gpu, at most 63 after the '/'", 317
)
CHECK_LABEL_VALUES = _require_match(
    f"({LABEL_PATTERN})?", "a label's value: letters, digits, '-', '_' and '.', at most 63", values=True
)
CHECK_DURATION = _require_match(TIME_PATTERN, "'90' (minutes), '2:00:00' or '1-12:00:00'")
ObjectName = Annotated[Word, CHECK_OBJECT_NAME]


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
    time: Annotated[str, CHECK_DURATION] | None = None
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


class ManifestSettings(Section):
    """Settings shared by both kinds of manifests. The image must contain the exporting version of abrun."""

    image: Word | None = None
    # Path of the folder of all experiments on every node
    runs_dir: Annotated[
        str, _require_match("(/[A-Za-z0-9._-]+)+", "an absolute path without spaces, such as /runs", 4096)
    ] = "/runs"
    cpus_per_rank: Count = 1
    secrets: Lines = Field(default=[])
    python: Line = "python"  # interpreter in the image
    setup: Lines = Field(default=[])  # shell lines to run first, such as: source /opt/venv/bin/activate
    # Seconds to save a checkpoint after a stop request
    save_s: Annotated[int, Field(ge=1, le=65535)] = 120


class JobSet(ManifestSettings):
    """Kubernetes manifests for JobSet. `secrets`: names of Secrets whose keys become variables."""

    type: Literal["jobset"]
    secrets: Annotated[Lines, CHECK_OBJECT_NAME] = Field(default=[])
    # Existing PersistentVolumeClaim (ReadWriteMany) mounted at runs_dir; abrun creates none
    claim: ObjectName | None = None
    namespace: ObjectName | None = None
    queue: ObjectName | None = None  # Kueue queue, which admits all pods of a pair or none
    node_selector: Annotated[dict[str, str], CHECK_LABEL_KEY, CHECK_LABEL_VALUES] = Field(default={})
    gpu: Annotated[Word, CHECK_LABEL_KEY] = "nvidia.com/gpu"  # the cluster's resource name for a GPU
    # Memory of a run on each node, in Kubernetes' format
    memory: Annotated[Word, _require_match(r"[0-9]+(\.[0-9]+)?([kMGTPE]i?)?", "such as 64Gi")] | None = None


class SkyPilot(ManifestSettings):
    """SkyPilot task files. `secrets`: environment variables for `sky` to pass on."""

    type: Literal["skypilot"]
    secrets: Annotated[Lines, _require_match(VARIABLE_PATTERN, "names of environment variables")] = Field(
        default=[]
    )
    volume: Word | None = None  # a `sky volumes` volume, mounted at runs_dir; None: image or setup mounts it
    # Such as H100; required with cluster.gpus_per_node
    accelerator: (
        Annotated[
            str,
            _require_match("[A-Za-z0-9_.-]+", "a name such as H100; cluster.gpus_per_node gives the number"),
        ]
        | None
    ) = None
    # Other resources of a task: {infra: k8s, use_spot: true, memory: 64+}
    resources: dict[str, str | int | float | bool] = Field(default={})

    @field_validator("resources")
    @classmethod
    def _check_task_resources(cls, resources: dict[str, Any]) -> dict[str, Any]:
        reserved = [
            name for name in ("accelerators", "cpus", "image_id", "job_recovery") if name in resources
        ]
        if reserved:
            raise FieldError(f"got {reserved[0]}, which abrun sets from the recipe; drop it")
        for value in resources.values():
            check_line(str(value))
        return resources


LauncherSettings = Local | Slurm | Ray | JobSet | SkyPilot
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

    None if no recipe may name `kind`. Raises RecipeError if profile or recipe are invalid.
    """
    if kind is None:
        kind = declared.type if declared else "local"
    if kind not in LAUNCHER_TYPES:
        return None
    path = profile_path()
    profile = _read_profile(path, kind)
    refuse_secrets(profile, f"{path}: {kind}")
    validated(LAUNCHER_TYPES[kind], {"type": kind, **profile}, f"{path}: {kind}")
    recipe_values = declared.model_dump(exclude_unset=True) if declared and declared.type == kind else {}
    return validated(LAUNCHER_TYPES[kind], {**profile, **recipe_values, "type": kind}, "launcher")


def _read_profile(path: Path, kind: str) -> Mapping[str, Any]:
    try:
        content = parse_yaml(read_regular(path, MAX_PROFILE_BYTES).decode(), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(Code.UNREADABLE(path=path, error=str(error))) from None
    content = {} if content is None else content
    is_known = isinstance(content, dict) and content.keys() <= LAUNCHER_TYPES.keys()
    if not is_known or not all(isinstance(settings, dict) for settings in content.values()):
        raise RecipeError(
            Code.PROFILE_INVALID(source=path, got=shortened(content), allowed=[*LAUNCHER_TYPES])
        )
    return content.get(kind, {})
