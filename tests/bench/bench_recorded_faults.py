"""How many faults of the library a recorded pair flags by step 3, against a free-running pair.

python -m tests.bench.bench_recorded_faults [--only NAMES] [--replicas 19] [--steps 3] [--dtype bfloat16]
python -m tests.bench.bench_recorded_faults --device cuda --workers 6    # runs of one rank, on one GPU

A tiny Qwen2, from a short supervised warm start, trains three steps: a baseline, which records its rollouts,
the baseline with initial weights moved by one ULP (replicas), and each fault. Recorded: replicas and faults
train on the baseline's rollouts; free: they sample. The same rule judges both after each step: a fault is
flagged if a step-one metric of any step so far is further from the baseline's, in units of the replicas' mean
distance, than any replica is from it in units of the others', over all metrics and steps so far. Each such
analysis flags a clean pair in 1 of k + 1 cases at most.

A recorded pair samples nothing, so it cannot have faults of samplers, such as forced_eos, which a free pair
and `abrun trace` show at the first step. Hard masks of importance weights (sequence_weight_sum) compare with
the recording's sampler: in bfloat16 one ULP masks most sequences, so that a recorded pair is no sharper. With
--work FOLDER a stopped command goes on. Runs of one rank print to worker-N.log in the folder of their base.
"""

import argparse
import contextlib
import io
import math
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from abrun.errors import RecipeError
from abrun.recipe.faults import FAULTS, ONE_ULP, Fault, unmet_need
from abrun.recipe.run import OwnRunConfig
from abrun.runs.launches import write_config
from abrun.runs.layout import RunName
from abrun.runs.metric_names import MEAN_GEN_TOKENS, REWARD, STEP_ONE
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from abrun.tools.trace.judge import standardise
from abrun.trainer.backends.ranks import join_ranks
from tests.bench.bench_trace import BASES, TIMEOUT_S, Bench
from tests.bench.common import heading, make_parser, markdown_row
from tests.bench.launches import clockless_rows
from tests.spawn import run_ranks
from tests.tools.trace.captured import config

# Metrics that take few values jump where rounding does not
METRICS = tuple(metric for metric in STEP_ONE if metric not in (REWARD, MEAN_GEN_TOKENS))
FREE, RECORDED = "free", "recorded"
Finding = tuple[int | None, str]  # the step that flags a fault, if any, and why


def train_all(rank: int, world_size: int, folders: Sequence[Path], device: torch.device) -> None:
    """Train the runs in these folders, one after the other. Called by every rank."""
    from abrun.trainer.training import train

    for folder in folders:
        run = RunDir(folder)
        try:
            train(run, run.record(), None if rank else begin_attempt(run), device)
        except Exception:
            if world_size > 1:  # other ranks may wait for this one
                raise
            traceback.print_exc()


