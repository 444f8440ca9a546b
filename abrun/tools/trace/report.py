"""Terminal output of a trace."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.report.present.tables import Table, columns
from abrun.runs.traces import TracedTensor, TraceResult

COLUMNS = ("tensor", "relative error", "ULPs")
NEIGHBOURS = 3  # rows shown before and after the first difference
MAX_MISSING = 6  # names of tensors that one arm lacks


def summary(result: TraceResult) -> RenderableType:
    """Return what the trace found, and the tensors around it: without a difference, the largest errors."""
    rows = [_row(result, tensor) for tensor in _shown(result)]
    titles = (*COLUMNS[:3], "times a replica's" if result.num_replicas else "times one ULP", "")
    table = Table(columns(*titles, numeric=titles[1:4]), rows)
    return Group(Text("\n".join(_headlines(result))), table.to_rich(pad_edge=True))


def _headlines(result: TraceResult) -> Iterator[str]:
    first, last = result.first, result.last_agreeing
    of = f"step {result.step}, {len(result.tensors)} tensors"
    if result.limit is None:
        yield from _unjudged(result, of)
    elif first is None:
        yield f"{of}: the arms agree up to rounding"
    else:
        yield f"{of}: the arms first differ in {first.name}"
        before = "nothing before it is compared" if last is None else f"up to {last.name} they agree"
        yield f"{before}; {len(result.beyond)} tensors differ"
    if result.limit is not None:
        plural = "s" * (result.num_replicas > 1)
        yield (
            f"limit: {result.limit:.3g} times the mean error of {result.num_replicas} repeat{plural} of the "
            "baseline, perturbed by one ULP or run again; arms that agree exceed it with a "
            f"probability of at most {100 * result.level:.2g} %"
        )
    if result.first is None and result.least_sensitive:
        sizes = (f"{tensor.detectable_error:.2g} in {tensor.name}" for tensor in result.least_sensitive)
        yield (
            "smallest relative errors that would have been flagged, at the least sensitive tensors: "
            + ", ".join(sizes)
        )
    if result.first is None and result.zero:
        yield (
            f"zero in the baseline: {len(result.zero)} tensors, the first is {result.zero[0].name}; an error "
            "that only scales them does not show; use --step to trace a step whose rewards differ"
        )
    if result.missing:
        shown, omitted = result.missing[:MAX_MISSING], len(result.missing) - MAX_MISSING
        more = f" and {omitted} more" if omitted > 0 else ""
        yield f"not compared, because one arm lacks them: {', '.join(shown)}{more}"


def _unjudged(result: TraceResult, of: str) -> Iterator[str]:
    """Yield what can be said without a repeat of the baseline."""
    changed = [tensor for tensor in result.tensors if tensor.ulps]
    if not changed:
        yield f"{of}: bit-identical"
        return
    yield f"{of}: {len(changed)} are not bit-identical, the first is {changed[0].name}"
    yield "no verdict: only a repeat of the baseline tells rounding from a difference; dump one and add it"
    yield "the largest relative errors, in the order of execution:"


def _shown(result: TraceResult) -> list[TracedTensor]:
    tensors = list(result.tensors)
    if result.first is None:
        size = "relative_error" if result.limit is None else "ratio"
        largest = sorted(tensors, key=lambda tensor: getattr(tensor, size), reverse=True)[: 2 * NEIGHBOURS]
        return [tensor for tensor in tensors if tensor in largest]
    index = tensors.index(result.first)
    return tensors[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]


def _row(result: TraceResult, tensor: TracedTensor) -> tuple[str, ...]:
    values = (tensor.relative_error, tensor.ulps, tensor.ratio)
    mark = "<- first" if tensor is result.first else "differs" if tensor in result.beyond else ""
    return tensor.name, *(f"{value:.2g}" for value in values), mark
