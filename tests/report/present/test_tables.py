"""A table for the terminal, in Markdown and as HTML: the same cells, none of them read as more than text."""

import io
import re
from html import unescape

from rich.text import Text

from abrun.report.present.tables import Table, columns
from abrun.report.present.terminal import Terminal

HOSTILE = ("[red]x[/red]", "a|b", "<b>", "\x1b[31m")


def printed(table: Table, width: int = 80) -> list[str]:
    file = io.StringIO()
    Terminal(file=file, width=width, highlight=False).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_numbers_stand_at_the_right() -> None:
    table = Table(columns("arm", "runs", numeric=("runs",)), [("baseline", "5"), ("b", Text("12"))])
    assert printed(table) == ["arm       runs", "baseline     5", "b           12"]
    assert table.to_markdown() == ["| arm | runs |", "| --- | --- |", "| baseline | 5 |", "| b | 12 |"]


def test_a_titled_table_looks_like_any_other() -> None:
    lines = printed(Table(columns("amount"), [("1",), ("2",)], "title"))
    assert lines == ["title", "amount", "1", "2"]


def test_columns_of_an_expanded_table_are_equally_wide() -> None:
    (heading,) = Table(columns("a", "b"), []).to_rich(expand=True).columns[:1]
    assert heading.ratio == 1


def test_a_long_word_is_folded_or_cut() -> None:
    row = ("word" * 5,)
    assert printed(Table(columns("a", fold=True), [row]), 10) == ["a", "wordwordwo", "rdwordword"]
    assert printed(Table(columns("a"), [row]), 10) == ["a", "wordwordw…"]


def test_no_cell_is_markup() -> None:
    table = Table(columns(*HOSTILE), [HOSTILE])
    shown = ("[red]x[/red]", "a|b", "<b>", "\\x1b[31m")
    for line in printed(table):
        assert tuple(line.split()) == shown
    cells = re.findall(r"<t[hd] class=text>([^<]*)</t[hd]>", table.to_html())
    assert tuple(map(unescape, cells)) == shown * 2


def test_markdown_has_one_cell_for_each_column() -> None:
    head, _, row = Table(columns(*HOSTILE), [HOSTILE]).to_markdown()
    assert head == row
    assert row.replace(r"\|", "").count("|") == len(HOSTILE) + 1
    assert "\x1b" not in row
