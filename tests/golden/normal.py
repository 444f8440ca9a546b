"""What a recording leaves out: paths, dates, hosts and versions of this machine; and how JSON is laid out."""

import datetime
import json
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

WIDTH = 120
MOST_NUMBERS = 12  # that a list is recorded with; a longer one as its figures
DIGITS = 8
MACHINE = re.compile(r"This machine \(.*?\) runs \d+ at once")
CLOCK = re.compile(r"^\d\d:\d\d:\d\d (?=[\w-]+/seed-)", re.M)
DURATION = re.compile(r"\d(?<=\W\d):\d\d(?=$| elapsed| ─)", re.M)
# Not printed of a run that ended at once, or between two looks
STARTED = re.compile(r"^HH:MM:SS \S+: (started, |step \d).*\n", re.M)
HASH_OF_PATHS = re.compile(r"(?<=-report-)[0-9a-f]{8}\b")


class Normaliser:
    """Replaces what differs between machines and days."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._words = {
            str(folder): "/FOLDER",
            str(root): "/ROOT",
            sys.executable: "PYTHON",
            os.path.realpath(sys.executable): "PYTHON",
        }
        now = datetime.datetime.now(datetime.UTC)
        days = "|".join((now + datetime.timedelta(days=days)).date().isoformat() for days in (-1, 0, 1))
        names = {socket.gethostname(), platform.node()}
        self._patterns = [
            (CLOCK, "HH:MM:SS "),
            (DURATION, "M:SS"),
            (HASH_OF_PATHS, "HASH"),
            (MACHINE, "This machine (DEVICES) runs N at once"),
            # Patterns that begin with text are searched for much faster than those with \b in front.
            (re.compile(rf"(?:{days})(?:[ T]\d\d:\d\d(?::\d\d)?(?:\.\d+)?)?"), "DATE"),
            (re.compile(r"DATE(?: to (?:DATE|\d\d:\d\d))? UTC; [^;`]*?Python [\d.]+"), "DATE UTC; MACHINE"),
            (re.compile(rf"abrun {re.escape(version('abrun'))}"), "abrun VERSION"),
        ]
        self._hosts = [
            (name, re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")) for name in names if len(name) > 5
        ]

    def text(self, text: str) -> str:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        for path, word in sorted(self._words.items(), key=lambda item: -len(item[0])):
            text = text.replace(path, word)
        for pattern, word in self._patterns:
            text = pattern.sub(word, text)
        for name, pattern in self._hosts:
            text = pattern.sub("HOST", text) if name in text else text
        return STARTED.sub("", text)


def json_text(content: Any) -> str:
    """JSON for readers of differences: short values in a line, long lists of numbers as their figures."""
    return _laid_out(_shortened(content), 0) + "\n"


def figures(values: Sequence[float | None]) -> dict[str, Any]:
    """What is recorded of a long list of numbers; None is a gap."""
    numbers = [value for value in values if value is not None]
    said: dict[str, Any] = {"length": len(values)}
    if len(numbers) < len(values):
        said["gaps"] = len(values) - len(numbers)
    if numbers:
        said |= {"first": numbers[0], "last": numbers[-1], "min": min(numbers), "max": max(numbers)}
        said["mean"] = math.fsum(numbers) / len(numbers)
    return said


def _shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _shortened(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > MOST_NUMBERS and all(item is None or is_number(item) for item in value):
        return _shortened(figures(value))
    return [_shortened(item) for item in value]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _laid_out(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_laid_out(item, depth + 1)}" for key, item in value.items()]
    else:
        items = [_laid_out(item, depth + 1) for item in value]
    lines = [items[0]]
    for item in items[1:]:
        is_short = "\n" not in lines[-1] + item and len(pad) + len(lines[-1]) + len(item) < WIDTH
        lines = (
            [*lines[:-1], f"{lines[-1]}, {item}"] if is_short and isinstance(value, dict) else [*lines, item]
        )
    body = ",\n".join(pad + line for line in lines)
    return f"{{\n{body}\n{pad[1:]}}}" if isinstance(value, dict) else f"[\n{body}\n{pad[1:]}]"
