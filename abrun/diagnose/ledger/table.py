"""The table of a reference's ledger, for `abrun ledger`."""

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.diagnose.ledger.drift import ledger_state
from abrun.messages import sentence
from abrun.messages.numbers import bound_text, difference_text
from abrun.present.tables import Table, columns
from abrun.recorded.experiment import Reference
from abrun.redaction import printable
from abrun.report.evidence import describe_changes


def render_ledger(reference: Reference) -> RenderableType:
    """Return the entries as a table, then the ledger's state. The reference must have a ledger."""
    assert reference.ledger is not None
    rows = []
    for number, entry in enumerate(reference.ledger.entries, 1):
        changed = [
            *describe_changes(entry.treatment),
            *([f"not judged: {entry.moved}"] if entry.moved else []),
        ]
        cells = (
            str(number),
            entry.date[:10],
            f"{entry.experiment}, {entry.arm}",
            "; ".join(changed),
            (entry.commit or "-")[:9],
            difference_text(entry.difference, entry.interval),
            bound_text(entry.drift),
        )
        rows.append(cells)
    titles = ("", "date", "experiment", "what changed", "commit", "difference [90 % CI]", "drift then")
    state = Text(printable(sentence(ledger_state(reference))), style="bold")
    return Group(Table(columns(*titles, fold=True), rows), state) if rows else state
