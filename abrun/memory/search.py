"""The longest sequence, or the largest microbatch, that trains: few tries, each in processes of its own."""

import math
from collections.abc import Callable, Mapping, Sequence

from abrun.memory.cells import Cell, Longest

RESOLUTION = 32  # the answer is known to one part in so many
LEAST = 16  # tokens: where as few do not fit, nothing does
SPARE = 0.97  # of the memory: what a straight line through a phase's peaks may fill, at first


def search(
    measured: Sequence[Cell],
    what: str,
    tried: Callable[[int], Cell],
    *,
    unit: int = 1,
    most: int | None = None,
) -> Longest:
    """The largest size of `what` that fits; `tried` measures one more cell, `measured` are of the same line.

    A phase's peak is nearly a straight line over either size, so that the next size to try follows from two
    of each phase; the highest of all phases is none, as short sequences peak in the optimizer. Each further
    miss in the same direction doubles the step. A multiple of `unit`, and `most` at most.
    """
    cells = {getattr(cell.point, what): cell for cell in measured}
    misses = 0
    while True:
        fitting = sorted(size for size, cell in cells.items() if not cell.out_of_memory)
        low = fitting[-1] if fitting else 0
        high = min((size for size, cell in cells.items() if cell.out_of_memory), default=None)
        size = next_size(
            [(one, cells[one].by_phase) for one in fitting[-2:]],
            low,
            high,
            capacity=cells[max(cells)].total_bytes,
            unit=unit,
            least=LEAST if what == "length" else unit,
            step=2**misses,
            most=most,
        )
        if size is None:
            return Longest(
                arm=measured[0].arm,
                swept=measured[0].point.swept,
                what=what,
                fits=low or None,
                fails=high,
                failed_in=cells[high].out_of_memory if high else None,
            )
        cell = cells[size] = tried(size)
        # Towards the same side as the last one: the line was wrong that way
        same = (high is not None and cell.out_of_memory) or (high is None and not cell.out_of_memory)
        misses = misses + 1 if same else 0


def next_size(
    fitting: Sequence[tuple[int, Mapping[str, int]]],  # at most two: (size, peak bytes by phase), ascending
    low: int,  # the largest that fits, 0 where none does
    high: int | None,  # the smallest that does not
    *,
    capacity: int | None,
    unit: int,
    least: int,
    step: int,
    most: int | None,
) -> int | None:
    """What to try next; None where the answer is known well enough."""
    apart = max(unit, low // RESOLUTION)
    known = high is not None and (high - low <= apart or (not low and high <= least))
    if known or (most is not None and low >= most):
        return None
    guess = 2 * low if high is None else (low + high) // 2
    by_line = _by_lines(fitting, (SPARE if step == 1 else 1.0) * capacity) if capacity else None
    if by_line is not None:
        guess = by_line if high is None or by_line < high else high - max(apart, high // RESOLUTION) * step
    if high is None:
        guess = max(guess, low + apart * step)
        guess = min(guess, most) if most else guess
    else:
        guess = guess if low + apart <= guess <= high - apart else (low + high) // 2
    grain = unit * 2 ** int(math.log2(max(1, apart // unit)))  # round numbers, as fine as the answer
    size = guess // grain * grain
    return size if low < size and (high is None or size < high) else guess // unit * unit


def _by_lines(fitting: Sequence[tuple[int, Mapping[str, int]]], room: float) -> int | None:
    """Where the first phase takes all of `room`, each on the line through its two peaks; None: none grows."""
    if len(fitting) < 2:
        return None
    (first, less), (second, more) = fitting
    sizes = [
        second + int((room - peak) * (second - first) / (peak - less[phase]))
        for phase, peak in more.items()
        if peak > less.get(phase, peak)
    ]
    return min(sizes, default=None)
