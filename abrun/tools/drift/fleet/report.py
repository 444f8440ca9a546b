"""The fleet as text, on the terminal and as one HTML page with a row for each recipe."""

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from abrun.messages import sentence
from abrun.report.present.tables import Table, columns
from abrun.runs.redaction import display_safe
from abrun.stats.equivalence import ALPHA
from abrun.tools.drift.fleet.classify import STATUSES, Fleet, FleetRow, Status

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_NAMES = 5  # recipes named in the summary
_TERMINAL_COLORS: dict[Status, str] = {
    "regressed here": "red",
    "not judged": "magenta",
    "open": "yellow",
    "flaked": "cyan",
    "red before": "blue",
    "green": "green",
}
# Classes of page.css
_CHIPS: dict[Status, str] = {
    "regressed here": "bad",
    "not judged": "open",
    "open": "open",
    "flaked": "plain",
    "red before": "plain",
    "green": "good",
}
_TONES = {0: "MATCH", 3: "MISMATCH", 4: "INCONCLUSIVE", 5: "INVALID"}
_OTHERS: dict[Status, str] = {
    "red before": "{num} {past} red before",
    "flaked": "{num} flaked",
    "open": "{num} {verb} open",
    "not judged": "{num} could not be judged",
    "green": "{num} {verb} green",
}
_COLUMNS = ("recipe", "status", "why", "runs", "p", "FDR")


def summarize(fleet: Fleet) -> str:
    """Return the fleet in one sentence: how many recipes regressed here, and where all others stand."""
    names = [row.name for row in fleet.rows if row.status == "regressed here"]
    num_more = len(names) - _MAX_NAMES
    head = f"{len(names)} of {len(fleet.rows)} recipes" if names else "no recipe"
    others = [
        template.format(num=num, verb="is" if num == 1 else "are", past="was" if num == 1 else "were")
        for status, template in _OTHERS.items()
        if (num := fleet.counts[status]) or status == "green"
    ]
    text = f"{head} regressed here; {', '.join(others)}"
    named = ", ".join(names[:_MAX_NAMES] + [f"{num_more} more"] * (num_more > 0))
    return f"{text}. Look at {named}" if names else text


def render_terminal(fleet: Fleet, page: str | None) -> "RenderableType":
    """Return the summary, a table of the recipes that are not green, and where the page is."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    color = _TERMINAL_COLORS[fleet.rows[0].status]
    panel = Panel(
        Text(display_safe(summarize(fleet))),
        title=Text(f"Fleet of {len(fleet.rows)} recipes", style=f"bold {color}"),
        title_align="left",
        border_style=color,
    )
    rows = [row for row in fleet.rows if row.status != "green"]
    cells = [
        [
            row.name,
            Text(row.status, style=_TERMINAL_COLORS[row.status]),
            *_numbers(row),
            sentence(row.reason),
        ]
        for row in rows
    ]
    titles = ("recipe", "status", "runs", "p", "FDR", "why")
    table = Table(columns(*titles, no_wrap=("status", "runs", "p", "FDR"), fold=True), cells)
    parts: list[RenderableType] = [panel, *([table.to_rich(padding=(0, 1))] if rows else [])]
    parts.append(Text(display_safe(_describe_rule(fleet)), style="dim"))
    if page:
        parts.append(Text.assemble(("report  ", "bold"), page))
    return Group(*parts)


def _describe_rule(fleet: Fleet) -> str:
    return (
        f"p: of the recipe alone. FDR: smallest false discovery rate at which it is red, over "
        f"{fleet.num_tested} recipes that were not red before (Benjamini-Hochberg); red at {ALPHA:g}. "
        f"Runs that fail by accident, estimated from this fleet: {100 * fleet.failure_rate:.2g} %."
    )


def _numbers(row: FleetRow) -> list[str]:
    runs = f"{row.num_runs}+{row.num_rerun}" if row.num_rerun else str(row.num_runs)
    p_values = ["-" if value is None else f"{value:.2g}" for value in (row.p_value, row.adjusted_p)]
    return [runs if row.verdict else "-", *p_values]


def render_page(fleet: Fleet, command: str) -> str:
    """Return the HTML page: summary, counts and a row for each recipe, with a link to its report."""
    from abrun.report.page import render_static_page

    title = f"Fleet of {len(fleet.rows)} recipes"
    body = "\n".join(_page_parts(fleet, title, command))
    return render_static_page(f"{title}: {summarize(fleet)}", body)


def _page_parts(fleet: Fleet, title: str, command: str) -> Iterator[str]:
    yield f'<div class="banner {_TONES[fleet.exit_code]}"><h1>{_escape(title)}</h1>'
    yield f'<p class="finding">{_escape(summarize(fleet))}</p>'
    counts = (
        f"<div><dt>{_escape(status)}</dt><dd>{fleet.counts[status]}</dd></div>"
        for status in STATUSES
        if fleet.counts[status]
    )
    yield f'<dl class="facts">{"".join(counts)}</dl></div>'
    head = "".join(f"<th>{title}</th>" for title in _COLUMNS)
    rows = "\n".join(_page_row(row) for row in fleet.rows)
    yield f'<section><h2>Recipes</h2><p class="intro">{_escape(_describe_rule(fleet))}</p>'
    yield f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    yield f'<p class="caption">made by <code>{_escape(command)}</code></p></section>'


def _page_row(row: FleetRow) -> str:
    name = _escape(row.name)
    if row.report:
        name = f'<a href="{html.escape(quote(row.report.as_posix()))}">{name}</a>'
    cells = [
        name,
        f'<span class="chip {_CHIPS[row.status]}">{_escape(row.status)}</span>',
        _escape(sentence(row.reason)),
        *map(_escape, _numbers(row)),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _escape(text: str) -> str:
    return html.escape(display_safe(text))