def train_as_rank(rank: int, world_size: int, folders: Sequence[Path]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train_all(rank, world_size, folders, torch.device("cpu"))


def train_alone(folders: Sequence[Path], cluster: Mapping[str, Any], log: Path) -> None:
    """Train runs of one rank in this process, which prints to a file."""
    with log.open("a", buffering=1) as sys.stdout:
        sys.stderr = sys.stdout
        train_all(0, 1, folders, join_ranks(cluster))
        torch.distributed.destroy_process_group()


class Pairs:
    """The runs of one base below a folder."""

    def __init__(self, work: Path, base: OwnRunConfig, weights: Path | None, steps: int) -> None:
        self._work, self._weights, self.base, self._steps = work, weights, base, steps
        self._planned: list[Path] = []

    def plan(self, design: str, arm: str, changes: Mapping[str, Any]) -> Path:
        """Plan a run, once. Raises RecipeError if a run of this design cannot have the changes."""
        folder = self._work / design / arm / "seed-0"
        source = {"record": True} if arm == "baseline" else {}
        if design == RECORDED:
            source = {"engine": "recorded", "from": str(self._work / FREE / "baseline")}
        content = self.base.model_dump(mode="json", by_alias=True)
        never = {"every": 100, "final_weights": False}
        settings = {"steps": self._steps, "rollout": source, "checkpoint": never}
        cluster = {"cluster": content["cluster"]}
        try:
            run = config(settings, cluster, changes, base=content, ranks=self.base.cluster.ranks)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        if not (folder / "result.json").exists():
            write_config(
                RunDir(folder),
                "faults",
                RunName(arm=arm, seed=0),
                run.model_dump(mode="json"),
                None if self._weights is None else str(self._weights),
            )
            self._planned.append(folder)
        return folder

    def train(self, num_workers: int) -> None:
        """Train what is planned; the baseline comes first."""
        cluster = self.base.cluster
        first = [folder for folder in self._planned if folder.parent.name == "baseline"]
        for folders in (first, [folder for folder in self._planned if folder not in first]):
            if not folders:
                continue
            if cluster.ranks > 1:
                run_ranks(train_as_rank, cluster.ranks, folders, timeout_s=TIMEOUT_S)
                continue
            context = multiprocessing.get_context("spawn")
            shares = [folders[worker::num_workers] for worker in range(num_workers)]
            workers = [
                context.Process(
                    target=train_alone,
                    args=(share, cluster.model_dump(), self._work / f"worker-{number}.log"),
                    daemon=True,
                )
                for number, share in enumerate(filter(None, shares))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        self._planned = []


def read_values(folder: Path, steps: int) -> np.ndarray:  # [steps, metrics]; NaN: not recorded
    rows = clockless_rows(folder)
    return np.array(
        [
            [float(rows.get(step, {}).get(metric, math.nan)) for metric in METRICS]
            for step in range(1, steps + 1)
        ]
    )


def find(baseline: Path, replicas: Sequence[Path], faulty: Path, steps: int) -> Finding:
    """Return the first step after which the steps so far flag a fault."""
    if not (faulty / "result.json").exists():
        return None, "failed"
    finding: Finding = (None, "")
    for step in range(1, steps + 1):
        finding = judge(*(read_values(path, step) for path in (baseline, faulty, *replicas)))
        if finding[0]:
            break
    return finding


def judge(values: np.ndarray, other: np.ndarray, *replicas: np.ndarray) -> Finding:  # [steps, metrics]
    recorded = np.isfinite(values)
    floor = np.spacing(np.float32(1)) * np.maximum(np.abs(np.where(recorded, values, 0)).max(axis=0), 1)

    def distances(rows: np.ndarray) -> np.ndarray:  # [values, 1]
        difference = np.nan_to_num(np.abs(rows - values), nan=math.inf) + floor
        return difference[recorded][:, None]

    ratios, limit = standardise(distances(other), np.stack([*map(distances, replicas)]))
    if ratios.max() <= limit:
        return None, f"{ratios.max():.3g} / {limit:.3g}"
    worst = int(np.argmax(ratios))
    metric = METRICS[np.argwhere(recorded)[worst][1]]
    return len(values), f"`{metric}` {ratios[worst]:.3g} / {limit:.3g}"


def measure(
    bench: Bench, base: OwnRunConfig, faults: Sequence[Fault], work: Path, options: argparse.Namespace
) -> dict[str, list[Finding | None]]:
    """Return the findings of faults by design; None: the design cannot have the fault."""
    pairs = Pairs(work, base, bench.weights, options.steps)
    baseline = pairs.plan(FREE, "baseline", {})
    moved = {
        design: [
            pairs.plan(design, f"ulp-{draw}", {"injected_fault": {"name": ONE_ULP, "draw": draw}})
            for draw in range(options.replicas)
        ]
        for design in (FREE, RECORDED)
    }
    faulty: dict[tuple[str, str], Path | None] = {}
    for fault in faults:
        for design in (FREE, RECORDED):
            try:
                folder = pairs.plan(design, fault.name, {"injected_fault": {"name": fault.name}})
            except RecipeError:
                folder = None
            faulty[fault.name, design] = folder
    pairs.train(options.workers)
    return {
        fault.name: [
            None if folder is None else find(baseline, moved[design], folder, options.steps)
            for design in (FREE, RECORDED)
            for folder in [faulty[fault.name, design]]
        ]
        for fault in faults
    }


def bases_of(faults: Sequence[Fault], device: str) -> dict[str, list[Fault]]:
    """Return the faults by the run that has them; under "" those that no run can have."""
    bases = {name: run for name, run in BASES.items() if device == "cpu" or run.cluster.ranks == 1}
    by_base: dict[str, list[Fault]] = {}
    for fault in faults:
        fitting = [name for name, run in bases.items() if unmet_need(fault, run) is None]
        base = "truncated" if fault.name == "forced_eos" else next(iter(fitting), "")
        by_base.setdefault(base, []).append(fault)
    return by_base


def with_machine(run: OwnRunConfig, device: str, dtype: str | None) -> OwnRunConfig:
    """Return a base for a device, in its own dtype if none is given."""
    changes: dict[str, Any] = {"policy": {"dtype": dtype}} if dtype else {}
    if device == "cuda":
        changes["cluster"] = {"gpus_per_node": 1}
    return config(changes, base=run.model_dump(mode="json", by_alias=True), ranks=run.cluster.ranks)


def row(fault: str, base: str, findings: Sequence[Finding | None]) -> str:
    cells: list[Any] = []
    for finding in findings:
        cells += ["-", "cannot have it"] if finding is None else [finding[0] or "no", finding[1]]
    return markdown_row(f"`{fault}`", base, *cells)


def main() -> None:
    parser = make_parser(__doc__, devices=("cpu", "cuda"))
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--replicas", type=int, default=19)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", help="of all bases; default: their own")
    parser.add_argument("--workers", type=int, default=1, help="processes that train runs of one rank")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    began_s = time.monotonic()
    work = options.work or Path(tempfile.mkdtemp(prefix="recorded-faults-"))
    bench = Bench(work)
    titles = "free: step", "metric, ratio / limit", "recorded: step", "metric, ratio / limit"
    print(heading("fault", "run", *titles), flush=True)
    found: list[list[Finding | None]] = []
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    for name, faults in bases_of(chosen, options.device).items():
        if not name:
            print(*(row(fault.name, "none", [None, None]) for fault in faults), sep="\n")
            continue
        run = with_machine(BASES[name], options.device, options.dtype)
        folder = work / f"{name}-{options.device}-{run.policy.dtype}-{options.steps}"
        for fault, findings in measure(bench, run, faults, folder, options).items():
            found.append(findings)
            print(row(fault, name, findings), flush=True)
    free, recorded = (sum(bool(side and side[0]) for side in sides) for sides in zip(*found, strict=True))
    print(
        f"\nby step {options.steps}: free-running {free}, recorded {recorded} of {len(chosen)}; "
        f"{time.monotonic() - began_s:.0f} s"
    )


if __name__ == "__main__":
    main()
