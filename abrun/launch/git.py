"""Calls git, and records the code of a launch: the commit of the working directory and its changes.

A repository may come from anyone, and its configuration names programs that git would start.
`git_environment` disables all of them for every call of git.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.runs.experiment import write_diff
from abrun.runs.redaction import redacted

MAX_CONFIGURATION_BYTES = 1 << 20
MAX_DIFF_BYTES = 1 << 18  # stored
MAX_HASHED_BYTES = 1 << 26
MAX_FILES = 20  # file names stored
MAX_NAMES_BYTES = 1 << 16
TIMEOUT_S = 20.0
GIT = ("git", "--no-pager")
STATUS = ("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty")
DIFF = (
    *("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short"),
    *("--ignore-submodules=dirty", "HEAD"),
)
# Disables the file monitor, hooks, signature checks, and submodules with their own configurations.
PROGRAMS_OFF = {
    "core.fsmonitor": "",
    "core.hookspath": "/dev/null",
    "log.showsignature": "false",
    "submodule.recurse": "false",
}
# Git neither writes an index nor fetches missing objects, which would start programs of a remote.
VARIABLES = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
FILTERS_AND_CHECK = r"^(filter\..*\.(clean|smudge|process|required)|core\.hookspath)$"
REPOSITORY_SCOPES = ("local", "worktree")  # scopes of `git config` that are not the user's


def record_checkout(experiment_dir: Path, *, diff: bool) -> dict[str, Any] | None:
    """Return the commit of the working directory and its changes, or None outside a git checkout.

    `dirty` is None if git takes too long to find out. `changes` is the start of a hash of the uncommitted
    changes to tracked files; `files` names those files and untracked ones. With `diff`, the changes are
    written into a file of the experiment, named after the hash. Raises StoreError if that file cannot be
    written.
    """
    environment = git_environment(Path.cwd())
    if environment is None:
        return None
    sha, _ = _read_output(100, environment, "rev-parse", "HEAD")
    status, status_cut_reason = _read_output(MAX_NAMES_BYTES, environment, *STATUS)
    if not sha or status is None:
        return None
    dirty = None if status_cut_reason and not status else bool(status)
    # With `-z`, an entry is two letters, a blank and a name. The last one may be truncated.
    names = [redacted(entry[3:]) for entry in status.decode(errors="replace").split("\0")[:-1]]
    content, cut_reason = _read_output(MAX_HASHED_BYTES, environment, *DIFF) if status else (None, None)
    # An incomplete diff has no hash, unless it is cut at the maximum size: that start is reproducible.
    hashed_content = content if cut_reason is None or len(content or b"") == MAX_HASHED_BYTES else None
    changes = hashlib.sha256(hashed_content).hexdigest()[:8] if hashed_content else None
    files = names[:MAX_FILES] + [f"and {len(names) - MAX_FILES} more"] * (len(names) > MAX_FILES)
    file = None
    if diff and changes and content:  # its start in whole lines, without secrets
        text = redacted(content[:MAX_DIFF_BYTES].decode(errors="replace"))
        if len(content) > MAX_DIFF_BYTES or cut_reason:
            text = f"{text.rpartition(chr(10))[0]}\n[cut here: the first {MAX_DIFF_BYTES} bytes of it]\n"
        file = write_diff(experiment_dir, changes, text)
    return {"sha": sha.decode().strip(), "dirty": dirty, "changes": changes, "files": files, "diff": file}


def git_environment(repo: Path) -> dict[str, str] | None:
    """Return the environment for calls of git in `repo`, or None if git does not read its configuration.

    Filters that the repository's configuration defines are disabled, or set as in the user's configuration.
    """
    environment = {**os.environ, **VARIABLES, **_configuration_variables(PROGRAMS_OFF)}
    query = ("config", "--null", "--show-scope", "--get-regexp", FILTERS_AND_CHECK)
    output, cut_reason = _read_output(MAX_CONFIGURATION_BYTES, environment, "-C", str(repo), *query)
    fields = os.fsdecode(output or b"").split("\0")
    pairs = zip(fields[::2], fields[1::2], strict=False)
    settings = [(scope, *text.partition("\n")) for scope, text in pairs]
    # Git before 2.31 ignores these variables.
    if cut_reason or ("command", "core.hookspath", "\n", "/dev/null") not in settings:
        return None
    user_settings, repository_keys = dict[str, str](), set[str]()
    for scope, key, equals, value in settings:
        if scope not in REPOSITORY_SCOPES:
            user_settings[key] = value if equals else "true"
        elif key not in PROGRAMS_OFF:
            repository_keys.add(key)
    filters = {
        key: user_settings.get(key, "false" if key.endswith(".required") else "")
        for key in sorted(repository_keys)
    }
    return {**environment, **_configuration_variables({**PROGRAMS_OFF, **filters})}


def git_output(repo: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git fails or is not installed."""
    environment = git_environment(repo)
    if environment is None:
        return None
    command = [*GIT, "-C", str(repo), *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    return process.stdout.strip() if process.returncode == 0 else None


def _configuration_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that add settings for git to those that are already there."""
    count = os.environ.get("GIT_CONFIG_COUNT", "")
    first_index = int(count) if count.isdecimal() else 0
    variables = {"GIT_CONFIG_COUNT": str(first_index + len(settings))}
    for index, (key, value) in enumerate(settings.items(), first_index):
        variables |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    return variables


def _read_output(
    max_bytes: int, environment: Mapping[str, str], *arguments: str
) -> tuple[bytes | None, str | None]:
    """Return the start of git's output and why it is incomplete; None if git fails or is not installed.

    Git is killed once it exceeds `max_bytes` or TIMEOUT_S: a diff can have any size.
    """
    try:
        process = subprocess.Popen(
            [*GIT, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None, None
    timed_out = threading.Event()

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including filters that it started

    def give_up() -> None:
        timed_out.set()
        end()

    timer = threading.Timer(TIMEOUT_S, give_up)
    timer.start()
    with process:
        assert process.stdout is not None
        content = process.stdout.read(max_bytes + 1)
        if len(content) > max_bytes:
            end()
    timer.cancel()
    if len(content) > max_bytes:
        return content[:max_bytes], f"the first {max_bytes} bytes of it"
    if timed_out.is_set():
        return content, f"git took over {TIMEOUT_S:.0f} s"
    return (content, None) if process.returncode == 0 else (None, None)
