"""Claims on pairs whose steps see the same rollouts."""

import numpy as np
import pytest

from abrun.reasons import Code
from abrun.recipe.claims import Claim, Compare
from abrun.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.report.page.metrics import metric_rows
from abrun.runs.layout import RunName
from abrun.stats.series import Series
from abrun.verdict.decide import judge

STEPS = np.arange(1, 9)
CLAIM = Claim(metric="train/grad_norm", window="all", margin="2%", climbs=False)


def experiment(rng: np.random.Generator, shift: float, engine: str) -> RecordedExperiment:
    """Gradient norms that vary widely between steps, and between the arms in two of eight steps."""
    runs = []
    for seed in range(5):
        baseline = np.exp(0.3 * rng.standard_normal(len(STEPS)))
        noise = 0.005 * rng.standard_normal(len(STEPS))
        noise[rng.choice(len(STEPS), 2, replace=False)] *= 60
        treatment = baseline * np.exp(shift + noise)
        for arm, values in (("baseline", baseline), ("treatment", treatment)):
            config = {"rollout.engine": engine if arm == "treatment" else "torch"}
            metrics = {CLAIM.metric: Series(STEPS, values)}
            name = RunName(arm=arm, seed=seed)
            run = RecordedRun(name=name, place="simulated", status="finished", config=config, metrics=metrics)
            runs.append(run)
    return RecordedExperiment(
        name="recorded",
        runs={run.name: run for run in runs},
        arms=("baseline", "treatment"),
        compare=Compare(claims=[CLAIM], step_one=False),
    )


@pytest.mark.parametrize(("engine", "share"), [("recorded", (0.95, 1.0)), ("torch", (0.0, 0.3))])
def test_medians_are_those_of_the_differences_at_each_step(engine: str, share: tuple[float, float]) -> None:
    rng, num = np.random.default_rng(0), 60
    results = [judge(experiment(rng, 0.0, engine), [CLAIM])[0].claims[0].result for _ in range(num)]
    assert share[0] <= results.count("equivalent") / num <= share[1]


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
        # Two steps of five are far lower, which moves the median of a curve, and not that of differences
        noise = np.exp(0.001 * rng.standard_normal(40))
        treatment = baseline * np.where(np.isin(steps % 5, (1, 3)), 0.7, noise)
        for arm, values in (("baseline", baseline), ("treatment", treatment)):
            run = recorded.runs[RunName(arm=arm, seed=seed)]
            assert isinstance(run.metrics, dict)
            run.metrics[CLAIM.metric] = Series(steps, values)
    (row,) = metric_rows(recorded, [CLAIM.metric])
    assert abs(row["arms"][0]["difference"]) < 0.01
    section = judge(recorded, [])[0]
    (description,) = [each for each in section.descriptions if each.metric == CLAIM.metric]
    assert abs(description.difference) < 0.01
    claim = judge(recorded, [CLAIM])[0].claims[0]
    assert claim.result == "equivalent" and Code.DIFFERS_EARLIER not in [one.code for one in claim.warnings]
