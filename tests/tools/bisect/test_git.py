"""Repositories of any origin: git executes nothing that their configuration names, and tells the truth."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from abrun.launch.git import git_environment, git_output, record_checkout
from abrun.tools.bisect import candidates


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity for commits, and an empty configuration of the user."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "user.gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "somebody")
        monkeypatch.setenv(f"{name}_EMAIL", "somebody@example.org")


def run_git(*arguments: str | Path) -> str:
    command = ["git", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder: Path) -> Path:
    folder.mkdir()
    run_git("init", "-q", folder)
    (folder / "code.py").write_text("lr = 1\n")
    run_git("-C", folder, "add", ".")
    run_git("-C", folder, "commit", "-qm", "first")
    return folder


def programs(tmp_path: Path, name: str, end: str = "exit 1") -> str:
    """A program that leaves a file behind where it is executed."""
    path = tmp_path / f"{name}.sh"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/EXECUTED-{name}\n{end}\n")
    path.chmod(0o755)
    return str(path)


def executed(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("EXECUTED-*"))


def touch(path: Path) -> None:
    """Change the time stamp of a file, so that git has to read it."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


def arm(folder: Path, tmp_path: Path) -> None:
    """Name a program wherever the configuration of a repository can name one."""
    included, hooks = folder / ".git" / "more", tmp_path / "hooks"
    hooks.mkdir()
    Path(programs(tmp_path, "hook", "exit 0")).rename(hooks / "post-index-change")
    (hooks / "post-checkout").symlink_to(hooks / "post-index-change")
    settings = {
        "core.fsmonitor": programs(tmp_path, "monitor"),
        "core.hooksPath": str(hooks),
        "core.pager": programs(tmp_path, "pager", "cat"),
        "core.editor": programs(tmp_path, "editor"),
        "core.sshCommand": programs(tmp_path, "ssh"),
        "core.alternateRefsCommand": programs(tmp_path, "refs"),
        "credential.helper": programs(tmp_path, "credentials"),
        "diff.external": programs(tmp_path, "external"),
        "diff.d.textconv": programs(tmp_path, "textconv", "cat"),
        "diff.d.command": programs(tmp_path, "driver"),
        "diff.submodule": "diff",
        "filter.f.clean": programs(tmp_path, "clean", "cat"),
        "filter.f.smudge": programs(tmp_path, "smudge", "cat"),
        "filter.f.required": "true",
        "filter.a=b.clean": programs(tmp_path, "equals", "cat"),
        "gpg.program": programs(tmp_path, "gpg"),
        "log.showSignature": "true",
        "status.submoduleSummary": "true",
        "include.path": str(included),
    }
    for key, value in settings.items():
        run_git("config", "--file", folder / ".git" / "config", key, value)
    run_git("config", "--file", included, "filter.p.process", programs(tmp_path, "process"))
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "attributes").write_text(
        "* diff=d\ncode.py filter=f\nother.py filter=p\nthird.py filter=a=b\n"
    )


