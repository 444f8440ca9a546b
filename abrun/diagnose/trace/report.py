"""Terminal output of a trace."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.diagnose.trace.judge import JudgedTensor, TraceResult
from abrun.present.tables import Table, columns

COLUMNS = ("tensor", "relative error", "ULPs", "times a replica's", "")
NEIGHBOURS = 3  # rows shown before and after the first difference


def summary(result: TraceResult) -> RenderableType:
    """Return what the trace found, and the tensors around it: without a difference, the largest errors."""
    rows = [_row(result, judged) for judged in _shown(result)]
    table = Table(columns(*COLUMNS, numeric=COLUMNS[1:4]), rows)
    return Group(Text("\n".join(_headlines(result))), table.to_rich(pad_edge=True))


def _headlines(result: TraceResult) -> Iterator[str]:
    first, last = result.first, result.last_agreeing
    of = f"step {result.step}, {len(result.tensors)} tensors"
    if first is None:
        yield f"{of}: the arms agree up to rounding"
    else:
        yield f"{of}: the arms first differ in {first.tensor.name}"
        before = "nothing before it is compared" if last is None else f"up to {last.tensor.name} they agree"
        yield f"{before}; {len(result.beyond)} tensors differ"
    yield (
        f"limit: {result.limit:.3g} times the mean error of {result.num_replicas} replicas perturbed by one "
        f"ULP; arms without a difference pass it with a probability of {result.level:.1%} at most"
    )
    if result.missing:
        yield f"not compared, because one arm lacks them: {', '.join(result.missing)}"


def _shown(result: TraceResult) -> list[JudgedTensor]:
    tensors = list(result.tensors)
    if result.first is None:
        largest = sorted(tensors, key=lambda judged: judged.ratio, reverse=True)[: 2 * NEIGHBOURS]
        return [judged for judged in tensors if judged in largest]
    index = tensors.index(result.first)
    return tensors[max(index - NEIGHBOURS, 0) : index + NEIGHBOURS + 1]


def _row(result: TraceResult, judged: JudgedTensor) -> tuple[str, ...]:
    values = (judged.relative, judged.ulps, judged.ratio)
    mark = "<- first" if judged is result.first else "differs" if judged.ratio > result.limit else ""
    return judged.tensor.name, *(f"{value:.2g}" for value in values), mark
