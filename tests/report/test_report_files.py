"""A report appears whole or not at all, heals where it was damaged, and leaves a read-only store as it is."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from abrun.errors import ComparisonError
from abrun.logs.recorded.sources import ReadingOptions
from abrun.report.comparing import compare_sources
from tests.verdict.simulate import write_experiment

# What a read-only mount does, whoever asks: an audit hook sees all that opens or changes a file.
READ_ONLY = """
import errno, os, sys
store = sys.argv.pop(1)
def refuse(event, arguments):
    writes = {"os." + name for name in "mkdir rename remove rmdir chmod truncate link symlink".split()}
    if event == "open":
        path, mode, flags = arguments
        changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    elif event in writes:
        path, changes = arguments[0], True
    else:
        return
    if changes and isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(store):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
sys.addaudithook(refuse)
from abrun.cli import main
main()
"""


@pytest.fixture
def experiment_dir(tmp_path: Path) -> Path:
    return write_experiment(tmp_path / "runs" / "demo", steps=12)


def compare(experiment_dir: Path, *formats: str) -> dict[str, bytes]:
    wanted = formats or ("html", "png", "markdown")
    compared = compare_sources(
        [str(experiment_dir)], ReadingOptions(), output=experiment_dir / "report", formats=wanted
    )
    return {path.name: path.read_bytes() for path in compared.files}


def test_a_damaged_report_heals(experiment_dir: Path) -> None:
    whole, report = compare(experiment_dir), experiment_dir / "report"
    for damage in (lambda content: content[: len(content) // 2], lambda content: b"x" + content[1:], None):
        for name, content in whole.items():
            (report / name).unlink()
            if damage:
                (report / name).write_bytes(damage(content))
        assert compare(experiment_dir) == whole
        assert {path.name: path.read_bytes() for path in report.iterdir()} == whole


def test_a_report_that_came_along_is_never_believed(experiment_dir: Path, tmp_path: Path) -> None:
    whole = compare(experiment_dir, "html", "png", "svg", "markdown", "json")
    folder = experiment_dir / "report"
    for name in whole:
        (folder / name).write_bytes(b"<script>alert(1)</script> forged")
    for stray in ("evil.js", "figures/x.svg", "claims.svg", "index.html"):
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_text("<script>alert(1)</script>")
    again = compare(experiment_dir, "html", "png", "svg", "markdown", "json")
    assert again == whole
    for name, content in again.items():
        assert not any(
            stray in content for stray in (b"evil.js", b"figures/", b"claims.svg", b"index.html")
        ), name


def test_nothing_is_written_through_a_hard_link_or_a_linked_folder(
    experiment_dir: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("not ours")
    (experiment_dir / "report").mkdir()
    os.link(mine, experiment_dir / "report" / "report.html")
    compare(experiment_dir, "html")
    assert mine.read_text() == "not ours"
    shutil.rmtree(experiment_dir / "report")
    (experiment_dir / "report").symlink_to(tmp_path)
    with pytest.raises(ComparisonError, match="/report: is a symbolic link; remove it"):
        compare(experiment_dir, "html")
    assert not (tmp_path / "report.html").exists()
    compare_sources([str(experiment_dir)], ReadingOptions(), formats=("html",), output=tmp_path / "mine")
    assert (tmp_path / "mine" / "report.html").exists()


def test_a_folder_in_the_place_of_a_file_is_one_line(experiment_dir: Path) -> None:
    (experiment_dir / "report" / "report.html").mkdir(parents=True)
    with pytest.raises(ComparisonError, match=r"^--output: .*Is a directory; choose another folder$"):
        compare(experiment_dir, "html")


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_report_before(experiment_dir: Path, monkeypatch, failing: str) -> None:
    before = compare(experiment_dir)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("png", "html", "markdown") if failing == "write" else ("html", "markdown"):
        with monkeypatch.context() as patched:
            patched.setattr(os, failing, fail)
            with pytest.raises(ComparisonError, match=f"^--output: .*{os.strerror(errno.ENOSPC)}"):
                compare(experiment_dir, name)
        for path, content in before.items():
            assert (experiment_dir / "report" / path).read_bytes() == content
    assert not [path for path in (experiment_dir / "report").iterdir() if path.name.endswith(".partial")]


def test_the_report_of_a_shared_experiment_is_shared(experiment_dir: Path) -> None:
    for path in (experiment_dir, *experiment_dir.rglob("*")):
        path.chmod(0o750 if path.is_dir() else 0o640)
    before = os.umask(0o077)
    try:
        compare(experiment_dir)
    finally:
        os.umask(before)
    assert (experiment_dir / "report").stat().st_mode & 0o077 == 0o050
    assert {path.stat().st_mode & 0o077 for path in (experiment_dir / "report").iterdir()} == {0o040}


def test_no_link_is_followed(experiment_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours")
    (experiment_dir / "report").mkdir()
    (experiment_dir / "report" / "report.html").symlink_to(elsewhere)
    with pytest.raises(ComparisonError, match="symbolic link"):
        compare(experiment_dir, "html")
    assert elsewhere.read_text() == "not ours"


@pytest.mark.slow
def test_a_read_only_store_is_compared_elsewhere(experiment_dir: Path, tmp_path: Path) -> None:
    def entries() -> dict[str, tuple[int, int]]:
        found = sorted((tmp_path / "runs").rglob("*"))
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = entries()

    def abrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", READ_ONLY, str(tmp_path / "runs"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for output in ([], ["--output", str(tmp_path / "report")]):
        done = abrun("compare", str(experiment_dir), *output)
        assert (done.returncode, done.stderr) == (0, "")
    assert {"verdict.json", "report.html"} < {path.name for path in (tmp_path / "report").iterdir()}
    done = abrun("compare", str(experiment_dir), "--output", str(experiment_dir / "report"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert os.strerror(errno.EROFS) in done.stderr
    assert abrun("status", str(experiment_dir)).returncode == 0
    assert entries() == before