def test_nothing_of_a_repository_is_executed(tmp_path, monkeypatch) -> None:
    folder = repository(tmp_path / "stranger")
    inner = repository(folder / "inner")
    for name in ("other.py", "third.py"):
        (folder / name).write_text("x = 1\n")
    run_git("-C", folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", "./inner", "inner")
    run_git("-C", folder, "add", "other.py", "third.py")
    run_git("-C", folder, "commit", "-qm", "second")
    first, last = run_git("-C", folder, "rev-list", "--reverse", "HEAD").split()
    monkeypatch.chdir(folder)
    expected = {"sha": last, "dirty": False, "changes": None, "files": [], "diff": None}
    assert record_checkout(tmp_path, diff=True) == expected
    arm(folder, tmp_path)
    for name in ("core.fsmonitor", "filter.f.clean"):  # a submodule has a configuration of its own
        run_git("config", "--file", inner / ".git" / "config", name, programs(tmp_path, "submodule", "cat"))
    (inner / ".git" / "info" / "attributes").write_text("* filter=f\n")
    for path in (folder / "code.py", folder / "other.py", folder / "third.py", inner / "code.py"):
        touch(path)
    index = (folder / ".git" / "index").read_bytes()
    assert record_checkout(tmp_path, diff=True) == expected  # time stamps are no changes
    assert (folder / ".git" / "index").read_bytes() == index
    for path in (folder / "code.py", folder / "other.py", folder / "third.py", inner / "code.py"):
        path.write_text("lr = 2\n")
    state = record_checkout(tmp_path, diff=True)
    assert state and state["dirty"] and (tmp_path / state["diff"]).read_text().count("+lr = 2") == 3
    assert len(candidates.commits(folder, first, last)) == 2
    checkout = tmp_path / "checkout"
    assert git_output(folder, "worktree", "add", "--detach", str(checkout), first) is not None
    assert (checkout / "code.py").read_text() == "lr = 1\n"
    assert executed(tmp_path) == []


def test_a_missing_object_is_not_fetched(tmp_path, monkeypatch) -> None:
    """A partial clone asks its remote for what it lacks, by programs that its configuration names."""
    folder = repository(tmp_path / "stranger")
    remote = repository(tmp_path / "remote")
    blob = run_git("-C", folder, "rev-parse", "HEAD:code.py")
    (folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": str(remote),
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": programs(tmp_path, "uploadpack"),
        "protocol.allow": "always",
        "protocol.file.allow": "always",
    }
    for key, value in settings.items():
        run_git("config", "--file", folder / ".git" / "config", key, value)
    (folder / "code.py").write_text("lr = 2\n")
    monkeypatch.chdir(folder)
    state = record_checkout(tmp_path, diff=True)
    assert state and state["dirty"] and state["diff"] is None
    assert executed(tmp_path) == []


@pytest.mark.parametrize("defined_again", [False, True])
def test_a_filter_of_the_user_works(tmp_path, monkeypatch, defined_again: bool) -> None:
    """As git-lfs is installed: the repository has one text, the folder another."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")  # what the environment says already stays
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "filter.f.smudge")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "sed s/1/10/")
    run_git("config", "--global", "filter.f.clean", "sed s/10/1/")
    run_git("config", "--global", "filter.f.required", "true")
    folder = tmp_path / "checkout"
    folder.mkdir()
    run_git("init", "-q", folder)
    (folder / ".gitattributes").write_text("code.py filter=f\n")
    (folder / "code.py").write_text("lr = 10\n")
    run_git("-C", folder, "add", ".")
    run_git("-C", folder, "commit", "-qm", "first")
    assert run_git("-C", folder, "show", "HEAD:code.py") == "lr = 1"
    if defined_again:
        path = folder / ".git" / "config"
        run_git("config", "--file", path, "filter.f.clean", programs(tmp_path, "clean", "cat"))
        run_git("config", "--file", path, "filter.f.smudge", programs(tmp_path, "smudge", "cat"))
    touch(folder / "code.py")
    monkeypatch.chdir(folder)
    state = record_checkout(tmp_path, diff=True)
    assert state and state["dirty"] is False
    git_output(folder, "worktree", "add", "--detach", str(tmp_path / "other"), "HEAD")
    assert (tmp_path / "other" / "code.py").read_text() == "lr = 10\n"
    assert executed(tmp_path) == []


@pytest.mark.parametrize("script", ["exit 129", "printf 'local\\0filter.f.clean\\ncat\\0'", "yes"])
def test_a_git_that_takes_no_settings_is_not_asked_further(tmp_path, monkeypatch, script: str) -> None:
    """Of a version before 2.31, the filters could not be turned off."""
    old: Any = tmp_path / "bin" / "git"
    old.parent.mkdir()
    old.write_text(f'#!/bin/sh\ncase "$*" in *config*) {script};; *) touch {tmp_path}/EXECUTED-git;; esac\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}:{os.environ['PATH']}")
    assert git_environment(tmp_path) is None
    assert record_checkout(tmp_path, diff=True) is None
    assert git_output(tmp_path, "rev-parse", "HEAD") is None
    assert executed(tmp_path) == []
