"""One launcher at a time, and none for ever."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import StoreError
from abrun.runs import lock
from abrun.runs.lock import LOCK, Lease, LockedError, TakenOverError, describe_launcher, launcher_lock
from abrun.runs.owner import this_process_fields

HOLD = """
import sys, time
from pathlib import Path
from abrun.runs.lock import launcher_lock
with launcher_lock(Path(sys.argv[1])) as lease:
    print("held", flush=True)
    time.sleep(60)
"""
ELSEWHERE = {"pid": 1, "host": "elsewhere", "boot_id": "another", "token": "theirs"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REFRESH_EVERY_S", "FIRST_REFRESH_S"):
        monkeypatch.setattr(lock, name, 0.05)


def leave(directory: Path, owner: dict[str, Any]) -> None:
    """A lock as its owner left it."""
    (directory / LOCK).write_text(json.dumps(owner))


def taken(directory: Path, **options: Any) -> list[str]:
    """What is said while the lock is got, and given back."""
    said: list[str] = []
    with launcher_lock(directory, say=said.append, **options):
        pass
    return said


def took_over(owner: str, *, is_gone: bool = False, as_asked: bool = False) -> str:
    why = ", which has ended" if is_gone else " (--take-over)" if as_asked else ", which no longer renews it"
    return f"took over the lock of {owner}{why}"


@pytest.mark.parametrize("has_kernel_locks", [True, False])
def test_a_living_launcher_keeps_others_out_and_a_dead_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kernel_locks: bool
) -> None:
    if not has_kernel_locks:
        monkeypatch.setattr(lock, "_try_kernel_lock", lambda file: None)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        name = f"process {holder.pid} on host {socket.gethostname()}"
        for options in ({}, {"take_over": True}):  # which asks no living neighbour to go
            with pytest.raises(LockedError, match=f"{name} is already .* stop it with: kill {holder.pid}$"):
                taken(tmp_path, **options)
        assert describe_launcher(tmp_path) == name
    finally:
        holder.kill()
        holder.wait()
    assert describe_launcher(tmp_path) is None
    assert taken(tmp_path) == [took_over(name, is_gone=True)]
    assert taken(tmp_path) == []


@pytest.mark.parametrize(
    "other",
    [
        {"pid": os.getppid(), "boot_id": None},  # alive, but no launcher: an id that is used again
        {"pid": os.getppid(), "process_started": "1"},
        {"pid": os.getpid(), "pid_namespace": "pid:[1]", "host": "a-container-of-this-machine"},
    ],
)
def test_the_dead_of_this_machine_are_known_at_once(tmp_path: Path, other: dict[str, Any]) -> None:
    leave(tmp_path, {**this_process_fields(), "process_started": None, **other})
    host = other.get("host", socket.gethostname())
    assert taken(tmp_path) == [took_over(f"process {other['pid']} on host {host}", is_gone=True)]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"pid": "x"}', "\0" * 512])
def test_a_lock_file_of_a_writer_that_crashed_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    assert taken(tmp_path) == []


def test_a_lock_of_another_machine_holds_until_it_is_taken_over_or_no_longer_touched(
    tmp_path: Path, snapshot
) -> None:
    leave(tmp_path, ELSEWHERE)
    with snapshot.refused(LockedError):
        taken(tmp_path)
    assert describe_launcher(tmp_path) == "process 1 on host elsewhere"
    assert taken(tmp_path, take_over=True) == [took_over("process 1 on host elsewhere", as_asked=True)]
    leave(tmp_path, ELSEWHERE)
    os.utime(
        tmp_path / LOCK, (0, time.time() - lock.EXPIRES_AFTER_S - 1)
    )  # a container back under another name
    assert describe_launcher(tmp_path) is None
    assert taken(tmp_path) == [took_over("process 1 on host elsewhere")]


def test_who_is_taken_over_notices_at_its_next_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = Lease(tmp_path)
    with monkeypatch.context() as patch:  # as if on another machine, where the kernel's lock does not reach
        patch.setattr(
            lock, "this_process_fields", lambda: {**this_process_fields(), "host": "a", "boot_id": "a"}
        )
        older.acquire()
    with pytest.raises(LockedError, match="or take over with --take-over"):
        Lease(tmp_path).acquire()
    newer = Lease(tmp_path)
    note = newer.acquire(take_over=True)
    owner = f"process {os.getpid()} on host a"
    assert note == took_over(owner, as_asked=True)
    time.sleep(2 * lock.REFRESH_EVERY_S)
    owner = f"process {os.getpid()} on host {socket.gethostname()}"
    with pytest.raises(TakenOverError, match=f"{owner} has taken over, so this launcher stops its runs"):
        older.refresh()
    older.close()
    newer.refresh()
    assert describe_launcher(tmp_path)  # the older one has not given back what is the newer one's
    with pytest.raises(LockedError):
        taken(tmp_path)
    newer.close()
    assert taken(tmp_path) == []


def test_an_owner_touches_its_lock(tmp_path: Path) -> None:
    with launcher_lock(tmp_path) as lease:
        os.utime(tmp_path / LOCK, (0, 0))
        time.sleep(2 * lock.REFRESH_EVERY_S)
        lease.refresh()
        assert (tmp_path / LOCK).stat().st_mtime > 1e9
        (tmp_path / LOCK).unlink()  # by hand: nobody has it
        time.sleep(2 * lock.REFRESH_EVERY_S)
        lease.refresh()


def test_two_at_once_on_a_file_that_is_replaced_do_not_both_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the file open when another, with a full disk, removes it and a third makes it anew."""
    third, kernel_lock = Lease(tmp_path), lock._try_kernel_lock

    def late(file: int) -> bool | None:
        monkeypatch.setattr(lock, "_try_kernel_lock", kernel_lock)
        (tmp_path / LOCK).unlink()
        third.acquire()
        return kernel_lock(file)

    monkeypatch.setattr(lock, "_try_kernel_lock", late)
    with pytest.raises(LockedError):
        Lease(tmp_path).acquire()
    third.close()


def test_the_lock_is_released_when_the_launch_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), launcher_lock(tmp_path):
        raise ZeroDivisionError
    with launcher_lock(tmp_path), pytest.raises(LockedError), launcher_lock(tmp_path):
        pass
    assert taken(tmp_path) == []


def test_a_lock_that_is_no_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    assert describe_launcher(tmp_path) is None
    with pytest.raises(StoreError, match="cannot be written: not a regular file"):
        taken(tmp_path)
