"""The console that abrun prints to. Printed text cannot move the cursor or set styles."""

import os
import sys
from collections.abc import Callable, Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Drawn characters, for an encoding that may lack them
PLAIN_DRAWING = str.maketrans("─━▒●▁▂▃▄▅▆▇█", "-=:o__..--=#")


class Terminal(Console):
    """A console that prints strings literally, without markup, emoji codes or highlighting.

    Styled output is passed as `Text`. Control characters in text are printed as `?`; rich's own control
    segments pass.
    """

    def render_str(
        self, text: str, *, style: Any = "", justify: Any = None, overflow: Any = None, **_: Any
    ) -> Text:
        return Text(text, style=style, justify=justify, overflow=overflow)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        is_plain = not self.encoding.startswith("utf")
        for segment in super().render(renderable, options):
            if is_plain and not segment.control:
                segment = Segment(segment.text.translate(PLAIN_DRAWING), segment.style)
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                printable = (char if char.isprintable() or char == "\n" else "?" for char in segment.text)
                yield Segment("".join(printable), segment.style)

    before_print: Callable[[], None] = staticmethod(lambda: None)

    def print(self, *objects: Any, **options: Any) -> None:
        self.before_print()
        super().print(*objects, **options)

    def say(self, line: str) -> None:
        """Print a line without wrapping it; the terminal does that."""
        self.print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Re-raise the BrokenPipeError being handled; rich would end the process."""
        raise


def terminal(file: IO[str] | None = None) -> Terminal:
    """Return a console that prints to `file`, or to sys.stdout as it is at the time of printing."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Terminal(file=file, highlight=False, width=None if has_width else 120)
