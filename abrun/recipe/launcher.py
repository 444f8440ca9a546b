"""What starts the runs: this machine, or a cluster that queues jobs, with what a user's own profile adds."""

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
from abrun.recipe.section import Count, FieldError, Section, line_of_text, word
from abrun.redaction import REFERENCE
from abrun.regular_files import read_regular

TIME = r"(\d+-)?\d+(:\d{1,2}){0,2}"  # minutes, minutes:seconds, hours:minutes:seconds, days-hours...
TAKEN = (  # noqa: SIM905 (options of sbatch that follow from the recipe)
    "account array chdir constraint container-image cpus-per-task dependency error export gpus gpus-per-node "
    "gres job-name no-requeue nodes ntasks ntasks-per-node open-mode output parsable partition qos requeue "
    "signal test-only time wait wrap"
).split()
MOST_PROFILE = 1 << 16  # bytes
VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
# What Kubernetes' server checks beyond its schema: names of objects, keys and values of labels
OBJECT = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _matching(pattern: str, allowed: str, most: int = 253, *, values: bool = False) -> AfterValidator:
    """Check a text, or each text of a list, or the keys (or the `values`) of a mapping."""

    def check(value: Any) -> Any:
        texts = value.values() if values else [value] if isinstance(value, str) else value
        for text in texts:
            if len(text) > most or not re.fullmatch(pattern, text):
                raise FieldError(f"got {shortened(text)}; allowed: {allowed}")
        return value

    return AfterValidator(check)


Word = Annotated[str, AfterValidator(word)]
Line = Annotated[str, AfterValidator(line_of_text)]
Lines = Annotated[list[str], AfterValidator(lambda lines: [line_of_text(line) for line in lines])]
IS_OBJECT = _matching(OBJECT, "small letters, digits, '-' and '.'")
IS_KEY = _matching(rf"({OBJECT}/)?{LABEL}", "such as nvidia.com/gpu, at most 63 after the '/'", 317)
ARE_LABELS = _matching(
    f"({LABEL})?", "a label's value: letters, digits, '-', '_' and '.', at most 63", values=True
)
Name = Annotated[Word, IS_OBJECT]


def _duration(time: str) -> str:
    if not re.fullmatch(TIME, time):
        raise FieldError(f"got {shortened(time)}; allowed: such as '90' (minutes), '2:00:00', '1-12:00:00'")
    return time


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
    account: Line | None = None
    partition: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    # The limit of a job, as sbatch takes it ("2:00:00"). A run that takes longer goes on in the next one
    time: Annotated[str, AfterValidator(_duration)] | None = None
    save_s: Annotated[int, Field(ge=1, le=65535)] = 120  # before that limit runs save a checkpoint and stop
    requeues: Annotated[int, Field(ge=0)] = 20  # how often a job begins again after limit, preemption, fault
    cpus_per_rank: Count = 1
    # The network that nodes talk over, such as ib0; default: the libraries' own
    interface: Word | None = None
    python: Line | None = None  # of the nodes or the container; default: the one that launches
    setup: Lines = Field(default=[])  # lines of shell before that, such as: module load cuda
    container: Container | None = None
    # Any other options of sbatch: {exclusive: true, mem: 64G}
    sbatch: dict[str, str | int | bool] = Field(default={})

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
    # The network that nodes talk over, such as ib0; default: the libraries' own
    interface: Word | None = None
    python: Line | None = None  # of the cluster's machines; default: the one that launches
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


class Exported(Section):
    """What both kinds of manifests need to know. The image has to hold abrun, of the version that exports."""

    image: Word | None = None
    # Where every node sees the folder of all experiments
    runs_dir: Annotated[
        str, _matching("(/[A-Za-z0-9._-]+)+", "an absolute path without spaces, such as /runs", 4096)
    ] = "/runs"
    cpus_per_rank: Count = 1
    secrets: Lines = Field(default=[])
    python: Line = "python"  # of the image
    setup: Lines = Field(default=[])  # lines of shell before that, such as: source /opt/venv/bin/activate
    # Seconds that runs get to save a checkpoint when asked to stop
    save_s: Annotated[int, Field(ge=1, le=65535)] = 120


class JobSet(Exported):
    """Manifests for Kubernetes with the JobSet controller. `secrets`: of what names, whose keys are set."""

    type: Literal["jobset"]
    secrets: Annotated[Lines, IS_OBJECT] = Field(default=[])
    claim: Name | None = None  # the PersistentVolumeClaim (ReadWriteMany) that runs_dir is; abrun makes none
    namespace: Name | None = None
    queue: Name | None = None  # of Kueue, which then admits all pods of a pair or none
    node_selector: Annotated[dict[str, str], IS_KEY, ARE_LABELS] = Field(default={})
    gpu: Annotated[Word, IS_KEY] = "nvidia.com/gpu"  # what the cluster calls a GPU
    # Of a run on each node, as Kubernetes takes it
    memory: Annotated[Word, _matching(r"[0-9]+(\.[0-9]+)?([kMGTPE]i?)?", "such as 64Gi")] | None = None


class SkyPilot(Exported):
    """Task files for SkyPilot. `secrets`: environment variables that `sky` is to pass on."""

    type: Literal["skypilot"]
    secrets: Annotated[Lines, _matching(VARIABLE, "names of environment variables")] = Field(default=[])
    volume: Word | None = None  # of `sky volumes`, mounted at runs_dir; else what image or setup mount there
    # Such as H100; needed with cluster.gpus_per_node
    accelerator: (
        Annotated[
            str, _matching("[A-Za-z0-9_.-]+", "a name such as H100; how many, says cluster.gpus_per_node")
        ]
        | None
    ) = None
    # Any other resources of a task: {infra: k8s, use_spot: true, memory: 64+}
    resources: dict[str, str | int | float | bool] = Field(default={})

    @field_validator("resources")
    @classmethod
    def _resources_are_free(cls, resources: dict[str, Any]) -> dict[str, Any]:
        taken = [name for name in ("accelerators", "cpus", "image_id", "job_recovery") if name in resources]
        if taken:
            raise FieldError(f"got {taken[0]}, which abrun sets itself, from the recipe; leave it out")
        for value in resources.values():
            line_of_text(str(value))
        return resources


LauncherSettings = Local | Slurm | Ray | JobSet | SkyPilot
LAUNCHERS: dict[str, type[LauncherSettings]] = {
    str(type_name(model)): model for model in get_args(LauncherSettings)
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
