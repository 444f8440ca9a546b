"""Frozen references, what is compared with them, and ledgers of accepted changes."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.golden.case import case, compare_command, compare_in_short
from tests.tools.drift.test_chain import FIRST, SECOND
from tests.verdict.simulate import edit, edit_rows, fail, write_experiment

Commands = Iterator[Sequence[str]]
FREEZE = ["reference", "save", "anchor", "--output", "reference.json"]
ALONE: dict[str, Any] = {"arms": {"baseline": {}}, "compare": {"reference": "reference.json"}}
AGAINST = ["--reference", "reference.json"]


def _write_later(folder: Path, name: str = "later", **scenario: Any) -> Path:
    """An experiment of one arm, whose launch has copied the reference that its recipe names."""
    experiment_dir = write_experiment(folder / f"runs/{name}", **ALONE, **scenario)
    shutil.copy(folder / "reference.json", experiment_dir)
    return experiment_dir


def _shift(experiment_dir: Path, by: float) -> None:
    for run in experiment_dir.glob("baseline/seed-?"):
        edit_rows(run, lambda row: row.update({"train/reward": row["train/reward"] + by * (row["step"] > 1)}))


@case
def reference_same_runs(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor")
    yield FREEZE
    yield compare_command("anchor", *AGAINST)
    yield compare_in_short("anchor", *AGAINST, "--arm", "baseline")
    yield compare_in_short("anchor", *AGAINST, "--arm", "treatment")
    yield compare_in_short("anchor", *AGAINST, "--arm", "nobody")
    yield compare_in_short("anchor", *AGAINST, "--arm", "baseline", "--versions-differ")


@case
def reference_against_a_regression(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor")
    yield FREEZE
    _shift(_write_later(folder), -0.1)
    yield compare_command("later", *AGAINST)


@case
def reference_of_another_version_and_fewer_seeds(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor")
    yield FREEZE
    later = _write_later(folder, seeds=[1, 3, 4])
    for path in later.glob("*/*/environment.json"):
        edit(path, lambda content: content["versions"].update(torch="2.12.0", vllm="0.27.0"))
    yield compare_command("later", *AGAINST)


@case
def reference_without_shared_seeds_or_steps(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor")
    yield FREEZE
    _write_later(folder, seeds=[7, 8])
    yield compare_command("later", *AGAINST)
    yield compare_command("later", *AGAINST, "--unpaired")
    moved = _write_later(folder, "moved")
    for run in moved.glob("baseline/seed-?"):
        edit_rows(run, lambda row: row.update(step=row["step"] + 1000))
    yield compare_command("moved", *AGAINST)


@case
def reference_that_a_recipe_names(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor")
    yield FREEZE
    _write_later(folder)
    yield compare_command("later")
    fail(folder / "runs/later/baseline/seed-2", after_steps=10)
    yield compare_command("later")


@case
def reference_refusals(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/anchor")
    yield ["reference", "save", "anchor", "--output", "reference.json", "--arm", "nobody"]
    yield ["reference", "save", "anchor", "--output", "reference.json", "--seeds", "3"]
    yield ["reference", "save", "anchor", "--output", "reference.json", "--budget", "much"]
    yield ["reference", "save", "anchor", "--output", "reference.json", "--chain-alone"]
    (folder / "taken.txt").write_text("mine\n")
    yield ["reference", "save", "anchor", "--output", "taken.txt"]
    fail(experiment_dir / "baseline/seed-2", after_steps=10)
    yield FREEZE
    yield ["compare", "anchor", "--reference", "taken.txt"]


@case
def ledger(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor", noise=0.001)
    write_experiment(folder / "runs/first", noise=0.001, arms=FIRST, shift=0.004)
    write_experiment(folder / "runs/second", noise=0.001, arms=SECOND, shift=0.004)
    write_experiment(folder / "runs/worse", noise=0.001, arms=FIRST, shift=0.1)
    yield [*FREEZE, "--budget", "0.05"]
    yield ["reference", "show", "reference.json"]
    yield ["reference", "add", "reference.json", "worse"]
    yield ["reference", "add", "reference.json", "first"]
    yield ["reference", "add", "reference.json", "first"]
    yield ["reference", "add", "reference.json", "second", "--tried", "3"]
    yield compare_in_short("second", *AGAINST, "--arm", "other")


@case
def ledger_beyond_its_budget(folder: Path) -> Commands:
    write_experiment(folder / "runs/anchor", noise=0.001)
    write_experiment(folder / "runs/first", noise=0.001, arms=FIRST, shift=0.004)
    yield [*FREEZE, "--budget", "train/reward=0.003", "--chain-alone"]
    yield ["reference", "add", "reference.json", "first"]
    yield ["reference", "show", "reference.json"]
    yield FREEZE
    yield ["reference", "show", "reference.json"]
