"""The picture of a memory profile: nothing over another, nothing out of sight."""

import numpy as np
import pytest

from abrun.memory.cells import Cell, MemoryProfile, Point
from abrun.memory.show import draw_peaks
from abrun.present.figures import style
from tests.report.test_plots import ARMS, misplaced

GIB = 2**30
SEARCHED = (512, 640, 700, 701, 1024, 2048, 4096, 65_536)  # those of a search lie close to each other


def cell(arm: str, length: int, num_sequences: int) -> Cell:
    return Cell(
        arm=arm,
        point=Point(length=length, num_sequences=num_sequences),
        by_phase={"backward": GIB + length * num_sequences * 2**14},
        out_of_memory="backward" if length == max(SEARCHED) else None,
    )


@pytest.mark.parametrize("num_arms", [2, 3, 6])
def test_no_text_hides_another_and_no_line_leaves_its_panel(num_arms: int) -> None:
    arms = ("baseline", *ARMS[: num_arms - 1])
    cells = [cell(arm, length, size) for size in (1, 4, 16, 64) for length in SEARCHED for arm in arms]
    with style():
        of_peaks = draw_peaks(MemoryProfile(name="n" * 100, counter="peak_allocated_bytes", cells=cells))
        assert misplaced(of_peaks) == []
    for ax in of_peaks.axes:
        assert max(np.max(line.get_ydata()) for line in ax.lines) < ax.get_ylim()[1]
