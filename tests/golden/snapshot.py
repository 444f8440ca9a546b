"""Recordings on disk, and what a new one differs from them in."""

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.normal import is_number
from tests.golden.recorder import PAGE_CODE, RECORDED

RELATIVE, ABSOLUTE = 1e-6, 1e-12  # what numbers in JSON may differ by: versions of numpy and scipy do


def write_recording(name: str, recording: dict[str, str]) -> None:
    """Replace what is recorded of a case."""
    folder = RECORDED / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for file, text in recording.items():
        _path(name, file).write_text(text, encoding="utf-8")


def differences(name: str, recording: dict[str, str], *, allow_added: bool = False) -> list[str]:
    """Lines that say what a recording differs in from what is recorded; none: in nothing.

    With `allow_added`, keys that JSON has gained are no difference.
    """
    folder = RECORDED / name
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    lines = [f"{file}: no longer written" for file in sorted(there - recording.keys())]
    for file, text in recording.items():
        path = _path(name, file)
        if not path.is_file():
            lines.append(f"{file}: not recorded")
        elif file.endswith(".json"):
            recorded = json.loads(path.read_text(encoding="utf-8"))
            added, changed = json_differences(recorded, json.loads(text))
            lines += [f"{file}: {line}" for line in changed]
            lines += [] if allow_added else [f"{file}: added {line}" for line in added]
        else:
            lines += _text_differences(file, path.read_text(encoding="utf-8"), text)
    return lines


def json_differences(before: Any, after: Any, place: str = "") -> tuple[list[str], list[str]]:
    """The keys that JSON has gained, and what else changed in it."""
    if isinstance(before, dict) and isinstance(after, dict):
        added = [f"{place}.{key}: {_short(after[key])}" for key in after if key not in before]
        changed = [f"{place}.{key}: removed {_short(before[key])}" for key in before if key not in after]
        inside = [(before[key], after[key], f"{place}.{key}") for key in before if key in after]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        added, changed = [], []
        inside = [(*items, f"{place}[{i}]") for i, items in enumerate(zip(before, after, strict=True))]
    else:
        return [], [] if _equal(before, after) else [f"{place}: {_short(before)} -> {_short(after)}"]
    for item in inside:
        more_added, more_changed = json_differences(*item)
        added, changed = added + more_added, changed + more_changed
    return added, changed


def _equal(before: Any, after: Any) -> bool:
    if is_number(before) and is_number(after):
        return math.isclose(before, after, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(before) is type(after) and before == after


def _text_differences(file: str, before: str, after: str) -> Iterator[str]:
    yield from difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"recorded {file}", f"now {file}", lineterm="", n=1
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _path(name: str, file: str) -> Path:
    return RECORDED / file if file == PAGE_CODE else RECORDED / name / file
