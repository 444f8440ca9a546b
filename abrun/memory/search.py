"""Search for the longest sequence or the largest micro-batch that fits, in few measurements."""

import math
from collections.abc import Callable, Sequence

from abrun.memory.cells import Cell, SizeLimit

RESOLUTION = 32  # the search stops within 1/32 of the limit
MIN_TOKENS = 16  # if a sequence this short does not fit, none does
FIRST_FILL_SHARE = 0.97  # share of the memory that the first extrapolated size should fill


def search_size_limit(
    measured: Sequence[Cell],
    size_name: str,
    measure_size: Callable[[int], Cell],
    *,
    unit: int = 1,
    max_size: int | None = None,
) -> SizeLimit:
    """Return the largest size that fits: a multiple of `unit` up to `max_size`.

    `size_name` is length or num_sequences. `measured` are cells that differ only in this size;
    `measure_size` measures another one. The peak of each phase is nearly linear in the size, so the next size
    is extrapolated from two cells. After two misses in the same direction the search doubles or bisects.
    """
    cells = {getattr(cell.point, size_name): cell for cell in measured}
    misses = 0
    while True:
        fitting_sizes = sorted(size for size, cell in cells.items() if not cell.out_of_memory)
        largest_fitting = fitting_sizes[-1] if fitting_sizes else 0
        smallest_failing = min((size for size, cell in cells.items() if cell.out_of_memory), default=None)
        gap = max(unit, largest_fitting // RESOLUTION)
        min_size = MIN_TOKENS if size_name == "length" else unit
        is_known = smallest_failing is not None and (
            smallest_failing - largest_fitting <= gap
            or (not largest_fitting and smallest_failing <= min_size)
        )
        if is_known or (max_size is not None and largest_fitting >= max_size):
            return SizeLimit(
                arm=measured[0].arm,
                swept=measured[0].point.swept,
                what=size_name,
                fits=largest_fitting or None,
                fails=smallest_failing,
                failed_in=cells[smallest_failing].out_of_memory if smallest_failing else None,
            )
        size = 2 * largest_fitting if smallest_failing is None else (largest_fitting + smallest_failing) // 2
        if misses < 2:
            memory_share = 1.0 if misses else FIRST_FILL_SHARE
            size = (
                _extrapolate_size([(size, cells[size]) for size in fitting_sizes[-2:]], memory_share) or size
            )
        if smallest_failing is None:
            size = max(size, largest_fitting + gap)
        elif smallest_failing - largest_fitting < 2 * max(gap, smallest_failing // RESOLUTION):
            size = (largest_fitting + smallest_failing) // 2
        else:
            size = min(max(size, largest_fitting + gap), smallest_failing - smallest_failing // RESOLUTION)
        step = unit * 2 ** int(math.log2(gap // unit))  # tries round numbers, no finer than the resolution
        size = size // step * step if size // step * step > largest_fitting else size // unit * unit
        size = min(size, max_size or size)
        cell = cells[size] = measure_size(size)
        misses = misses + 1 if bool(cell.out_of_memory) == (smallest_failing is not None) else 0


def _extrapolate_size(fitting_cells: Sequence[tuple[int, Cell]], memory_share: float) -> int | None:
    """Return the smallest size at which a phase fills this share of the device; None if no phase grows.

    Phases are extrapolated separately: short sequences peak in the optimizer, whose memory does not grow.
    """
    if len(fitting_cells) < 2 or fitting_cells[1][1].total_bytes is None:
        return None
    (smaller_size, smaller_cell), (larger_size, larger_cell) = fitting_cells
    target_bytes = memory_share * fitting_cells[1][1].total_bytes
    sizes = [
        larger_size
        + int((target_bytes - peak) * (larger_size - smaller_size) / (peak - smaller_cell.by_phase[phase]))
        for phase, peak in larger_cell.by_phase.items()
        if peak > smaller_cell.by_phase.get(phase, peak)
    ]
    return min(sizes, default=None)
