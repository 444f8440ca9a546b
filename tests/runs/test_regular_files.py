"""Whether a file is there: what cannot be seen is an error, whatever pathlib says in this Python."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from abrun.runs.files import exists, is_directory, is_file


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
