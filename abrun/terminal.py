"""The way to the user's terminal: whatever is printed there moves no cursor and sets no colour but ours."""

import os
import sys
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


class Terminal(Console):
    """A console that shows control characters in texts as `?`: those that style and place are rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                kept = (char if char.isprintable() or char == "\n" else "?" for char in segment.text)
                yield Segment("".join(kept), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled; rich would end the process."""
        raise


def terminal(file: IO[str] | None = None) -> Terminal:
    """Return a console that prints to `file`, or to what sys.stdout is by then."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Terminal(file=file, highlight=False, width=None if fixed else 120)
