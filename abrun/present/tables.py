"""A table as data, rendered from the same object for a terminal, in Markdown and as HTML."""

import html
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from abrun.present.markdown import escaped
from abrun.redaction import shown

if TYPE_CHECKING:
    import rich.table
    from rich.text import Text

Cell: TypeAlias = "str | Text"  # a string is shown without secrets and controls; Text as it is
PLAIN = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, "header_style": "bold"}
GRID = PLAIN | {"padding": (0, 2), "collapse_padding": True, "show_header": False, "show_edge": False}


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and how the cells below it stand."""

    title: Cell
    numeric: bool = False  # at the right
    no_wrap: bool = False
    fold: bool = False  # a word that is longer than the column goes on in the next line; else it is cut


def columns(
    *titles: Cell, numeric: Collection[Cell] = (), no_wrap: Collection[Cell] = (), fold: bool = False
) -> list[Column]:
    """Return a column for each title; `numeric` and `no_wrap`: the titles of which this is true."""
    return [Column(title, title in numeric, title in no_wrap, fold) for title in titles]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows. A terminal draws lines around a table with a title; without columns it is a grid."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    sections: Collection[int] = ()  # rows below a line

    def rich(self, **layout: Any) -> "rich.table.Table":
        """Return rich's table; `layout` replaces its arguments. If it expands, columns are equally wide."""
        from rich.table import Table as RichTable

        titled = {"title": shown(self.title), "title_justify": "left"}
        look: dict[str, Any] = titled if self.title else PLAIN if self.columns else GRID
        table = RichTable(**(look | layout))
        for column in self.columns:
            table.add_column(
                _text(column.title),
                justify="right" if column.numeric else "left",
                no_wrap=column.no_wrap,
                overflow="fold" if column.fold else "ellipsis",
                ratio=1 if table.expand else None,
            )
        for index, row in enumerate(self.rows):
            if index in self.sections:
                table.add_section()
            table.add_row(*map(_text, row))
        return table

    def __rich__(self) -> "rich.table.Table":
        return self.rich()

    def markdown(self, escape: Callable[[str], str] = escaped) -> list[str]:
        """Return the lines of a Markdown table."""
        titles = [column.title for column in self.columns]
        lines = [titles, ["---"] * len(titles), *self.rows]
        return [f"| {' | '.join(escape(str(cell)) for cell in line)} |" for line in lines]

    def html(self) -> str:
        """Return an HTML table; cells of text, not numbers, have the class `text`."""
        body = "".join(self._html_row("td", row) for row in self.rows)
        head = self._html_row("th", [column.title for column in self.columns])
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _html_row(self, tag: str, cells: Sequence[Cell]) -> str:
        marked = (
            f"<{tag}{'' if column.numeric else ' class=text'}>{html.escape(shown(str(cell)))}</{tag}>"
            for column, cell in zip(self.columns, cells, strict=True)
        )
        return f"<tr>{''.join(marked)}</tr>"


def _text(cell: Cell) -> "Text":
    from rich.text import Text

    return Text(shown(cell)) if isinstance(cell, str) else cell
