"""Each verdict, and what decides it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.golden.case import case, compare_command
from tests.verdict.simulate import edit_rows, fail, write_experiment

Commands = Iterator[Sequence[str]]
TWO_CLAIMS = [
    {"metric": "train/reward", "margin": 0.02},
    {"metric": "train/entropy", "window": "steps 10-40", "margin": "5%"},
]
THREE_ARMS = {
    "baseline": {},
    "near": {"policy.logprobs.impl": "chunked"},
    "far": {"policy.dtype": "bfloat16"},
}


def set_metric(folder: Path, arm: str, metric: str, value: Any, first: int = 1, last: int = 40) -> None:
    """Give a metric one value in all runs of an arm, within some steps."""
    for run in sorted((folder / arm).glob("seed-*")):
        edit_rows(run, lambda row: row.update({metric: value}) if first <= row["step"] <= last else None)


@case
def match(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated")
    yield compare_command("simulated")
    yield ["compare", "simulated", "--json"]


@case
def match_with_figures(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", seeds=[0, 1, 2])
    yield ["compare", "simulated", "--output", "figures"]


@case
def mismatch_by_claim(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", shift=-0.1)
    yield compare_command("simulated")


@case
def mismatch_by_guard(folder: Path) -> Commands:
    set_metric(
        write_experiment(folder / "runs/simulated"), "treatment", "train/token_mult_prob_error", 1.06, 16
    )
    yield compare_command("simulated")


@case
def mismatch_by_a_treatment_that_fails(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated")
    for seed in (1, 3):
        fail(experiment_dir / f"treatment/seed-{seed}", after_steps=20)
    yield compare_command("simulated")


@case
def mismatch_by_step_one(folder: Path) -> Commands:
    set_metric(write_experiment(folder / "runs/simulated"), "treatment", "train/grad_norm", 9.0, 1, 1)
    yield compare_command("simulated")
    yield compare_command("simulated", "--no-step-one")


@case
def mismatch_by_nan(folder: Path) -> Commands:
    set_metric(write_experiment(folder / "runs/simulated"), "treatment", "train/loss", "NaN", 30)
    yield compare_command("simulated")


@case
def inconclusive_by_noise(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", noise=0.03)
    yield compare_command("simulated")
    yield ["compare", "simulated", "--allow-inconclusive"]


@case
def inconclusive_by_step_one(folder: Path) -> Commands:
    arms = {"baseline": {}, "treatment": {"policy.logprobs.impl": "chunked"}}
    experiment_dir = write_experiment(folder / "runs/simulated", arms=arms, policy={"dtype": "bfloat16"})
    set_metric(experiment_dir, "treatment", "train/token_mult_prob_error", 1.04)
    yield compare_command("simulated")


@case
def inconclusive_by_guard(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated")
    edit_rows(
        experiment_dir / "treatment/seed-3",
        lambda row: row.update({"train/token_mult_prob_error": 1.06}) if row["step"] > 15 else None,
    )
    yield compare_command("simulated")


@case
def no_claim(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", compare={})
    yield compare_command("simulated")


@case
def several_treatments(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", arms=THREE_ARMS, shift={"far": -0.1})
    yield compare_command("simulated")


@case
def several_treatments_one_open(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", arms=THREE_ARMS, shift={"near": 0.0, "far": 0.018})
    yield compare_command("simulated")


@case
def several_claims(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", compare={"claims": TWO_CLAIMS})
    yield compare_command("simulated")


@case
def declared_unpaired(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", compare={"claims": TWO_CLAIMS, "paired": False})
    yield compare_command("simulated")


@case
def two_pairs(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", seeds=[0, 1], controls={})
    yield compare_command("simulated")


@case
def one_pair(folder: Path) -> Commands:
    write_experiment(folder / "runs/simulated", seeds=[3], compare={}, controls={})
    yield compare_command("simulated")
