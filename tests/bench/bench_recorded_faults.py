"""How many faults of the library a recorded pair flags by step 3, against a free-running pair.

python -m tests.bench.bench_recorded_faults [--only NAMES] [--replicas 19] [--dtype bfloat16]

A tiny Qwen2 on CPU cores, from a short supervised warm start, trains three steps: a baseline, which records
its rollouts, the baseline with initial weights moved by one ULP (replicas), and each fault. Recorded:
replicas and faults train on the baseline's rollouts; free: they sample. The same rule judges both: a fault
is flagged if a step-one metric of steps 1 to 3 is further from the baseline's, in units of the replicas'
mean distance, than any replica is from it in units of the others', over all metrics and steps. A clean pair
is flagged in 1 of k + 1 cases at most.

A recorded pair samples nothing, so it cannot have faults of samplers, such as forced_eos, which `abrun trace`
shows at its first step. With --work FOLDER a stopped command goes on.
"""

import contextlib
import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from abrun.diagnose.trace.judge import standardise
from abrun.errors import RecipeError
from abrun.metric_names import MEAN_GEN_TOKENS, REWARD, STEP_ONE
from abrun.recipe.faults import FAULTS, ONE_ULP, Fault, unmet_need
from abrun.recipe.run import OwnRunConfig
from abrun.runs.layout import RunName
from abrun.runs.records import RunRecord
from abrun.runs.rundir import RunDir
from tests.bench.bench_trace import BASES, TIMEOUT_S, Bench
from tests.bench.common import heading, make_parser, markdown_row
from tests.bench.launches import clockless_rows
from tests.diagnose.trace.captured import config
from tests.spawn import run_ranks

STEPS = 3
# Metrics that take few values jump where rounding does not
METRICS = tuple(metric for metric in STEP_ONE if metric not in (REWARD, MEAN_GEN_TOKENS))
FREE, RECORDED = "free", "recorded"
Finding = tuple[int | None, str]  # the step that flags a fault, if any, and why


