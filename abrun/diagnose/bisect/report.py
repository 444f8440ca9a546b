"""A bisection in words: what it would do (`--dry-run`), and what it found."""

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.diagnose.bisect.command import Bisection, Outcome
from abrun.diagnose.bisect.search import Design
from abrun.present.tables import Table, columns
from abrun.stats.sequential import interim_level

SHOWN = 40


def planned(bisection: Bisection) -> RenderableType:
    """Candidates, tests, levels and the most runs there can be."""
    design, candidates = bisection.design, bisection.candidates
    last = len(candidates) - 1
    rows = [
        (
            "good" if index == 0 else "bad" if index == last else str(index),
            candidate.title,
            "baseline" if index == 0 else candidate.arm,
        )
        for index, candidate in enumerate(candidates)
        if index < SHOWN or index == last
    ]
    table = Table(columns("", "candidate", "arm", fold=True), rows)
    hidden = [f"{len(candidates) - SHOWN - 1} more are not shown"] if last > SHOWN else []
    lines = [
        *hidden,
        f"tests       good against its own reruns, bad against good, then at most {design.tests - 1} between",
        f"levels      {_levels(design)}",
        f"runs        at most {bisection.most_runs}, good and its reruns among them",
    ]
    return Group(table, *map(Text, lines))


def shown(bisection: Bisection, outcome: Outcome) -> RenderableType:
    """Return every test in its order, then the result."""
    titles = bisection.titles
    rows = [(titles[test.candidate], test.answer, str(test.num_pairs), test.reason) for test in outcome.tests]
    table = Table(columns("candidate", "answer", "pairs", "why", fold=True), rows)
    return Group(table, Text(outcome.sentence, style="bold"))


def _levels(design: Design) -> str:
    pairs = ", ".join(map(str, design.counts))
    num_analyses = len(design.counts)
    spread = (
        f", {interim_level(design.counts, design.level):.3g} an interim analysis" if num_analyses > 1 else ""
    )
    return (
        f"{design.alpha:g} for the whole search, {design.level:.3g} a candidate (of at most {design.tests})"
        f"{spread}; after {pairs} pairs"
    )
