"""Transforms and window summaries by a metric's name, with numbers worked out by hand."""

import math

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import default_transform
from abrun.verdict.summaries import reduce_window, transform_values
from tests.verdict.simulate import edit_rows


@pytest.mark.parametrize(
    ("metric", "transform", "of_1_3_and_8"),
    [
        ("train/reward", "identity", 4.0),  # mean
        ("validation/accuracy", "identity", 4.0),
        ("train/grad_norm", "log", math.log(3)),  # median
        ("timing/train/total_step_time_s", "log", math.log(3)),
        ("memory/logprobs/peak_allocated_bytes", "log", math.log(24) / 3),  # mean
        ("train/token_mult_prob_error", "log_excess", math.log(2 + 1e-6)),  # median
    ],
)
def test_summary_of_a_window(metric, transform, of_1_3_and_8):
    assert default_transform(metric) == transform
    values = transform_values(np.array([[1.0, 3.0, 8.0]]), transform, metric)
    assert reduce_window(values, metric) == pytest.approx([of_1_3_and_8])


def test_exact_agreement_of_trainer_and_engine_has_a_finite_log_excess():
    assert transform_values(np.array([1.0]), "log_excess", "m") == pytest.approx([math.log(1e-6)])


@pytest.mark.parametrize(("transform", "value"), [("log", 0.0), ("log", -1.0), ("log_excess", 0.9)])
def test_values_outside_a_transform_are_refused(transform, value):
    with pytest.raises(ComparisonError, match=f"transform '{transform}' got the value {value:g}"):
        transform_values(np.array([[2.0, value]]), transform, "m")


def test_a_claim_on_a_norm_is_a_claim_on_a_ratio(simulated, judged):
    experiment_dir = simulated()
    for arm, norm in (("baseline", 2.0), ("treatment", 2.2)):
        for directory in (experiment_dir / arm).iterdir():
            spiky = {"train/grad_norm": norm}
            edit_rows(directory, lambda row, norms=spiky: row.update(norms) if row["step"] > 1 else None)
    edit_rows(experiment_dir / "treatment/seed-0", lambda row: row.update(spike(row)))
    claim = Claim(metric="train/grad_norm", margin=0.1)
    claim = judged(experiment_dir, claims=[claim]).arms[0].claims[0]
    assert claim.estimate.mean_difference == pytest.approx(
        math.log(1.1)
    )  # the spike does not move the median
    assert (claim.claim.transform, claim.claim.reduction, claim.result) == (
        "log",
        "median",
        "equivalent",
    )


def spike(row):
    return {"train/grad_norm": 500.0} if row["step"] == 38 else {}


def test_the_recipe_s_transform_rules(simulated, judged):
    claim = Claim(metric="train/grad_norm", margin=0.1, transform="identity")
    assert judged(simulated(), claims=[claim]).arms[0].claims[0].claim.transform == "identity"
