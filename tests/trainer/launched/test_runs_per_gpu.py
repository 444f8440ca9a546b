"""Several runs on a GPU: what torch is told of a run's share of the memory."""

import pytest
import torch

from abrun.errors import LaunchError
from abrun.launch.memory.cells import GIB
from abrun.messages import sentence
from abrun.processes import progress
from abrun.recipe.run import CONTEXT_BYTES, share_of_device
from abrun.trainer.__main__ import out_of_memory_reason
from abrun.trainer.backends import ranks
from tests.snapshot import Snapshot


@pytest.mark.parametrize("runs_per_gpu", [2, 3, 8, 16])
def test_shares_and_contexts_fill_the_device_at_most(
    runs_per_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_bytes = 80 * GIB + 12345
    share = share_of_device(device_bytes, runs_per_gpu)
    assert 0 <= device_bytes - runs_per_gpu * (share + CONTEXT_BYTES) < runs_per_gpu
    fractions: list[float] = []
    properties = type("Properties", (), {"total_memory": device_bytes})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction)
    )
    device = torch.device("cuda", 0)
    ranks.limit_memory(device, 1)
    assert fractions == []
    ranks.limit_memory(device, runs_per_gpu)
    ranks.limit_memory(device, runs_per_gpu, unmapped_bytes=GIB)
    assert [round(fraction * device_bytes) for fraction in fractions] == [share, share + GIB]
    with pytest.raises(LaunchError) as refused:
        ranks.limit_memory(device, 200)
    assert "cluster.runs_per_gpu: got 200, but a GPU of" in str(refused.value)


def test_a_run_without_memory_names_its_share(monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot) -> None:
    monkeypatch.setattr(progress, "current_activity", lambda: "the start")
    reason = out_of_memory_reason(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 4)
    assert reason
    snapshot(sentence(reason))
