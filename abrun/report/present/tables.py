"""Tables as data, rendered for a terminal, as Markdown or as HTML."""

import html
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from abrun.runs.redaction import display_safe

if TYPE_CHECKING:
    import rich.table
    from rich.text import Text
import re

# A string is shown without secrets and control characters, a Text as it is.
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
    """Columns and rows. On a terminal a titled table has borders, and one without columns is a plain grid."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    sections: Collection[int] = ()  # indices of rows with a line above

    def to_rich(self, **layout: Any) -> "rich.table.Table":
        """Return a rich table; `layout` overrides its arguments. If it expands, columns are equally wide."""
        from rich.table import Table as RichTable

        titled = {"title": display_safe(self.title), "title_justify": "left"}
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
        return self.to_rich()

    def to_markdown(self, escape: Callable[[str], str] = escape_markdown) -> list[str]:
        """Return the lines of a Markdown table."""
        titles = [column.title for column in self.columns]
        lines = [titles, ["---"] * len(titles), *self.rows]
        return [f"| {' | '.join(escape(str(cell)) for cell in line)} |" for line in lines]

    def to_html(self) -> str:
        """Return an HTML table. Cells of non-numeric columns have the class `text`."""
        body = "".join(self._to_html_row("td", row) for row in self.rows)
        head = self._to_html_row("th", [column.title for column in self.columns])
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _to_html_row(self, tag: str, cells: Sequence[Cell]) -> str:
        marked = (
            f"<{tag}{'' if column.numeric else ' class=text'}>{html.escape(display_safe(str(cell)))}</{tag}>"
            for column, cell in zip(self.columns, cells, strict=True)
        )
        return f"<tr>{''.join(marked)}</tr>"


def _text(cell: Cell) -> "Text":
    from rich.text import Text

    return Text(display_safe(cell)) if isinstance(cell, str) else cell
