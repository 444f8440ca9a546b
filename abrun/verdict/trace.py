"""The first tensor in which one step of two arms differs, as `abrun trace` found it. It judges nothing."""

from dataclasses import dataclass, replace

from abrun.reasons import Code, Reason
from abrun.recorded.experiment import RecordedExperiment
from abrun.redaction import display_safe
from abrun.runs.traces import StoredTrace, TracedTensor

NEIGHBOURS = 3  # tensors kept before and after the first difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step of both arms on the same rollouts, tensor by tensor."""

    arm: str
    step: int
    seed: int
    level: float  # the probability with which clean arms differ in any tensor, at most
    limit: float  # of a tensor's ratio
    num_tensors: int
    num_beyond: int  # tensors beyond the limit
    first: str | None  # the first of them in the order of execution: forward, backward, update
    last_agreeing: str | None  # the tensor before the first
    tensors: list[TracedTensor]  # around the first difference; without one, those of the largest ratios
    reason: Reason


def describe_trace(experiment: RecordedExperiment) -> Trace | None:
    """Return the result of the experiment's last trace; None if there is none of these arms."""
    stored = experiment.trace
    if not isinstance(stored, StoredTrace) or stored.arm not in experiment.treatments or stored.limit is None:
        return None
    tensors = [replace(tensor, name=display_safe(tensor.name)) for tensor in stored.tensors]
    beyond = [index for index, tensor in enumerate(tensors) if tensor.ratio > stored.limit]
    values = {"step": stored.step, "seed": stored.seed, "num_tensors": len(tensors)}
    if beyond:
        index = beyond[0]
        first, last_agreeing = tensors[index], tensors[index - 1].name if index else None
        shown = tensors[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]
        reason = Code.TRACE_DIFFERS(
            **values,
            first=first.name,
            relative_error=first.relative_error,
            ulps=first.ulps,
            last_agreeing=last_agreeing,
            num_beyond=len(beyond),
        )
    else:
        first, last_agreeing = None, None
        shown = sorted(tensors, key=lambda tensor: tensor.ratio, reverse=True)[:NEIGHBOURS]
        reason = Code.TRACE_AGREES(
            **values, detectable_error=stored.detectable_error, num_zero=len(stored.zero)
        )
    return Trace(
        arm=stored.arm,
        step=stored.step,
        seed=stored.seed,
        level=stored.level,
        limit=stored.limit,
        num_tensors=len(tensors),
        num_beyond=len(beyond),
        first=first and first.name,
        last_agreeing=last_agreeing,
        tensors=shown,
        reason=reason,
    )
