"""Interim analyses: declared looks, those to come, and what status and plan say of an experiment."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.golden.case import case, compare_command
from tests.golden.cases.verdicts import THREE_ARMS
from tests.verdict.simulate import RECIPE, edit, edit_rows, fail, write_experiment
from tests.verdict.test_sequential import LOOKS, to_come, unfinished

Commands = Iterator[Sequence[str]]


@case
def interim_decided_early(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated", compare=LOOKS)
    unfinished(experiment_dir, 3, 4)
    yield compare_command("simulated")


@case
def interim_not_decided_early(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated", compare=LOOKS, noise=0.02)
    to_come(experiment_dir, 3, 4)
    yield compare_command("simulated")


@case
def interim_all_taken(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", compare=LOOKS, noise=0.02)
    yield compare_command("simulated")


@case
def interim_before_the_first(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated", compare=LOOKS)
    unfinished(experiment_dir, 2, 3, 4)
    yield compare_command("simulated")


@case
def interim_first_decision_stands(folder: Path) -> Commands:
    compare = {**LOOKS, "alpha_spending": "rising"}
    experiment_dir = write_experiment(folder / "runs/simulated", compare=compare)
    for seed in (3, 4):
        edit_rows(
            experiment_dir / f"treatment/seed-{seed}",
            lambda row: row.update({"train/reward": row["train/reward"] + 0.1 * (row["step"] > 1)}),
        )
    yield compare_command("simulated")
    fail(experiment_dir / "treatment/seed-4", after_steps=20)
    yield compare_command("simulated")


@case
def interim_of_several_treatments(folder: Path) -> Commands:
    shift = {"near": 0.0, "far": 0.018}
    experiment_dir = write_experiment(folder / "runs/simulated", arms=THREE_ARMS, compare=LOOKS, shift=shift)
    to_come(experiment_dir, 3, 4)
    yield compare_command("simulated")


@case
def interim_with_step_one_open(folder: Path) -> Commands:
    arms = {"baseline": {}, "treatment": {"policy.logprobs.impl": "chunked"}}
    experiment_dir = write_experiment(
        folder / "runs/simulated", arms=arms, policy={"dtype": "bfloat16"}, compare=LOOKS, shift=0.018
    )
    to_come(experiment_dir, 3, 4)
    for seed in range(3):
        edit_rows(
            experiment_dir / f"treatment/seed-{seed}",
            lambda row: row.update({"train/token_mult_prob_error": 1.04}),
        )
    yield compare_command("simulated")


@case
def status_of_finished_failed_and_waiting_runs(folder: Path) -> Commands:
    write_experiment(folder / "runs/finished", seeds=[0, 1])
    mixed = write_experiment(folder / "runs/mixed", seeds=[0, 1, 2])
    fail(mixed / "treatment/seed-1", after_steps=10)
    to_come(mixed, 2)
    unfinished(mixed, 0)
    yield ["status"]
    yield ["status", "finished"]
    yield ["status", "mixed"]
    yield ["status", "--json"]
    yield ["status", "mixed", "--json"]
    yield ["status", "nowhere"]
    yield ["logs", "mixed"]
    yield ["logs", "mixed/treatment/seed-1"]


@case
def plan(folder: Path) -> Commands:
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    write_experiment(folder / "runs/pilot", noise=0.02)
    yield ["power", "recipe.yaml"]
    yield ["power", "recipe.yaml", "--sigma", "0.02", "--correlation", "0.8"]
    yield ["power", "recipe.yaml", "--sigma", "0.05", "--max-seeds", "12"]
    yield ["power", "recipe.yaml", "--from", "pilot"]
    yield ["power", "recipe.yaml", "--from", "pilot", "--json"]
    yield ["power", "--from", "pilot", "--set", "compare.claims.0.margin=0.1"]
    yield ["power", "--from", "pilot", "--set", "compare.claims.0.margin=5%"]
    yield ["power", "--from", "pilot", "--set", "steps=60"]
    yield ["power", "--from", "pilot", "--sigma", "0.1"]
    yield ["power", "recipe.yaml", "--sigma", "inf"]
    yield ["power"]
    edit(folder / "runs/pilot/experiment.json", lambda content: content["recipe"].update(compare={}))
    yield ["power", "--from", "pilot"]
    for run in sorted((folder / "runs/pilot").glob("treatment/*")):
        shutil.rmtree(run)
    yield ["power", "--from", "pilot"]
