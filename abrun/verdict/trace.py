"""The first tensor in which one step of two arms differs, as `abrun trace` found it. It judges nothing."""

from dataclasses import asdict, replace

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code
from abrun.runs.redaction import display_safe
from abrun.runs.traces import StoredTrace
from abrun.verdict.evidence import Evidence

NEIGHBOURS = 3  # tensors kept before and after the first difference


def describe_trace(experiment: RecordedExperiment) -> list[Evidence]:
    """Return the result of the experiment's last trace; empty if there is none of these arms."""
    stored = experiment.trace
    if not isinstance(stored, StoredTrace) or stored.arm not in experiment.treatments:
        return []
    tensors = [replace(tensor, name=display_safe(tensor.name)) for tensor in stored.tensors]
    beyond = [index for index, tensor in enumerate(tensors) if tensor.ratio > stored.limit]
    sizes = {"step": stored.step, "seed": stored.seed, "num_tensors": len(tensors)}
    if beyond:
        index = beyond[0]
        first, last_agreeing = tensors[index], tensors[index - 1].name if index else None
        shown = tensors[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]
        reason = Code.TRACE_DIFFERS(
            **sizes,
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
            **sizes, detectable_error=stored.detectable_error, num_zero=len(stored.zero)
        )
    values = {
        **sizes,
        "level": stored.level,  # the probability with which clean arms differ in any tensor, at most
        "limit": stored.limit,  # of a tensor's ratio
        "num_beyond": len(beyond),  # tensors beyond the limit
        "first": first and first.name,  # of them, in the order of execution: forward, backward, update
        "last_agreeing": last_agreeing,  # the tensor before the first
        # Around the first difference; without one, those of the largest ratios
        "tensors": [asdict(tensor) for tensor in shown],
    }
    result = "differs" if beyond else "agrees"
    return [Evidence(kind="trace", arm=stored.arm, result=result, reason=reason, values=values)]
