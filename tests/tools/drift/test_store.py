"""Damaged ledgers of `abrun gate`: one line, exit code 2, and the file stays as it is."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.runs.lines import json_line, read_json_lines
from abrun.tools.drift.store import _lines_of, _linked, locked_store, read_state
from tests.tools.drift.test_gate import CLAIM, Typed, ask, start, typed, write_runs

ALL = pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
MISSING = object()
OTHER_VALUES = (
    *(MISSING, None, "x", "", "a\0\x1b[2J", -1, 0, 2, 10**30, 1e300, -0.5, True, float("nan")),
    *([], {}, [[]], {"a": {"b": [1]}}, "steps 9-2", "last 0%", "x" * 5000),
    *([1.5, 2.5], ["a", 3], [{"name": 1}], "2" * 400),
)


def paths_of(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each field; of a list only the first two items."""
    items = content.items() if isinstance(content, dict) else enumerate(content[:2])
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from paths_of(value, (*path, key))


def with_value(content: Any, path: tuple, value: Any) -> Any:
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if value is MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return content


def without_hashes(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("previous", "sha256")}


def chained(rows: list[dict[str, Any]]) -> bytes:
    """Return the content of a store of these rows, as somebody who forges the hashes would write it."""
    linked, previous = [], ""
    for row in rows:
        linked.append(_linked(row if isinstance(row, dict) else {"row": row}, previous))
        previous = linked[-1]["sha256"]
    return _lines_of(linked)


def assert_one_line(result: Typed, path: tuple, value: Any) -> None:
    if result.exit_code == 2:
        is_one_line = "\n" not in result.stderr.rstrip("\n") and "validation error" not in result.stderr
        assert is_one_line, (path, value, result.stderr)


def mutations(content: Any, num: int) -> list[tuple[tuple, Any]]:
    every = [(path, value) for path in paths_of(content) for value in OTHER_VALUES]
    return random.Random(1).sample(every, min(num, len(every)))


@pytest.mark.parametrize("num", [40, ALL])
def test_each_field_of_a_gate_with_another_value_is_at_most_one_line(tmp_path: Path, num: int) -> None:
    ledger = start(tmp_path)
    ask(ledger, write_runs(tmp_path / "other", [0.5, 0.49]))
    ask(ledger, write_runs(tmp_path / "better", [0.65, 0.66, 0.64, 0.67]))
    candidate = write_runs(tmp_path / "idea", [0.55, 0.52])
    rows = [without_hashes(row) for row in read_json_lines(ledger)[1:]]
    of_window = [((0, "window"), value) for value in OTHER_VALUES]
    refused = set()
    for path, value in [*of_window, *mutations(rows, num)]:
        content = chained(with_value(rows, path, value))
        ledger.write_bytes(content)
        result = typed(candidate, "--against", ledger)  # any exception but AbrunError fails there
        assert_one_line(result, path, value)
        if result.exit_code == 2:
            assert ledger.read_bytes() == content
            refused.add(path[-1])
    assert "window" in refused and len(refused) > min(num, 90) // 9


def test_an_edited_a_lost_and_a_torn_line_and_lines_without_checksums(tmp_path: Path) -> None:
    ledger = start(tmp_path)
    (tmp_path / "new").touch()
    assert ledger.stat().st_mode == (tmp_path / "new").stat().st_mode
    for name in ("a", "b", "c"):
        ask(ledger, write_runs(tmp_path / name, [0.5]))
    whole = ledger.read_bytes()
    head, *lines = whole.splitlines(keepends=True)
    rows = read_json_lines(ledger)
    rehashed = json_line({**rows[2], "outcome": "BETTER"})
    shorter = read_json_lines(ledger)[1:-1]
    problems = {
        "line 3: got": [head, lines[0], lines[1].replace(b'"outcome": "', b'"outcome": "X'), *lines[2:]],
        "line 3 was edited, or does not follow line 2": [head, lines[0], rehashed, *lines[2:]],
        "line 3 was edited": [head, lines[0], lines[2], lines[1], lines[3]],
        "has 3 of 4 lines: it was shortened": [head, *lines[:-1]],
        "has 3 of 4 lines: its last line is torn": [head, *lines[:-1], lines[-1][:50]],
        "has 5 of 4 lines": [head, *lines, lines[-1]],
        "its last line is not the one that was written": [
            json_line({**rows[0], "lines": 3}),
            *map(json_line, shorter),
        ],
    }
    for problem, content in problems.items():
        ledger.write_bytes(b"".join(content))
        for words in (("--against", ledger), (tmp_path / "a", "--against", ledger)):
            result = typed(*words)
            assert result.exit_code == 2 and problem in result.stderr, (problem, result.stderr)
        assert ledger.read_bytes() == b"".join(content)
    ledger.write_bytes(whole)
    assert [*read_state(ledger).candidates] == ["a", "b", "c"]


@pytest.mark.parametrize("content", [b'{"step": 1}\n{"step": 2', b"torn", b"\n\x00\xff", b"no newline"])
def test_a_file_that_is_no_ledger_keeps_its_last_line(tmp_path: Path, content: bytes) -> None:
    base, wrong = write_runs(tmp_path / "base", [0.5, 0.51, 0.52]), tmp_path / "wrong.jsonl"
    for options in ((), ("--start", "--claim", CLAIM)):
        wrong.write_bytes(content)
        assert typed(base, "--against", wrong, *options).exit_code == 2
        with pytest.raises(StoreError), locked_store(wrong):
            pass
        assert wrong.read_bytes() == content
