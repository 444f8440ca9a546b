"""The text of a gate's ledger."""

import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.messages import sentence
from abrun.messages.codes import Code, Reason
from abrun.messages.numbers import difference_text
from abrun.report.present.tables import Table, columns
from abrun.runs.redaction import printable
from abrun.stats.online import lord_level
from abrun.tools.drift.gate.ledger import State


def render_state(state: State) -> RenderableType:
    """Return the last answer about each candidate as a table, then the state."""
    rows = [
        (
            datetime.datetime.fromtimestamp(answer.time_s, datetime.UTC).date().isoformat(),
            answer.candidate.name,
            answer.outcome,
            str(len(answer.candidate.values)),
            answer.incumbent,
            difference_text(answer.improvement, answer.interval),
            f"{answer.level:.2g}",
        )
        for answer in state.candidates.values()
    ]
    titles = ("date", "candidate", "answer", "seeds", "incumbent", "improvement [90 % CI]", "level")
    head = Text(printable(sentence(state_reason(state))), style="bold")
    return Group(Table(columns(*titles, numeric=("seeds",), fold=True), rows), head) if rows else head


def state_reason(state: State) -> Reason:
    start = state.start
    return Code.GATE_STATE(
        metric=start.metric,
        first=start.first_step,
        last=start.last_step,
        higher=start.higher_is_better,
        num_candidates=len(state.candidates),
        num_discoveries=len(state.discoveries),
        incumbent=state.incumbent.name,
        num_runs=len(state.incumbent.values),
        level=lord_level(len(state.candidates) + 1, state.discoveries, start.alpha),
    )
