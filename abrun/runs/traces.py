"""The result of `abrun trace`: errors of a step's tensors; an experiment has it in trace/trace.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from abrun.runs.files import PUBLIC_MODE, decode_non_finite, exists, read_json, write_json
from abrun.runs.schemas import Count, Items, checked

FOLDER, RESULT = "trace", "trace.json"
Size = Annotated[float, BeforeValidator(decode_non_finite), Field(strict=True, ge=0)]  # may be infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTensor:
    """The error of one tensor of the traced step."""

    name: str  # KIND:MODULE, see abrun.runs.captures
    relative_error: Size  # norm of the difference over the baseline's norm
    ulps: Size  # largest difference in ULPs of the baseline's value
    ratio: Size  # error over the replicas' mean error, the larger of both measures
    detectable_error: Size | None = None  # smallest beyond the limit; infinite for zeros

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def module(self) -> str:
        return self.name.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """The comparison of one step of two arms."""

    step: Count
    num_replicas: Count
    limit: Size  # of the ratio
    tensors: Items[TracedTensor]  # in the order of execution
    missing: Items[str]  # names of tensors that only one of the arms has

    @property
    def level(self) -> float:
        """Return the probability with which clean arms differ in any tensor, at most."""
        return 1 / (self.num_replicas + 1)

    @property
    def beyond(self) -> tuple[TracedTensor, ...]:
        """Return the tensors that differ by more than rounding."""
        return tuple(tensor for tensor in self.tensors if tensor.ratio > self.limit)

    @property
    def first(self) -> TracedTensor | None:
        return next(iter(self.beyond), None)

    @property
    def last_agreeing(self) -> TracedTensor | None:
        """Return the tensor before the first difference, if there are both."""
        if self.first is None:
            return None
        index = self.tensors.index(self.first)
        return self.tensors[index - 1] if index else None

    @property
    def zero(self) -> tuple[TracedTensor, ...]:
        """Return the tensors that are zero in the baseline, in which an error of scale cannot show."""
        return tuple(tensor for tensor in self.tensors if tensor.detectable_error == math.inf)

    @property
    def least_sensitive(self) -> tuple[TracedTensor, ...]:
        """Return the tensor of each kind whose smallest detectable error is largest."""
        largest: dict[str, tuple[float, TracedTensor]] = {}
        for tensor in self.tensors:
            size = tensor.detectable_error
            if size is not None and math.isfinite(size) and size > largest.get(tensor.kind, (0.0,))[0]:
                largest[tensor.kind] = size, tensor
        return tuple(tensor for _, tensor in largest.values())

    @property
    def detectable_error(self) -> float | None:
        """Return the smallest relative error that would have been flagged in every tensor, if known."""
        sizes = (tensor.detectable_error for tensor in self.least_sensitive)
        return max((size for size in sizes if size is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "level": self.level,
            "agrees": self.first is None,
            "first": self.first and self.first.name,
            "last_agreeing": self.last_agreeing and self.last_agreeing.name,
            "num_beyond": len(self.beyond),
            "detectable_error": self.detectable_error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrace(TraceResult):
    """A trace of an experiment's arms."""

    arm: str
    seed: Count
    configs: Mapping[str, Mapping[str, Any]]  # of both arms, as they were traced

    @property
    def is_in_float32(self) -> bool:
        return any(config["policy"]["dtype"] == "float32" for config in self.configs.values())


Stored = TypeVar("Stored", bound=TraceResult)


def write_trace(folder: Path, trace: TraceResult) -> None:
    write_json(folder / RESULT, trace.as_json(), mode=PUBLIC_MODE)


def read_trace(folder: Path, kind: type[Stored]) -> Stored | None:
    """Return the result in the folder of a trace, if any. Raises StoreError if it is damaged."""
    path = folder / RESULT
    return checked(kind, read_json(path), path) if exists(path) else None
