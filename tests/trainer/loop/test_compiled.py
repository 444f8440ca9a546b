"""`policy.compile`: what a run trains with is compiled, on a CPU too, whose memory a dispatch mode counts."""

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from abrun.trainer.models.weights import load_network
from tests.spawn import run_ranks
from tests.trainer.loop.runs import train_here
from tests.written_runs import make_run, run_config

COMPILED = ("steps=2", "policy.compile=true")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often compiled code has run, and how much there is, as a compiler counts that compiles nothing."""
    counts: Counter[str] = Counter()

    def compiler(kind: str, graph: torch.fx.GraphModule, _: Any) -> Any:
        counts[f"{kind} graphs"] += 1

        def run(*inputs: Any) -> Any:
            counts[kind] += 1
            return graph(*inputs)

        return make_boxed_func(run)

    compilers: dict[str, Any] = {
        f"{each}_compiler": partial(compiler, each) for each in ("fw", "bw", "inference")
    }
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(**compilers)))
    torch.compiler.reset()
    yield counts
    torch.compiler.reset()


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("{type: sft, batch_size: 16}", marks=pytest.mark.slow),
        "{type: grpo, group_size: 4, prompts_per_step: 4}",
    ],
)
def test_every_layer_runs_compiled_forwards_and_backwards_and_nothing_else_is_compiled(
    algorithm: str, ran: Counter[str], tmp_path: Path, group: None
) -> None:
    """Samples that are kept take no code of their own."""
    config = run_config(f"algorithm={algorithm}", *COMPILED, "policy.micro_batch_size=8")
    rows = train_here(make_run(tmp_path / "run", config))
    network: Any = load_network(config.model, weights=None, seed=0)
    times = 2 * 2 * len(network.model.layers)  # steps, microbatches
    assert ran == {"fw graphs": 1, "bw graphs": 1, "fw": times, "bw": times}
    assert rows[1]["timing/train/compile_s"] > 0 == rows[2]["timing/train/compile_s"]


def _trained(rank: int, world_size: int, directory: Path, cache: Path) -> dict[str, int]:
    """The cache's counts of a run in a process that has compiled nothing before."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from torch._dynamo.utils import counters

    train_here(directory)
    return {key: count for key, count in counters["aot_autograd"].items() if key.startswith("autograd_cache")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_second_run_of_an_experiment_has_all_its_code_from_the_first(tmp_path: Path) -> None:
    config = run_config(*COMPILED, "algorithm.ratio=old", "policy.micro_batch_size=8")
    counts = []
    for seed in (0, 1):
        directory = make_run(tmp_path / f"seed-{seed}", config, seed=seed)
        counts += run_ranks(_trained, 1, directory, tmp_path / "cache", timeout_s=300)
    assert counts == [{"autograd_cache_miss": 2, "autograd_cache_saved": 2}, {"autograd_cache_hit": 2}]
