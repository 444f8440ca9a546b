"""What `processes.start` runs first: ties the process to its parent's life, then becomes the command.

A preexec_fn would do this in a copy of a process whose other threads may hold locks, for good. Started as a
file by `python -IS`: it may import nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    number, parent, failures = map(int, sys.argv[1:4])
    command = sys.argv[4:]
    os.set_inheritable(failures, False)  # closes when the command begins: that says it has
    # A parent's handler is gone by now; an ignored or blocked signal would stay so for good.
    heard = {number} - {signal.SIGKILL}
    if os.getpgrp() == os.getpid():  # else SIGINT is meant for the parent's group, as by Ctrl-C
        heard |= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    for each in heard:
        signal.signal(each, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before
        os._exit(128 + number)
    with open("/proc/self/environ", "rb") as file:  # as it was given: Python adds LC_CTYPE to its own
        given = file.read().split(b"\0")
    environment = dict(each.split(b"=", 1) for each in given if b"=" in each)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(failures, str(error.errno).encode())


if __name__ == "__main__":
    main()
