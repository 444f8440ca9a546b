"""Engines that abrun writes manifests for and starts nothing on: `abrun export`."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from abrun.recipe.section import Count, FieldError, Section, line_of_text, word
from abrun.redaction import shortened

WORDS = ("image", "claim", "volume", "namespace", "queue", "gpu", "memory")
VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
# What Kubernetes' server checks beyond its schema: names of objects, keys and values of labels
OBJECT = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


class Exported(Section):
    """What both kinds of manifests need to know. The image has to hold abrun, of the version that exports."""

    image: str | None = None
    runs_dir: str = "/runs"  # where every node sees the folder of all experiments
    cpus_per_rank: Count = 1
    secrets: list[str] = Field(default=[])
    python: str = "python"  # of the image
    setup: list[str] = Field(default=[])  # lines of shell before that, such as: source /opt/venv/bin/activate
    save_s: Annotated[int, Field(ge=1, le=65535)] = (
        120  # that runs get to save a checkpoint when asked to stop
    )

    @field_validator(*WORDS, check_fields=False)
    @classmethod
    def _is_a_word(cls, value: str | None) -> str | None:
        return value if value is None else word(value)

    @field_validator("python")
    @classmethod
    def _is_a_line(cls, value: str) -> str:
        return line_of_text(value)

    @field_validator("secrets", "setup")
    @classmethod
    def _are_lines(cls, values: list[str]) -> list[str]:
        return [line_of_text(value) for value in values]

    @field_validator("runs_dir")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", path):
            raise FieldError(
                f"got {shortened(path)}; allowed: an absolute path without spaces, such as /runs"
            )
        return path


class JobSet(Exported):
    """Manifests for Kubernetes with the JobSet controller. `secrets`: of what names, whose keys are set."""

    type: Literal["jobset"]
    claim: str | None = None  # the PersistentVolumeClaim (ReadWriteMany) that runs_dir is; abrun makes none
    namespace: str | None = None
    queue: str | None = None  # of Kueue, which then admits all pods of a pair or none
    node_selector: dict[str, str] = Field(default={})
    gpu: str = "nvidia.com/gpu"  # what the cluster calls a GPU
    memory: str | None = None  # of a run on each node, as Kubernetes takes it: 64Gi

    @field_validator("claim", "queue", "secrets")
    @classmethod
    def _are_names_of_objects(cls, names: str | list[str] | None) -> str | list[str] | None:
        for name in [names] if isinstance(names, str) else names or []:
            if len(name) > 253 or not re.fullmatch(OBJECT, name):
                raise FieldError(f"got {shortened(name)}; allowed: small letters, digits, '-' and '.'")
        return names

    @field_validator("gpu")
    @classmethod
    def _is_a_resource(cls, name: str) -> str:
        return _key_of_a_label(name)

    @field_validator("node_selector")
    @classmethod
    def _are_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            _key_of_a_label(key)
            if value and not re.fullmatch(LABEL, value):
                raise FieldError(
                    f"got {shortened(value)}; allowed: a label's value: letters, digits, '-', '_' and '.', "
                    "at most 63"
                )
        return labels


def _key_of_a_label(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if not re.fullmatch(LABEL, name) or (slash and not re.fullmatch(OBJECT, prefix)):
        raise FieldError(f"got {shortened(key)}; allowed: such as nvidia.com/gpu, at most 63 after the '/'")
    return key


class SkyPilot(Exported):
    """Task files for SkyPilot. `secrets`: environment variables that `sky` is to pass on."""

    type: Literal["skypilot"]
    volume: str | None = (
        None  # of `sky volumes`, mounted at runs_dir; without: what image or setup mount there
    )
    accelerator: str | None = None  # such as H100; needed with cluster.gpus_per_node
    # Any other resources of a task: {infra: k8s, use_spot: true, memory: 64+}
    resources: dict[str, str | int | float | bool] = Field(default={})

    @field_validator("accelerator")
    @classmethod
    def _has_no_count(cls, accelerator: str | None) -> str | None:
        if accelerator is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", accelerator):
            raise FieldError(
                f"got {shortened(accelerator)}; allowed: a name such as H100; how many, says "
                "cluster.gpus_per_node"
            )
        return accelerator

    @field_validator("secrets")
    @classmethod
    def _secrets_are_variables(cls, names: list[str]) -> list[str]:
        wrong = [name for name in names if not re.fullmatch(VARIABLE, name)]
        if wrong:
            raise FieldError(f"got {shortened(wrong[0])}; allowed: names of environment variables")
        return names

    @field_validator("resources")
    @classmethod
    def _resources_are_free(
        cls, resources: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        taken = [name for name in ("accelerators", "cpus", "image_id", "job_recovery") if name in resources]
        if taken:
            raise FieldError(f"got {taken[0]}, which abrun sets itself, from the recipe; leave it out")
        for value in resources.values():
            line_of_text(str(value))
        return resources
