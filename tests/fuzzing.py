"""What all fuzz tests share: how much, from which seed, what is done to bytes, and what may come of it.

ABRUN_FUZZ_SEED=$RANDOM ABRUN_FUZZ_ROUNDS=20000 pytest -m slow -k fuzz
"""

import contextlib
import os
import random
import signal
from collections.abc import Iterator

from abrun.errors import AbrunError

SEED = os.environ.get("ABRUN_FUZZ_SEED", "abrun")
MOST_S = 5.0  # of work that one input may make
WORDS = (
    *(b"\0", b'"', b"\n", b"\r", b",", b"{", b"\xff", b"\x1b[31m", "\u2028".encode(), b"\\ud800", b"step"),
    *(b"NaN", b"null", b"true", b"inf", b"1e999", b"-1", b"1_0", b"9" * 30, b"9" * 5000),
    *(b"[" * 2000, b'{"a":' * 900),
)
SIZES = (0, 1, 7, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def rounds(usual: int) -> int:
    return int(os.environ.get("ABRUN_FUZZ_ROUNDS", usual))


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Some bytes turned into others, a bit at a time or many, or gone, or there twice; or the end cut off."""
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if not changed:
            break
        at = draw.randrange(len(changed))
        match draw.randrange(8):
            case 0 | 1 | 2:
                changed[at] ^= 1 << draw.randrange(8)
            case 3:
                del changed[at : at + draw.randint(1, 50)]
            case 4:
                changed[at:at] = changed[at : at + draw.randint(1, 300)]
            case 5:
                width = draw.choice([2, 4, 8])
                size = draw.choice(SIZES) % (1 << 8 * width)
                changed[at : at + width] = size.to_bytes(width, draw.choice(["little", "big"]))
            case 6:
                changed[at:at] = draw.choice(WORDS)
            case 7:
                del changed[at:]
    return bytes(changed)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """TimeoutError after MOST_S of work, or six times as long of waiting."""

    def end(*_: object) -> None:
        raise TimeoutError(f"over {MOST_S} s")

    before = {kind: signal.signal(kind, end) for kind in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    signal.setitimer(signal.ITIMER_REAL, 6 * MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


def check_line(error: AbrunError) -> None:
    """A refusal is one line that a terminal takes."""
    line = str(error)
    assert line and line.isprintable() and len(line) < 1500, line
