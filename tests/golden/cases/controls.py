"""What stands beside the claims: A/A reruns, injected faults, final weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.golden.case import case, compare_command
from tests.verdict.simulate import edit, edit_rows, write_experiment
from tests.verdict.test_final_weights import WEIGHTS, changed, ended_with, everywhere
from tests.verdict.test_injected import FAULTS, LATE

Commands = Iterator[Sequence[str]]


@case
def no_reruns(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", controls={})
    yield compare_command("simulated")


@case
def step_one_within_reruns(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated", controls={"aa_reruns": 4})
    for run in sorted(experiment_dir.glob("*/*/metrics.jsonl")):
        value = 0.99 if "-aa" in run.parent.name else 1.02 if run.parts[-3] == "treatment" else 1.0
        edit_rows(run.parent, lambda row, value=value: row.update({"train/grad_norm": value}))
    yield compare_command("simulated")


@case
def injected_faults(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", controls={**FAULTS, "ulp_reruns": 2}, shift={LATE: -0.2})
    yield compare_command("simulated")
    yield ["faults", "run", "simulated", "--resume"]


@case
def injected_faults_left_open(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", controls=FAULTS, shift={LATE: -0.02, "fault-misgrouped": 0.3})
    yield compare_command("simulated")


@case
def final_weights(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated")
    everywhere(experiment_dir, WEIGHTS)
    ended_with(experiment_dir / "treatment/seed-1", changed("a", 1, -2.25))
    ended_with(experiment_dir / "treatment/seed-2", changed("b", 1, 5e-4))
    ended_with(experiment_dir / "baseline/seed-0-aa1", changed("a", 0, 0.75))
    yield compare_command("simulated")
    ended_with(experiment_dir / "treatment/seed-3", changed("a", 0, np.nan))
    yield compare_command("simulated")


@case
def times_and_hosts_apart(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated")
    for path in sorted(experiment_dir.glob("*/*/attempts/0001.json")):
        late = 80_000.0 if path.parts[-4] == "treatment" else 0.0
        edit(path, lambda content, late=late: content.update(started_s=1e9 + late, ended_s=1e9 + late + 600))
        if late:
            edit(path.parents[1] / "environment.json", lambda content: content.update(hosts=["node-2"]))
    yield compare_command("simulated")
