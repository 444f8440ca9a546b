"""Whose memory a peak is: by hand, on the events of an allocator's snapshot, and by the tracker."""

from pathlib import Path
from typing import Any

import pytest
import torch

from abrun.trainer.loop.phases import Phases
from abrun.trainer.memory.measure import AllocationRecorder, find_source_line, parse_trace, summarize_peak

MODEL = [
    {"filename": "/env/lib/python3.11/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
    {"filename": "/env/lib/site-packages/transformers/modeling_x.py", "line": 46, "name": "forward"},
    {"filename": "/home/me/abrun/abrun/trainer/loop/sft.py", "line": 31, "name": "update"},
]
KERNEL = [{"filename": "/home/me/abrun/abrun/trainer/kernels/linear.py", "line": 215, "name": "start"}]
MLP, START = "transformers/modeling_x.py:46 forward", "abrun/trainer/kernels/linear.py:215 start"


def event(action: str, addr: int, size: int, time_us: int, **more: Any) -> dict[str, Any]:
    """As `_snapshot()["device_traces"][device]` has them."""
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, **more}


TRACE = [
    event("segment_alloc", 1000, 4096, 10),
    event("alloc", 1000, 100, 11, frames=MODEL),
    event("alloc", 1100, 100, 12, frames=MODEL),
    event("alloc", 1200, 500, 13, frames=KERNEL),
    event("free_requested", 1000, 100, 14),
    event("free_completed", 1000, 100, 15),
    event("free_requested", 50, 70, 20),  # there before the history
    event("alloc", 1000, 300, 21, frames=[]),  # its place is taken again
    event("free_completed", 50, 70, 22),
    event("free_requested", 1200, 500, 23),
    event("snapshot", 0, 0, 24),
    {"action": "oom", "size": 900, "stream": 0, "time_us": 25, "device_free": 10},  # of no address
]


def test_the_sites_at_the_peak_add_up_to_it() -> None:
    changes = list(parse_trace(TRACE, [(0, "forward"), (20, "backward")]))
    assert [change.num_bytes for change in changes] == [100, 100, 500, -100, -70, 300, -500]
    held = summarize_peak(changes, base_bytes=1000)  # 1000, 1100, 1200, 1700, 1600, 1530, 1830, 1330
    assert held == {
        "peak_bytes": 1830,
        "before_bytes": 930,
        "sites": [
            {"line": START, "phase": "forward", "bytes": 500, "count": 1},
            {"line": "", "phase": "backward", "bytes": 300, "count": 1},
            {"line": MLP, "phase": "forward", "bytes": 100, "count": 1},
        ],
    }


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([], ""),
        (MODEL[:1], ""),
        (MODEL, MLP),
        ([{"filename": "<string>", "line": 1, "name": "f"}, *KERNEL], START),
        ([{"filename": "/w/abrun/abrun/trainer/memory/measure.py", "line": 1, "name": "note"}], ""),
        ([{"filename": "/usr/lib/libc.so", "line": 0, "name": "start"}], ""),
        # A checkout in a folder named torch is no library
        (
            [{"filename": "/torch/abrun/trainer/kernels/x.py", "line": 7, "name": "f"}],
            "abrun/trainer/kernels/x.py:7 f",
        ),
        (
            [{"filename": "/torch/abrun/trainer/memory/measure.py", "line": 7, "name": "run"}, MODEL[2]],
            "abrun/trainer/loop/sft.py:31 update",
        ),
    ],
)
def test_the_line_is_the_innermost_outside_of_torch(frames: list[Any], line: str) -> None:
    assert find_source_line(frames) == line


def test_the_tracker_s_blocks_have_their_lines_and_autograd_s_nodes(tmp_path: Path) -> None:
    weight, x = torch.nn.Parameter(torch.randn(1000, 8)), torch.randn(50, 8)
    phases = Phases(torch.device("cpu"), lambda: [weight])
    history = AllocationRecorder(phases, tmp_path / "snapshot")
    with history, phases("loss"):
        phases.label_memory("forward")
        logits = x @ weight.T
        kept = logits.exp()
        phases.label_memory("backward")
        kept.sum().backward()
    held = history.summarize()
    assert held and held["peak_bytes"] == phases.collect()[1]["memory/backward/peak_live_tensor_bytes"]
    assert held["before_bytes"] == 4 * 8000
    assert sum(site["bytes"] for site in held["sites"]) == held["peak_bytes"] - held["before_bytes"]
    by_phase = {(site["phase"], site["line"].rpartition(" ")[2]): site["bytes"] for site in held["sites"]}
    assert by_phase["forward", test_the_tracker_s_blocks_have_their_lines_and_autograd_s_nodes.__name__]
    assert {name for phase, name in by_phase if phase == "backward"} & {"ExpBackward0", "MmBackward0"}
    assert not list(tmp_path.iterdir())  # the snapshot is CUDA's
