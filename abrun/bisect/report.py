"""A bisection in words: what it would do (`--dry-run`), and what it found."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from abrun.bisect.command import AGAIN, Bisection, Outcome
from abrun.bisect.search import Design
from abrun.looks import level_of_a_look

SHOWN = 40


def planned(bisection: Bisection) -> RenderableType:
    """Candidates, tests, levels and the most runs there can be."""
    design, candidates = bisection.design, bisection.candidates
    table = _table("", "candidate", "arm")
    last = len(candidates) - 1
    for index, candidate in enumerate(candidates):
        if index < SHOWN or index == last:
            role = "good" if index == 0 else "bad" if index == last else str(index)
            table.add_row(role, Text(candidate.title), "baseline" if index == 0 else candidate.arm)
    hidden = [f"{len(candidates) - SHOWN - 1} more are not shown"] if last > SHOWN else []
    lines = [
        *hidden,
        f"tests       good against its own reruns, bad against good, then at most {design.tests - 1} between",
        f"levels      {_levels(design)}",
        f"runs        at most {bisection.most_runs}, good and its reruns among them",
    ]
    return Group(table, *map(Text, lines))


def shown(outcome: Outcome) -> RenderableType:
    """Every test in its order, then the result."""
    titles = {candidate.arm: candidate.title for candidate in outcome.candidates}
    titles[AGAIN] = "good against itself"
    table = _table("candidate", "answer", "pairs", "why")
    for test in outcome.tests:
        table.add_row(Text(titles[test.candidate]), test.answer, str(test.num_pairs), Text(test.reason))
    return Group(table, Text(outcome.sentence, style="bold"))


def text_of(outcome: Outcome) -> str:
    """The same as plain text, for a file."""
    titles = {candidate.arm: candidate.title for candidate in outcome.candidates}
    titles[AGAIN] = "good against itself"
    lines = [
        f"{titles[test.candidate]}\n  {test.answer} ({test.num_pairs} pairs): {test.reason}"
        for test in outcome.tests
    ]
    return "\n".join([outcome.sentence, "", f"Levels: {_levels(outcome.design)}", "", *lines]) + "\n"


def _levels(design: Design) -> str:
    pairs = ", ".join(map(str, design.counts))
    looks = len(design.counts)
    spread = f", {level_of_a_look(design.counts, design.level):.3g} a look" if looks > 1 else ""
    return (
        f"{design.alpha:g} for the whole search, {design.level:.3g} a candidate (of at most {design.tests})"
        f"{spread}; after {pairs} pairs"
    )


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
