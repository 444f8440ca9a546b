"""Run a function as several ranks of a gloo process group, each in a process of its own."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Children are forked from a server that has done the slow imports: each starts in milliseconds, and is a
# process that can be killed like any other. CUDA, though, does not survive a fork.
processes: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
processes.set_forkserver_preload(
    [
        "abrun.trainer.__main__",
        "abrun.trainer.loop.grpo",
        "abrun.trainer.loop.ppo",
        "abrun.trainer.loop.sft",
        "abrun.trainer.backends.megatron.backend",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank, and return what the ranks returned, in their
    order.

    The function and its arguments must pickle: a module-level function of an importable test module. The
    default process group is up when it runs, and torchrun's environment variables are set. Raises
    RuntimeError with the rank's traceback when one fails, TimeoutError when they take too long; no process
    outlives the call.
    """
    # The parent serves the store, on a port it holds from the start: nobody can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(
                target=_run_rank, args=(function, rank, world_size, args, store.port, folder), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, time.monotonic() + timeout_s, Path(folder))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
        return [torch.load(_result_path(folder, rank), weights_only=False) for rank in range(world_size)]


def _wait(ranks: list[Any], deadline: float, folder: Path) -> None:
    """Until every rank has ended well; the first that did not ends the wait, for the others may wait for
    it."""
    running = list(ranks)
    while running:
        ended = wait([process.sentinel for process in running], timeout=max(deadline - time.monotonic(), 0))
        if not ended:
            raise TimeoutError(f"{len(running)} of {len(ranks)} ranks still ran at the time limit")
        for process in running:
            if process.sentinel in ended:
                process.join()
        failed = [ranks.index(process) for process in running if process.exitcode not in (None, 0)]
        if failed:
            raise RuntimeError("\n".join(_failure(folder, rank, ranks[rank].exitcode) for rank in failed))
        running = [process for process in running if process.exitcode is None]


def _failure(folder: Path, rank: int, exit_code: int) -> str:
    path = folder / f"failure-{rank}.txt"
    return f"rank {rank}: {path.read_text() if path.exists() else f'ended with exit code {exit_code}'}"


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}.pt"


def _run_rank(
    function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], port: int, folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, not rank 0
    }
    try:
        dist.init_process_group("gloo")
        result = function(rank, world_size, *args)
        torch.save(result, _result_path(folder, rank))
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"failure-{rank}.txt").write_text(traceback.format_exc())
        # Not sys.exit: a group whose peers still wait in a collective can hang while it is torn down.
        os._exit(1)
