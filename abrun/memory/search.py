"""The longest sequence, or the largest microbatch, that trains: few tries, each in processes of its own."""

import math
from collections.abc import Callable, Sequence

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
    """Return the largest size of `what` that fits, a multiple of `unit`, and `most` at most.

    `tried` measures one more cell; `measured` are of the same line. A phase's peak is nearly a straight line
    over either size, so that two cells tell the next size to try. After two misses in the same direction the
    search doubles, or bisects.
    """
    cells = {getattr(cell.point, what): cell for cell in measured}
    misses = 0
    while True:
        fitting = sorted(size for size, cell in cells.items() if not cell.out_of_memory)
        low = fitting[-1] if fitting else 0
        high = min((size for size, cell in cells.items() if cell.out_of_memory), default=None)
        gap = max(unit, low // RESOLUTION)
        least = LEAST if what == "length" else unit
        is_known = high is not None and (high - low <= gap or (not low and high <= least))
        if is_known or (most is not None and low >= most):
            return Longest(
                arm=measured[0].arm,
                swept=measured[0].point.swept,
                what=what,
                fits=low or None,
                fails=high,
                failed_in=cells[high].out_of_memory if high else None,
            )
        size = 2 * low if high is None else (low + high) // 2
        if misses < 2:
            share = 1.0 if misses else SPARE
            size = _crossing([(size, cells[size]) for size in fitting[-2:]], share) or size
        if high is None:
            size = max(size, low + gap)
        elif high - low < 2 * max(gap, high // RESOLUTION):
            size = (low + high) // 2
        else:
            size = min(max(size, low + gap), high - high // RESOLUTION)
        grain = unit * 2 ** int(math.log2(gap // unit))  # round numbers, as fine as the answer
        size = size // grain * grain if size // grain * grain > low else size // unit * unit
        size = min(size, most or size)
        cell = cells[size] = tried(size)
        misses = misses + 1 if bool(cell.out_of_memory) == (high is not None) else 0


def _crossing(fitting: Sequence[tuple[int, Cell]], share: float) -> int | None:
    """Return the size at which the first phase fills that share of a device; None: no phase grows.

    Each phase has a line of its own: short sequences peak in the optimizer, which does not grow.
    """
    if len(fitting) < 2 or fitting[1][1].total_bytes is None:
        return None
    (first, less), (second, more) = fitting
    room = share * fitting[1][1].total_bytes
    sizes = [
        second + int((room - peak) * (second - first) / (peak - less.by_phase[phase]))
        for phase, peak in more.by_phase.items()
        if peak > less.by_phase.get(phase, peak)
    ]
    return min(sizes, default=None)
