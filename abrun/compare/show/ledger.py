"""A reference's ledger as a table: `abrun ledger`."""

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.compare.judge.ledger import ledger_sentence
from abrun.compare.read.experiment import Reference
from abrun.present.tables import Table, columns
from abrun.redaction import in_yaml, printable


def ledger_shown(reference: Reference) -> RenderableType:
    """The sentence, then a row for each entry. The reference has a ledger."""
    assert reference.ledger is not None
    rows = []
    for number, entry in enumerate(reference.ledger.entries, 1):
        changes = [f"{key}: {in_yaml(old)} -> {in_yaml(new)}" for key, (old, new) in entry.treatment.items()]
        changes += [f"not judged: {entry.moved}"] if entry.moved else []
        low, high = entry.interval
        cells = (
            str(number),
            entry.date[:10],
            f"{entry.experiment}, {entry.arm}",
            "; ".join(changes),
            (entry.commit or "-")[:9],
            f"{entry.difference:+.3g} [{low:.3g}, {high:.3g}]",
            f"{entry.drift:.3g}",
        )
        rows.append(cells)
    titles = ("", "date", "experiment", "what changed", "commit", "difference [90 %]", "drift then")
    sentence = Text(printable(ledger_sentence(reference)), style="bold")
    return Group(Table(columns(*titles, fold=True), rows), sentence) if rows else sentence
