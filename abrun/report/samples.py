"""Completions on a terminal: of one run, or of two runs side by side."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from abrun.present.tables import Table, columns
from abrun.recorded.samples import SamplePair
from abrun.redaction import shown
from abrun.runs.samples import Sample

if TYPE_CHECKING:
    from rich.console import RenderableType


def samples_shown(names: Sequence[str], pairs: Sequence[SamplePair]) -> "RenderableType":
    """`names`: of the runs, one or two."""
    return Group(*_parts(names, pairs))


def _parts(names: Sequence[str], pairs: Sequence[SamplePair]) -> Iterator["RenderableType"]:
    for pair in pairs:
        yield Text(f"step {pair.step}: {_one_line(pair.prompt)}", style="bold")
        both = (pair.left, pair.right)[: len(names)]
        rows = [
            [Text("not kept" if one is None else _lines(one.text)) for one in both],
            [Text("" if one is None else _facts(one), style="dim") for one in both],
        ]
        yield Table(columns(*names, fold=True), rows).rich(padding=(0, 1), expand=len(names) > 1)
        yield Text("")


def _facts(one: Sample) -> str:
    parts = [
        "reward unknown" if one.reward is None else f"reward {one.reward:.3g}",
        "" if one.logprob_error is None else f"log-prob error {one.logprob_error:.2g}",
        "" if one.num_tokens is None else f"{one.num_tokens} tokens",
        "truncated" if one.truncated else "",
    ]
    return ", ".join(filter(None, parts))


def _lines(text: str) -> str:
    return "\n".join(shown(line) for line in text.splitlines())


def _one_line(text: str) -> str:
    return shown(" ".join(text.split()))
