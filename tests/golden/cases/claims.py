"""Claims of every kind, typed and declared, met and not met."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.golden.case import add_case, case, compare_command, compare_in_short
from tests.verdict.simulate import edit, edit_rows, write_experiment

Commands = Iterator[Sequence[str]]
CLAIMS = {
    "percent-of-level": ["train/reward:last 20%:5%", "train/reward:last 20%:0.1%"],
    "percent-of-climb": ["train/reward:last 20%:6% of climb", "train/reward:last 20%:0.1% of climb"],
    "sigma": ["train/reward:last 20%:1 sigma", "train/reward:last 20%:0.05 sigma"],
    "limits": ["train/reward:last 20%:>0.5", "train/reward:last 20%:<0.5"],
    "ratio-limits": ["timing/train/total_step_time_s:all:<1.02x", "memory:all:<0.5x"],
    "exact": ["train/entropy:all:exact", "train/reward:last 20%:exact"],
    "windows": ["train/reward:steps 10-30:0.02", "train/reward:all:0.02"],
    "log": ["train/grad_norm:last 20%:0.2"],
    "excess": ["train/token_mult_prob_error:last 20%:0.2"],
}


def _typed(claims: Sequence[str]) -> Callable[[Path], Commands]:
    def build(folder: Path) -> Commands:
        write_experiment(folder / "runs/simulated")
        for claim in claims:
            yield compare_in_short("simulated", "--claim", claim)

    return build


for _name, _claims in CLAIMS.items():
    add_case(f"claim-{_name}", _typed(_claims))


@case
def claims_declared_of_all_kinds(folder: Path) -> Commands:
    claim = [
        {"metric": "train/reward", "margin": "2 sigma"},
        {"metric": "train/reward", "window": "steps 10-40", "margin": "5%"},
        {"metric": "train/grad_norm", "margin": 0.5, "transform": "log"},
        {"metric": "train/entropy", "window": "all", "exact": True},
        {"metric": "memory", "below": "0.6x"},
        {"metric": "train/token_mult_prob_error", "below": 1.05},
    ]
    write_experiment(folder / "runs/simulated", compare={"claims": claim})
    yield compare_command("simulated")


@case
def claim_on_final_weights(folder: Path) -> Commands:
    claim = {"claims": [{"metric": "final_weights", "below": 0.05}]}
    experiment_dir = write_experiment(folder / "runs/simulated", compare=claim)
    yield compare_command("simulated")
    first = {"a": np.zeros(3), "b": np.zeros(1)}
    for seed, share in enumerate((0.02, 0.03, 0.025, 0.02, 0.03)):
        for arm, end in (("baseline", 1.0), ("treatment", 1.0 + share)):
            run = experiment_dir / f"{arm}/seed-{seed}"
            save_file(
                {name: np.full_like(one, end) for name, one in first.items()},
                run / "final-sketch.safetensors",
            )
            save_file(first, run / "initial-sketch.safetensors")
            edit(run / "result.json", lambda content, end=end: content.update(final_weights_hash=f"{end}"))
    yield compare_command("simulated")


@case
def claim_that_cannot_be_tested(folder: Path) -> Commands:
    """Of a metric that nobody records, of one that is too noisy to be close, of one at its bound."""
    claims = [
        {"metric": "train/mean_gen_tokens_per_sample", "margin": 2},
        {"metric": "train/reward", "margin": 0.02},
    ]
    experiment_dir = write_experiment(folder / "runs/simulated", compare={"claims": claims})
    yield compare_command("simulated")
    for run in experiment_dir.glob("treatment/seed-*"):
        edit_rows(run, lambda row: row.pop("train/reward"))
    yield compare_command("simulated")


@case
def post_hoc_claims(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated")
    yield compare_in_short("simulated")
    yield compare_command(
        "simulated", "--claim", "train/reward:last 20%:0.01", "--claim", "train/loss:all:0.1"
    )
    edit(experiment_dir / "experiment.json", lambda content: content.update(launched_pairs=3))
    yield compare_in_short("simulated", "--output", "more-pairs")
    edit(experiment_dir / "experiment.json", lambda content: content.update(compare_sha256="0" * 64))
    yield compare_in_short("simulated", "--output", "changed")


@case
def reward_that_never_moves(folder: Path) -> Commands:
    experiment_dir = write_experiment(folder / "runs/simulated")
    for run in experiment_dir.glob("*/seed-*"):
        edit_rows(run, lambda row: row.update({"train/reward": 0.0}))
    yield compare_in_short("simulated")
