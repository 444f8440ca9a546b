"""Claims on pairs whose steps see the same rollouts."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.report.page import metric_rows
from abrun.runs.layout import RunName
from abrun.stats.series import Series
from abrun.verdict.decide import judge
from tests.replications import replicated
from tests.verdict.recorded import experiment_of, runs_of

STEPS = np.arange(1, 9)
CLAIM = Claim(metric="train/grad_norm", window="all", margin="2%", climbs=False)


def experiment(
    rng: np.random.Generator, shift: float, engine: str, *, num_apart: int = 0
) -> RecordedExperiment:
    """Gradient norms that vary widely between steps, and between the arms in some of eight steps."""
    baselines, treatments = [], []
    for _ in range(5):
        baselines.append(np.exp(0.3 * rng.standard_normal(len(STEPS))))
        noise = 0.005 * rng.standard_normal(len(STEPS))
        noise[rng.choice(len(STEPS), num_apart, replace=False)] *= 60
        treatments.append(baselines[-1] * np.exp(shift + noise))
    return sampled(baselines, treatments, engine)


def sampled(baselines: Any, treatments: Any, engine: str, sampled_by: str = "torch") -> RecordedExperiment:
    """Curves [P, S] of both arms, whose rollouts these engines gave."""
    return experiment_of(
        runs_of("baseline", {CLAIM.metric: baselines}, config={"rollout.engine": sampled_by}),
        runs_of("treatment", {CLAIM.metric: treatments}, config={"rollout.engine": engine}),
        claims=[CLAIM],
        step_one=False,
    )


@pytest.mark.parametrize(
    ("engine", "num_apart", "share"),
    [("recorded", 0, (0.9, 1.0)), ("recorded", 1, (0.0, 0.05)), ("torch", 1, (0.0, 0.3))],
)
def test_norms_are_compared_at_the_step_where_they_differ_most(
    engine: str, num_apart: int, share: tuple[float, float]
) -> None:
    rng, num = np.random.default_rng(0), 60
    judged = [judge(experiment(rng, 0.0, engine, num_apart=num_apart), [CLAIM])[0] for _ in range(num)]
    results = [arm.claims[0].result for arm in judged]
    assert share[0] <= results.count("equivalent") / num <= share[1]
    assert results.count("different") <= 8  # 5 % are 3; more than 8 have a probability below 0.1 %


def curves(factor: float, apart: np.ndarray, num_steps: int, noise: float, engine: str) -> RecordedExperiment:
    """Three pairs whose treatment is `factor` times as high at the steps marked in `apart` [P, W]."""
    rng = np.random.default_rng(7)
    arms: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for seed in range(3):
        level = np.exp(0.3 * rng.standard_normal(num_steps))
        for is_treatment, found in enumerate(arms):
            values = level * np.exp(noise * rng.standard_normal(num_steps))
            found.append(values * np.where(apart[seed] & bool(is_treatment), factor, 1.0))
    return sampled(*arms, engine)


@pytest.mark.parametrize("num_apart", [1, 2, 3])
def test_recorded_norms_of_three_times_the_size_at_some_steps_are_a_mismatch(num_apart: int) -> None:
    apart = np.tile(np.arange(8) < num_apart, (3, 1))
    verdict = judge(curves(3.0, apart, 8, 1e-4, "recorded"), [CLAIM])[0]
    assert verdict.claims[0].result == "different"
    assert verdict.claims[0].claim.reduction == "mean"


@replicated(100)
@pytest.mark.parametrize("num_pairs", [3, 5])
def test_equal_arms_whose_noise_reaches_the_margin_are_seldom_a_mismatch(num_pairs: int, num: int) -> None:
    """Of three largest differences of like size, one in four experiments has all of one sign."""
    rng = np.random.default_rng(num_pairs)
    results = []
    for _ in range(num):
        level = np.exp(0.3 * rng.standard_normal((num_pairs, 8)))
        left, right = (level * np.exp(0.014 * rng.standard_normal((num_pairs, 8))) for _ in range(2))
        recorded = sampled(left, right, "recorded", "recorded")
        claim = CLAIM.model_copy(update={"margin": "1%"})
        results.append(judge(recorded, [claim])[0].claims[0].result)
    assert results.count("different") <= binom.ppf(0.993, num, 0.04)
    assert "equivalent" not in results


@pytest.mark.parametrize(
    ("factor", "claim", "result"),
    [
        (0.3, {"not_worse": 0.2}, "holds"),  # lower is better
        (2.5, {"not_worse": 0.2}, "undecided"),  # the mean is within, that step is not
        (0.3, {"better": 0.2}, "different"),  # one step of eight is no improvement of 20 %
    ],
)
def test_one_sided_claims_look_at_losses_alone(factor: float, claim: dict, result: str) -> None:
    apart = np.tile(np.arange(8) < 1, (3, 1))
    declared = Claim(metric=CLAIM.metric, window="all", climbs=False, higher_is_better=False, **claim)
    (judged,) = judge(curves(factor, apart, 8, 1e-4, "recorded"), [declared])[0].claims
    assert judged.result == result


@pytest.mark.parametrize(("factor", "result"), [(0.1, "holds"), (10.0, "not tested")])
def test_steps_that_a_median_hides_count_in_the_direction_of_a_loss(factor: float, result: str) -> None:
    apart = np.random.default_rng(1).random((3, 100)) < 0.3
    claim = Claim(metric=CLAIM.metric, window="all", not_worse=0.2, climbs=False, higher_is_better=False)
    (judged,) = judge(curves(factor, apart, 100, 0.05, "torch"), [claim])[0].claims
    assert judged.result == result


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_sampled_norms_that_a_median_hides_prevent_a_match(share: float) -> None:
    apart = np.random.default_rng(1).random((3, 100)) < share
    claim = Claim(metric="train/grad_norm", window="all", margin=0.2, climbs=False)
    (result,) = judge(curves(10.0, apart, 100, 0.05, "torch"), [claim])[0].claims
    assert result.result == ("not tested" if share else "equivalent")
    if share:
        assert result.problem is not None and result.problem.code == Code.STEPS_APART
        assert result.problem["share"] > 0.2 and result.problem["baseline_share"] < 0.1


def test_a_difference_of_the_margin_is_rarely_called_equivalent() -> None:
    rng, num = np.random.default_rng(1), 100
    shift = float(np.log(1.02))
    results = [judge(experiment(rng, shift, "recorded"), [CLAIM])[0].claims[0].result for _ in range(num)]
    assert results.count("equivalent") <= 12  # 5 % are 5; more than 12 have a probability of 0.1 %


def test_warnings_descriptions_and_the_page_subtract_step_by_step_as_the_claim_does() -> None:
    recorded = experiment(np.random.default_rng(2), 0.0, "recorded")
    steps = np.arange(1, 41)
    rng = np.random.default_rng(3)
    for seed in range(5):
        baseline = np.exp(0.3 * rng.standard_normal(40))
        treatment = baseline * np.exp(0.001 * rng.standard_normal(40))
        for arm, values in (("baseline", baseline), ("treatment", treatment)):
            run = recorded.runs[RunName(arm=arm, seed=seed)]
            assert isinstance(run.metrics, dict)
            run.metrics[CLAIM.metric] = Series(steps, values)
    (row,) = metric_rows(recorded, [CLAIM.metric])
    assert abs(row["arms"][0]["difference"]) < 0.01
    section = judge(recorded, [])[0]
    (description,) = [each for each in section.select("description") if each["metric"] == CLAIM.metric]
    assert abs(description["difference"]) < 0.01
    claim = judge(recorded, [CLAIM])[0].claims[0]
    assert claim.result == "equivalent" and Code.DIFFERS_EARLIER not in [one.code for one in claim.warnings]
