"""Run directories as the launcher makes them, and trainers in them: here, or in processes of their own."""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from abrun.experiment.plan import ExperimentPlan
from abrun.launch.prepare import write_run_record
from abrun.recipe.run import OwnRunConfig
from abrun.runs.experiment import run_dir, warm_start_dir
from abrun.runs.metric_names import find_metric
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from tests.spawn import processes
from tests.written_runs import make_run

Rows = dict[int, dict[str, float]]  # metrics by step


# --- in this process ---


@contextlib.contextmanager
def single_rank(backend: str = "gloo") -> Iterator[None]:
    """A process group of this process alone, on one thread as a real trainer; puts signal handlers back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def group() -> Iterator[None]:
    """`single_rank` as a fixture, for the conftest.py of any folder."""
    with single_rank():
        yield


def train_here(directory: Path) -> Rows:
    """Train a run to its end in this process, which is in a process group; returns its metrics by step."""
    from abrun.trainer.training import train

    run = RunDir(directory)
    gc.freeze()  # else the trainer's own collection goes through all of pytest: 0.3 s a run
    train(run, run.record(), begin_attempt(run), torch.device("cpu"))
    return metrics_by_step(directory)


def train(directory: Path, config: OwnRunConfig, *, initial_weights: Path | None = None) -> Rows:
    """Train a run to its end, here or as the several ranks that it asks for; return its metrics by step."""
    run = make_run(directory, config, initial_weights=initial_weights)
    if config.cluster.ranks == 1:
        return train_here(run)
    run_to_end(run, ranks=config.cluster.ranks)
    return metrics_by_step(run)


def train_plan(plan: ExperimentPlan, runs_dir: Path) -> None:
    """Train the warm starts and runs of a plan here, each in a process group of its own."""
    for key, config in plan.warm_starts.items():
        with single_rank():
            train(warm_start_dir(runs_dir / plan.recipe.name, key), config)
    for planned in plan.runs:
        assert isinstance(planned.config, OwnRunConfig)
        experiment_dir = runs_dir / plan.recipe.name
        warm_start = warm_start_dir(experiment_dir, planned.warm_start) if planned.warm_start else None
        directory = run_dir(experiment_dir, planned.name)
        write_run_record(directory, plan.recipe.name, planned.name, planned.config, warm_start)
        with single_rank():
            train_here(directory)


def metrics_by_step(directory: Path) -> Rows:
    rows: Rows = {}
    for key, series in RunDir(directory).metrics().items():
        assert find_metric(key), f"{key}: recorded, and not in abrun.runs.metric_names"
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            rows.setdefault(step, {})[key] = value
    return dict(sorted(rows.items()))


# --- in a process of its own ---


class Trainer:
    """`python -m abrun.trainer DIRECTORY` as one or several ranks; stdout and stderr go to files there.

    `env` is laid over the environment (an empty value removes a variable), `path` before `sys.path`. `fresh`:
    in a new interpreter, for variables that modules read at their import, which the fork server has done.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        path: Path | None = None,
        fresh: bool = False,
    ) -> None:
        self.directory = directory
        context = multiprocessing.get_context("spawn") if fresh else processes
        # This process serves the store, on a port that it holds from the start, as tests.spawn does.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self.processes = []
        for rank in range(ranks):
            rank_env = dict(env or {}) | (_rank_env(rank, ranks, self._store.port) if self._store else {})
            process = context.Process(target=_run_main, args=(directory, rank_env, path), daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self, timeout_s: float = 120) -> int:
        """The exit code of rank 0, negative for a signal, after all ranks have ended."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        if self.running:
            for process in self.processes:
                process.kill()
            raise TimeoutError(f"{self.directory}: still training after {timeout_s} s\n{self.stderr}")
        return self.processes[0].exitcode

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        """Until metrics.jsonl has a row of `step`, or the trainer ended."""
        deadline = time.monotonic() + timeout_s
        while self.running and last_step(self.directory) < step:
            assert time.monotonic() < deadline, f"{self.directory}: no step {step}\n{self.stderr}"
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        """A signal to rank 0, where it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[0].pid, number)

    @property
    def running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    @property
    def stderr(self) -> str:
        """What rank 0 said on stderr."""
        path = self.directory / "stderr.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return "".join(line for line in lines if line.strip())


def run_to_end(directory: Path, **options: Any) -> str:
    """Train in a process of its own and expect success; returns what it said on stderr."""
    trainer = Trainer(directory, **options)
    assert trainer.wait() == 0, trainer.stderr
    return trainer.stderr


def last_step(directory: Path) -> int:
    """The step of the newest whole row of metrics.jsonl, 0 without one."""
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _rank_env(rank: int, ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    env = {key: str(value) for key, value in numbers.items()}
    return env | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _run_main(directory: Path, env: dict[str, str], path: Path | None) -> None:
    suffix = f".{env['RANK']}" if env.get("RANK", "0") != "0" else ""
    for number, name in ((1, "stdout.log"), (2, "stderr.log")):
        os.dup2(os.open(directory / (name + suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for key, value in env.items():
        os.environ.pop(key, None)
        if value:
            os.environ[key] = value
    if path:  # what stands there comes first, imported by the server already or not
        sys.path.insert(0, str(path))
        for file in path.glob("*.py"):
            sys.modules.pop(file.stem, None)
    sys.argv = ["abrun.trainer", str(directory)]
    from abrun.trainer.__main__ import main

    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
