"""The pictures of a memory profile: nothing over another, nothing out of sight."""

import numpy as np
import pytest

from abrun.memory import pictures
from abrun.memory.attribution import BEFORE, REST
from abrun.memory.cells import Cell, MemoryProfile, Point
from abrun.present.figures import style
from tests.report.test_plots import ARMS, misplaced

GIB = 2**30
PHASES = (
    "generation",
    "logprobs",
    "value_forward_backward",
    "forward",
    "backward",
    "optimizer",
    "weight_sync",
)
SEARCHED = (512, 640, 700, 701, 1024, 2048, 4096, 65_536)  # those of a search lie close to each other


def cell(arm: str, length: int, num_sequences: int) -> Cell:
    curve = [*range(0, 20 * GIB, GIB), 0]
    layers = {BEFORE: [GIB] * 21, f"network.{'layers.' * 20}{length}": curve, REST: [0] * 21}
    found = {"peak_bytes": 20 * GIB, "peak_at": 19, "layers": layers}
    return Cell(
        arm=arm,
        point=Point(length=length, num_sequences=num_sequences),
        by_phase={"backward": GIB + length * num_sequences * 2**14},
        out_of_memory="backward" if length == max(SEARCHED) else None,
        attribution=found | {"phases": [(phase, 3 * place) for place, phase in enumerate(PHASES)]},
    )


@pytest.mark.parametrize("num_arms", [2, 3, 6])
def test_no_text_hides_another_and_no_line_leaves_its_panel(num_arms: int) -> None:
    arms = ("baseline", *ARMS[: num_arms - 1])
    cells = [cell(arm, length, size) for size in (1, 4, 16, 64) for length in SEARCHED for arm in arms]
    with style():
        of_peaks = pictures.peaks(MemoryProfile(name="n" * 100, counter="peak_allocated_bytes", cells=cells))
        of_sites = pictures.attribution(cells[-num_arms:])
        assert of_sites is not None
        assert misplaced(of_peaks) == misplaced(of_sites) == []
    for ax in of_peaks.axes:
        assert max(np.max(line.get_ydata()) for line in ax.lines) < ax.get_ylim()[1]
