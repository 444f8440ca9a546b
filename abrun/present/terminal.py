"""The way to the user's terminal: whatever is printed there moves no cursor and sets no style but ours."""

import os
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


class Terminal(Console):
    """A console that prints strings as they are: no markup, emoji code or highlight in them is read.

    Styles come as `Text`. Control characters in texts are shown as `?`: rich's own style and place.
    """

    def render_str(
        self, text: str, *, style: Any = "", justify: Any = None, overflow: Any = None, **_: Any
    ) -> Text:
        return Text(text, style=style, justify=justify, overflow=overflow)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                kept = (char if char.isprintable() or char == "\n" else "?" for char in segment.text)
                yield Segment("".join(kept), segment.style)

    def say(self, line: str) -> None:
        """Print a line that is as long as it is: the terminal wraps it."""
        self.print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled; rich would end the process."""
        raise


def terminal(file: IO[str] | None = None) -> Terminal:
    """Return a console that prints to `file`, or to what sys.stdout is by then."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Terminal(file=file, highlight=False, width=None if fixed else 120)