def train_all(rank: int, world_size: int, folders: Sequence[Path]) -> None:
    """Train the runs in these folders, one after the other. Called by every rank."""
    from abrun.train.loop import train

    for folder in folders:
        run = RunDir(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            train(run, run.record(), None if rank else run.begin_attempt(), torch.device("cpu"))


class Pairs:
    """The runs of one base below a folder."""

    def __init__(self, work: Path, base: OwnRunConfig, weights: Path | None) -> None:
        self._work, self._weights, self.base = work, weights, base
        self._planned: list[Path] = []

    def plan(self, design: str, arm: str, changes: Mapping[str, Any]) -> Path:
        """Plan a run, once. Raises RecipeError if a run of this design cannot have the changes."""
        folder = self._work / design / arm / "seed-0"
        source = {"record": True} if arm == "baseline" else {}
        if design == RECORDED:
            source = {"engine": "recorded", "from": str(self._work / FREE / "baseline")}
        content = self.base.model_dump(mode="json", by_alias=True)
        settings = {"steps": STEPS, "rollout": source, "checkpoint": {"every": 100, "final_weights": False}}
        try:
            run = config(settings, changes, base=content, ranks=self.base.cluster.ranks)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        if not (folder / "result.json").exists():
            RunDir(folder).write_record(
                RunRecord(
                    experiment="faults",
                    name=RunName(arm=arm, seed=0),
                    initial_weights=None if self._weights is None else str(self._weights),
                    config=run.model_dump(mode="json"),
                )
            )
            self._planned.append(folder)
        return folder

    def train(self) -> None:
        """Train what is planned; the baseline comes first."""
        if self._planned:
            run_ranks(train_all, self.base.cluster.ranks, self._planned, timeout_s=TIMEOUT_S)
        self._planned = []


def read_values(folder: Path) -> np.ndarray:  # [steps, metrics]; NaN: not recorded
    rows = clockless_rows(folder)
    return np.array(
        [[float(rows[step].get(metric, math.nan)) for metric in METRICS] for step in range(1, STEPS + 1)]
    )


def find(baseline: Path, replicas: Sequence[Path], faulty: Path) -> Finding:
    values, other = read_values(baseline), read_values(faulty)
    recorded = np.isfinite(values)
    floor = np.spacing(np.float32(1)) * np.maximum(np.abs(np.where(recorded, values, 0)).max(axis=0), 1)

    def distances(rows: np.ndarray) -> np.ndarray:  # [values, 1]
        difference = np.nan_to_num(np.abs(rows - values), nan=math.inf) + floor
        return difference[recorded][:, None]

    spread = np.stack([distances(read_values(replica)) for replica in replicas])
    ratios, limit = standardise(distances(other), spread)
    beyond = np.full(values.shape, -math.inf)
    beyond[recorded] = ratios
    flagged = beyond > limit
    if not flagged.any():
        return None, f"{ratios.max():.3g} / {limit:.3g}"
    step = int(np.argmax(flagged.any(axis=1)))
    metric = int(np.argmax(beyond[step]))
    return step + 1, f"`{METRICS[metric]}` {beyond[step, metric]:.3g} / {limit:.3g}"


def measure(
    bench: Bench, name: str, base: OwnRunConfig, faults: Sequence[Fault], replicas: int, work: Path
) -> Any:
    """Return the findings of faults by design; None: the design cannot have the fault."""
    pairs = Pairs(work / name, base, bench.weights)
    baseline = pairs.plan(FREE, "baseline", {})
    moved = {
        design: [
            pairs.plan(design, f"ulp-{draw}", {"injected_fault": {"name": ONE_ULP, "draw": draw}})
            for draw in range(replicas)
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
    pairs.train()
    return {
        fault.name: [
            None if (folder := faulty[fault.name, design]) is None else find(baseline, moved[design], folder)
            for design in (FREE, RECORDED)
        ]
        for fault in faults
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--replicas", type=int, default=19)
    parser.add_argument("--dtype", help="of all bases; default: their own")
    parser.add_argument("--work", type=Path)
    asked = parser.parse_args()
    work = asked.work or Path(tempfile.mkdtemp(prefix="recorded-faults-"))
    bench, by_base = Bench(work), dict[str, list[Fault]]()
    for fault in FAULTS:
        if asked.only and fault.name not in asked.only:
            continue
        fitting = [name for name, run in BASES.items() if unmet_need(fault, run) is None]
        base = "truncated" if fault.name == "forced_eos" else next(iter(fitting), "")
        by_base.setdefault(base, []).append(fault)
    print(
        heading(
            "fault", "run", "free: step", "metric, ratio / limit", "recorded: step", "metric, ratio / limit"
        )
    )
    counts, total = [0, 0], 0
    for name, faults in by_base.items():
        run = BASES.get(name)
        if run is None:
            total += len(faults)
            print(*(markdown_row(f"`{fault.name}`", "none", "", "", "", "") for fault in faults), sep="\n")
            continue
        if asked.dtype:
            run = config(
                {"policy": {"dtype": asked.dtype}},
                base=run.model_dump(mode="json", by_alias=True),
                ranks=run.cluster.ranks,
            )
        found = measure(bench, f"{name}-{run.policy.dtype}", run, faults, asked.replicas, work)
        for fault_name, findings in found.items():
            total += 1
            cells: list[Any] = []
            for index, finding in enumerate(findings):
                counts[index] += bool(finding and finding[0])
                cells += ["-", "cannot have it"] if finding is None else [finding[0] or "no", finding[1]]
            print(markdown_row(f"`{fault_name}`", name, *cells), flush=True)
    print(f"\nby step {STEPS}: free-running {counts[0]}, recorded {counts[1]} of {total}")


if __name__ == "__main__":
    main()
