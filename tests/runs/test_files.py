"""Files of the store: whole JSON, appended lines, torn lines, full disks."""

import errno
import math
import os
import resource
import signal
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.errors import StoreError
from abrun.runs.files import exists, is_directory, is_file, read_json, write_json
from abrun.runs.lines import LineReader, LineWriter, read_json_lines
from tests.snapshot import Snapshot


def test_json_and_lines_keep_nan_and_infinity(tmp_path: Path) -> None:
    row = {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1 + 0.2, "e": "text"}
    writer = LineWriter(tmp_path / "rows.jsonl")
    writer.write(row)
    writer.close()
    assert '"a": "NaN", "b": "Infinity", "c": "-Infinity"' in (tmp_path / "rows.jsonl").read_text()
    (read,) = read_json_lines(tmp_path / "rows.jsonl")
    assert math.isnan(read.pop("a")) and read == {key: row[key] for key in "bcde"} | {"step": 1}
    write_json(tmp_path / "x.json", {"nested": {"list": [math.nan, 1]}})
    assert read_json(tmp_path / "x.json") == {"nested": {"list": ["NaN", 1]}}


def test_a_torn_last_line_is_not_read_and_reopening_drops_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "tr')
    assert [row["step"] for row in read_json_lines(path)] == [1, 2]
    writer = LineWriter(path)
    writer.write({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "crc32": "d3a4e216"}\n'
    assert zlib.crc32(b'{"step": 3') == 0xD3A4E216


def test_two_writers_at_once_lose_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    older, newer, write = LineWriter(path), LineWriter(path), os.write

    def late(file: int, line: bytes) -> int:  # the newer attempt writes while the older is about to
        monkeypatch.setattr(os, "write", write)
        newer.write({"step": 1, "attempt": 2})
        return write(file, line)

    monkeypatch.setattr(os, "write", late)
    older.write({"step": 1, "attempt": 1})
    assert [row["attempt"] for row in read_json_lines(path)] == [2, 1]


@pytest.mark.parametrize(("content", "left"), [(b"", b""), (b"torn", b""), (b"a\n" + b"x" * 200_000, b"a\n")])
def test_reopening_looks_for_the_last_newline_however_far(
    tmp_path: Path, content: bytes, left: bytes
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    LineWriter(path).close()
    assert path.read_bytes() == left


def test_a_reader_follows_a_growing_file_without_reading_twice(tmp_path: Path, snapshot: Snapshot) -> None:
    path = tmp_path / "rows.jsonl"
    reader = LineReader(path)
    assert reader.read() == []
    with path.open("a", buffering=1) as file:
        file.write('{"step": 1}\n{"ste')
        assert reader.read() == [{"step": 1}]
        assert reader.read() == []
        file.write('p": 2}\n')
        assert reader.read() == [{"step": 2}]
        file.write("garbage\n")
    with snapshot.refused(StoreError):
        reader.read()


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the full disk: the kernel refuses to let a file grow."""
    write_json(tmp_path / "kept.json", {"old": True})
    writer = LineWriter(tmp_path / "rows.jsonl")
    writer.write({"step": 1})
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            for write in (
                lambda: write_json(tmp_path / "kept.json", {"new": "x" * 1000}),
                lambda: writer.write({"step": 2, "text": "x" * 1000}),
            ):
                with pytest.raises(StoreError, match="cannot be written: "):
                    write()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.close()
    assert read_json(tmp_path / "kept.json") == {"old": True}
    assert read_json_lines(tmp_path / "rows.jsonl") == [{"step": 1}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "rows.jsonl"]


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path, snapshot: Snapshot) -> None:
    (tmp_path / "a.json").write_text('{"half":')
    (tmp_path / "b.json").write_text("[]")
    for name in ("a.json", "b.json", "c.json"):
        with snapshot.refused(StoreError):
            read_json(tmp_path / name)
    with snapshot.refused(StoreError):
        write_json(tmp_path / "a.json" / "below.json", {})


def test_text_that_is_none_is_written_so_that_it_reads(tmp_path: Path) -> None:
    """Half a surrogate is how Python holds a byte of a path that is no UTF-8."""
    LineWriter(tmp_path / "rows.jsonl").write({"message": "caf\udce9", "\ud800": "Grüße"})
    assert read_json_lines(tmp_path / "rows.jsonl") == [{"message": "caf?", "?": "Grüße"}]


# --- whether a file is there ---


def test_files_and_folders_are_told_apart_from_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("file")
    assert [exists(tmp_path), is_file(tmp_path), is_directory(tmp_path)] == [True, False, True]
    assert [exists(file), is_file(file), is_directory(file)] == [True, True, False]
    assert is_file(tmp_path / "link") and not is_directory(tmp_path / "link")
    for absent in ("none", "none/deeper", "file/deeper", "loop", "a\0b"):
        assert not any(look(tmp_path / absent) for look in (exists, is_file, is_directory)), absent


@pytest.mark.parametrize("look", [exists, is_file, is_directory])
def test_what_cannot_be_seen_is_an_error(look: Callable[[Path], bool], tmp_path: Path) -> None:
    with pytest.raises(OSError) as refusal:
        look(tmp_path / ("x" * 300))
    assert refusal.value.errno == errno.ENAMETOOLONG
