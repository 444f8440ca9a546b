"""Engines that abrun writes manifests for and starts nothing on: `abrun export`."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from abrun.recipe.section import Count, FieldError, Section, line_of_text, word
from abrun.redaction import shortened

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
