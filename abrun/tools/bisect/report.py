"""Terminal output of a bisection: its plan (`--dry-run`) and its result."""

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.report.present.tables import Table, columns
from abrun.stats.sequential import interim_level
from abrun.tools.bisect.command import Bisection, BisectionOutcome
from abrun.tools.bisect.search import Design

SHOWN = 40


def render_plan(bisection: Bisection) -> RenderableType:
    """Return candidates, tests, error rates and the maximum number of runs."""
    design, candidates = bisection.design, bisection.candidates
    last_index = len(candidates) - 1
    rows = [
        (
            "good" if index == 0 else "bad" if index == last_index else str(index),
            candidate.title,
            "baseline" if index == 0 else candidate.arm,
        )
        for index, candidate in enumerate(candidates)
        if index < SHOWN or index == last_index
    ]
    table = Table(columns("", "candidate", "arm", fold=True), rows)
    hidden = [f"{len(candidates) - SHOWN - 1} more are not shown"] if last_index > SHOWN else []
    lines = [
        *hidden,
        f"tests       good against its own reruns, bad against good, then at most {design.tests - 1} others",
        f"levels      {_levels(design)}",
        f"runs        at most {bisection.max_runs}, including the good candidate and its reruns",
    ]
    return Group(table, *map(Text, lines))


def render_outcome(bisection: Bisection, outcome: BisectionOutcome) -> RenderableType:
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
