"""Who holds the memory: by hand, on events as the CUDA allocator's snapshot has them, and by the tracker."""

from typing import Any

import pytest
import torch
from torch import nn

from abrun.memory.attribution import (
    BEFORE,
    MOST_LAYERS,
    MOST_POINTS,
    REST,
    Change,
    Site,
    attribute,
    changes_of_trace,
    line_of,
)
from abrun.memory.history import History
from abrun.train.phases import Phases

MODEL = [
    {"filename": "/env/lib/python3.11/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
    {
        "filename": "/env/lib/python3.11/site-packages/transformers/modeling_x.py",
        "line": 46,
        "name": "forward",
    },
    {"filename": "/home/me/abrun/abrun/train/sft.py", "line": 31, "name": "update"},
]
KERNEL = [{"filename": "/home/me/abrun/abrun/kernels/linear.py", "line": 215, "name": "start"}]


def event(action: str, addr: int, size: int, time_us: int, **more: Any) -> dict[str, Any]:
    """As `_snapshot()["device_traces"][device]` has them."""
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, **more}


TRACE = [
    event("segment_alloc", 1000, 4096, 10),
    event("alloc", 1000, 100, 11, frames=MODEL, user_metadata="model.layers.0.mlp"),
    event("alloc", 1100, 100, 12, frames=MODEL, user_metadata="model.layers.11.mlp"),
    event("alloc", 1200, 500, 13, frames=KERNEL),
    event("free_requested", 1000, 100, 14),
    event("free_completed", 1000, 100, 15),
    event("free_requested", 50, 70, 20),  # there before the history
    event("alloc", 1000, 300, 21, frames=[], user_metadata="model.head"),  # its place is taken again
    event("free_completed", 50, 70, 22),  # by another stream, which has now let it go
    event("free_completed", 1200, 500, 23),  # without a request on this stream
    event("snapshot", 0, 0, 24),
    {"action": "oom", "size": 900, "stream": 0, "time_us": 25, "device_free": 10},  # of no address
]
PHASES = [(0, "forward"), (20, "backward")]


def test_a_snapshot_s_events_become_what_grew_and_what_shrank() -> None:
    changes = list(changes_of_trace(TRACE, PHASES))
    mlp = Site("model.layers.*.mlp", "transformers/modeling_x.py:46 forward", "forward")
    kernel = Site("", "abrun/kernels/linear.py:215 start", "forward")
    assert [(change.num_bytes, change.site) for change in changes] == [
        (100, mlp._replace(module="model.layers.*.mlp")),
        (100, mlp),
        (500, kernel),
        (-100, None),
        (-70, None),
        (300, Site("model.head", "", "backward")),
        (-500, None),
    ]


def test_what_is_held_at_the_peak_adds_up_to_it() -> None:
    found = attribute(list(changes_of_trace(TRACE, PHASES)), base_bytes=1000)
    # 1000, 1100, 1200, 1700, 1600, 1530, 1830, 1330
    assert (found.peak_bytes, found.peak_at) == (1830, 6)
    assert [(one["bytes"], one["count"], one["module"]) for one in found.top] == [
        (500, 1, ""),
        (300, 1, "model.head"),
        (100, 1, "model.layers.*.mlp"),
    ]
    assert list(map(sum, zip(*found.layers.values(), strict=True))) == [
        1000, 1100, 1200, 1700, 1600, 1530, 1830, 1330
    ]  # fmt: skip
    assert found.layers[BEFORE] == [1000] * 5 + [930] * 3
    assert found.layers["abrun/kernels/linear.py:215 start"] == [0, 0, 0, 500, 500, 500, 500, 0]
    assert found.phases == [("forward", 1), ("backward", 6)]


def test_a_long_step_is_drawn_with_few_points_and_its_peak_among_them() -> None:
    changes, live = [], []
    for index in range(5000):
        site = Site("m", f"line {index % 40}", "forward")
        changes.append(Change(index, 1000 if index == 3777 else 2, site))
        live.append(index)
        if index % 3 == 0:
            changes.append(Change(live.pop(0), -2, None))
    found = attribute(changes, 10)
    so_far, totals = 10, []
    for change in changes:
        so_far += change.num_bytes
        totals.append(so_far)
    assert found.peak_bytes == max(totals)
    curves = list(map(sum, zip(*found.layers.values(), strict=True)))
    assert len(curves) <= MOST_POINTS and curves[found.peak_at] == max(curves) == max(totals)
    assert len(found.layers) == 2 + MOST_LAYERS
    assert sum(one["bytes"] for one in found.top) + sum(found.layers[BEFORE][:1]) < found.peak_bytes
    assert min(found.layers[REST]) >= 0


def test_a_checkout_in_a_folder_named_torch_is_no_library() -> None:
    frames = [MODEL[0], {"filename": "/home/me/torch/abrun/kernels/logits.py", "line": 7, "name": "forward"}]
    assert line_of(frames) == "abrun/kernels/logits.py:7 forward"
    profiler = {"filename": "/home/me/torch/abrun/memory/measure.py", "line": 7, "name": "run"}
    assert line_of([profiler, MODEL[2]]) == "abrun/train/sft.py:31 update"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], ""),
        (MODEL[:1], ""),
        (MODEL, "transformers/modeling_x.py:46 forward"),
        ([{"filename": "<string>", "line": 1, "name": "f"}, *KERNEL], "abrun/kernels/linear.py:215 start"),
        ([{"filename": "/w/abrun/abrun/memory/history.py", "line": 1, "name": "note"}], ""),
        ([{"filename": "/usr/lib/libc.so", "line": 0, "name": "start"}], ""),
    ],
)
def test_the_line_is_the_innermost_outside_of_torch(frames: list[Any], expected: str) -> None:
    assert line_of(frames) == expected


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 1000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_tracker_s_blocks_have_their_modules_in_forward_and_backward_passes() -> None:
    net, x = Net(), torch.randn(50, 8)
    phases = Phases(torch.device("cpu"), net.parameters)
    history = History(phases, by_module=True)
    with history, phases("loss"):
        phases.part("forward")
        logits = net(x)
        kept = logits.exp()
        phases.part("backward")
        kept.sum().backward()
    found: Any = history.attribution()
    peaks = phases.collect()[1]
    assert found["peak_bytes"] == peaks["memory/backward/peak_live_tensor_bytes"]
    of = {(one["module"], one["phase"]): one for one in found["top"]}
    assert of["head", "forward"]["bytes"] == 50 * 1000 * 4
    assert of["blocks.*", "forward"]["count"] == 3 and of["blocks.*", "forward"]["bytes"] == 3 * 50 * 8 * 4
    sites = [change.site for change in history._changes if change.site]
    assert {site.module for site in sites if site.phase == "backward"} >= {
        "head",
        "blocks.*",
    }  # their gradients
    assert not nn.modules.module._global_forward_hooks  # nothing is left behind
    assert sum(found["layers"][BEFORE][:1]) == 4 * (3 * 64 + 8000)
