"""The result of `abrun trace` in an experiment's folder, trace/trace.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from abrun.regular_files import exists
from abrun.runs.access import PUBLIC_MODE
from abrun.runs.files import decode_non_finite, read_json, write_json
from abrun.runs.schemas import Count, Items, checked

FOLDER, RESULT = "trace", "trace.json"
Size = Annotated[float, BeforeValidator(decode_non_finite), Field(strict=True, ge=0)]  # may be infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTensor:
    """The error of one tensor of the traced step."""

    name: str  # KIND:MODULE
    relative_error: Size  # norm of the difference over the baseline's norm
    ulps: Size  # largest difference in ULPs of the baseline's value
    ratio: Size  # error over the mean error of the baseline's perturbed repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrace:
    """The comparison of one step of two arms."""

    arm: str
    seed: Count
    step: Count
    configs: Mapping[str, Mapping[str, Any]]  # of both arms, as they were traced
    level: Size  # the probability with which clean arms differ in any tensor, at most
    limit: Size  # of the ratio
    tensors: Items[TracedTensor]  # in the order of execution

    @property
    def beyond(self) -> list[TracedTensor]:
        """Return the tensors that differ by more than rounding."""
        return [tensor for tensor in self.tensors if tensor.ratio > self.limit]


def write_trace(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the result of a trace, with the fields of StoredTrace at least."""
    write_json(folder / RESULT, content, mode=PUBLIC_MODE)


def read_trace(experiment_dir: Path) -> StoredTrace | None:
    """Return the result of an experiment's last trace, if any. Raises StoreError if it is damaged."""
    path = experiment_dir / FOLDER / RESULT
    return checked(StoredTrace, read_json(path), path) if exists(path) else None
