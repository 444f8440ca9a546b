"""The text of `abrun reference show`: seeds, claims and ledger."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.diagnose.ledger.drift import ledger_state
from abrun.messages import sentence
from abrun.messages.numbers import bound_text, difference_text
from abrun.present.tables import Table, columns
from abrun.recipe.claims import describe_claim
from abrun.recorded.experiment import Reference
from abrun.recorded.ledger import Ledger
from abrun.redaction import printable
from abrun.report.evidence import describe_changes


def render_reference(reference: Reference) -> RenderableType:
    """Return what a reference holds: seeds, claims, and its ledger if it has one."""
    seeds = sorted({run.name.seed for run in reference.runs if not run.name.rerun})
    claims = [
        f"{claim.metric} over {claim.window}, {describe_claim(claim)}" for claim in reference.compare.claims
    ]
    head = Text(
        printable(
            f"{reference.name}: {len(seeds)} seeds ({', '.join(map(str, seeds))}); "
            f"claims: {'; '.join(claims) or 'none'}"
        )
    )
    if reference.ledger is None:
        return Group(head, Text("no ledger of accepted changes: abrun reference save --budget starts one"))
    return Group(head, *_ledger_lines(reference, reference.ledger))


def _ledger_lines(reference: Reference, ledger: Ledger) -> Iterator[RenderableType]:
    """Yield the entries as a table, then the ledger's state."""
    rows = []
    for number, entry in enumerate(ledger.entries, 1):
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
    if rows:
        yield Table(columns(*titles, fold=True), rows)
    yield Text(printable(sentence(ledger_state(reference))), style="bold")
