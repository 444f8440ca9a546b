"""Tables as data, rendered for a terminal, as Markdown or as HTML."""

import html
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from abrun.runs.redaction import display_safe

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console, ConsoleOptions
    from rich.text import Text
import re

# A string is shown without secrets and control characters, a Text as it is.
MAX_WIDTH = 10_000  # of a terminal
Cell: TypeAlias = "str | Text"
PLAIN = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False, "header_style": "bold"}
GRID = PLAIN | {"padding": (0, 2), "collapse_padding": True, "show_header": False, "show_edge": False}


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and the layout of the cells below it."""

    title: Cell
    numeric: bool = False  # right-aligned
    no_wrap: bool = False
    fold: bool = False  # break a word that is wider than the column, instead of cutting it


def columns(
    *titles: Cell, numeric: Collection[Cell] = (), no_wrap: Collection[Cell] = (), fold: bool = False
) -> list[Column]:
    """Return a column for each title. `numeric` and `no_wrap` list the titles that these apply to."""
    return [Column(title, title in numeric, title in no_wrap, fold) for title in titles]


def escape_markdown(text: str) -> str:
    """Escape characters that Markdown, or HTML within it, would interpret."""
    marks_escaped = re.sub(r"([\\`*<>|&]|\](?=[(\[:])|:(?=//)|(?<=www)\.)", r"\\\1", display_safe(text))
    return re.sub(r"(?<=\S)@(?=\S)", r"\\@", marks_escaped)


def code_span(text: str) -> str:
    """Return `text` as inline code, or escaped if it holds a backtick."""
    return escape_markdown(text) if "`" in text else f"`{display_safe(text)}`"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows. On a terminal a table without columns is a plain grid.

    A terminal that is too narrow shows it without the `optional` columns, the first of them first, so that
    numbers stay on one line.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    optional: Sequence[str] = ()  # titles of columns

    def to_rich(self, **layout: Any) -> "rich.table.Table":
        """Return a rich table; `layout` overrides its arguments. If it expands, columns are equally wide."""
        from rich.table import Table as RichTable

        look: dict[str, Any] = PLAIN if self.columns else GRID
        if self.title:
            look = look | {"title": display_safe(self.title), "title_justify": "left"}
        table = RichTable(**(look | layout))
        num_cells = len(self.rows[0]) if self.rows else 0
        for column in self.columns or [Column("", fold=True)] * num_cells:
            table.add_column(
                _text(column.title),
                justify="right" if column.numeric else "left",
                no_wrap=column.no_wrap,
                overflow="fold" if column.fold else "ellipsis",
                ratio=1 if table.expand else None,
            )
        for row in self.rows:
            table.add_row(*map(_text, row))
        return table

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[rich.table.Table]":
        table, unbounded = self, options.update(max_width=MAX_WIDTH)
        for title in self.optional:
            if console.measure(table.to_rich(), options=unbounded).maximum > options.max_width:
                table = table.without(title)
        yield table.to_rich()

    def without(self, title: str) -> "Table":
        """Return the table without the columns of this title."""
        indices = [index for index, column in enumerate(self.columns) if str(column.title) != title]
        rows = [[row[index] for index in indices] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in indices], rows=rows)

    def cut_to(self, width: int) -> "Table":
        """Return the table with the text of its last column cut, so that a terminal shows a line a row."""
        widths = zip(*[[str(cell) for cell in row[:-1]] for row in (self._titles, *self.rows)], strict=True)
        room = max(10, width - sum(max(map(len, cells)) + 2 for cells in widths))
        rows = [[*row[:-1], _cut(str(row[-1]), room)] for row in self.rows]
        return replace(self, rows=rows)

    @property
    def _titles(self) -> list[Cell]:
        return [column.title for column in self.columns]

    def to_markdown(self, escape: Callable[[str], str] = escape_markdown) -> list[str]:
        """Return the lines of a Markdown table."""
        lines = [self._titles, ["---"] * len(self.columns), *self.rows]
        return [f"| {' | '.join(escape(str(cell)) for cell in line)} |" for line in lines]

    def to_html(self) -> str:
        """Return an HTML table. Cells of non-numeric columns have the class `text`."""
        body = "".join(self._to_html_row("td", row) for row in self.rows)
        head = self._to_html_row("th", self._titles)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _to_html_row(self, tag: str, cells: Sequence[Cell]) -> str:
        marked = (
            f"<{tag}{'' if column.numeric else ' class=text'}>{html.escape(display_safe(str(cell)))}</{tag}>"
            for column, cell in zip(self.columns, cells, strict=True)
        )
        return f"<tr>{''.join(marked)}</tr>"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 4].rpartition(' ')[0]} ..."


def _text(cell: Cell) -> "Text":
    from rich.text import Text

    return Text(display_safe(cell)) if isinstance(cell, str) else cell
