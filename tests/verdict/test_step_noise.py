"""The share of step noise in the spread over seeds: simulated windows whose share is known."""

import io

import numpy as np
import pytest

from abrun.recipe.claims import Primary
from abrun.report.evidence import levels, step_noise_text
from abrun.verdict.step_noise import noise_share, step_noise, variance_of_mean


def windows(rng, num_pairs, num_steps, *, autocorrelation=0.0, of_seeds=0.0, slope=0.0):
    """Return differences [P, W] of noise with sd 1, and the variance of the window's mean by it."""
    apart = np.abs(np.subtract.outer(np.arange(num_steps), np.arange(num_steps)))
    covariance = autocorrelation**apart if autocorrelation else np.eye(num_steps)
    noise = rng.standard_normal((num_pairs, num_steps)) @ np.linalg.cholesky(covariance).T
    true = covariance.mean()
    seeds = of_seeds * np.sqrt(true) * rng.standard_normal((num_pairs, 1))
    return noise + seeds + slope * np.arange(num_steps), true


@pytest.mark.parametrize("autocorrelation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("num_steps", [20, 60, 300])
def test_the_variance_of_a_window_s_mean_is_unbiased_by_trend_and_autocorrelation(num_steps, autocorrelation):
    rng = np.random.default_rng(num_steps)
    ratios = []
    for _ in range(300):
        differences, true = windows(rng, 5, num_steps, autocorrelation=autocorrelation, slope=0.1)
        ratios.append(variance_of_mean(differences)[0] / true)
    assert np.median(ratios) == pytest.approx(1.0, abs=0.12)


@pytest.mark.parametrize("num_pairs", [5, 8, 10])
@pytest.mark.parametrize(("of_seeds", "share"), [(0.0, 1.0), (1.0, 0.5), (3.0, 0.1)])
def test_the_interval_holds_the_share_and_little_noise_is_not_mentioned(num_pairs, of_seeds, share):
    rng = np.random.default_rng(num_pairs)
    drawn = [windows(rng, num_pairs, 40, autocorrelation=0.3, of_seeds=of_seeds)[0] for _ in range(400)]
    stated = [noise for differences in drawn if (noise := noise_share(differences))]
    misses = sum(not noise.interval[0] <= share <= noise.interval[1] for noise in stated)
    assert misses <= 0.1 * len(drawn) + 4 * np.sqrt(0.09 * len(drawn))
    assert len(stated) < 0.06 * len(drawn) if share == 0.1 else len(stated) > 0.1 * len(drawn)


def test_few_pairs_short_windows_and_medians_say_nothing():
    differences, _ = windows(np.random.default_rng(0), 10, 40)
    assert noise_share(differences) and not noise_share(differences[:4])
    assert not noise_share(differences[:, :14]) and not noise_share(0 * differences)
    claim = Primary(metric="train/reward", margin=0.1)
    assert step_noise(0 * differences, differences, claim) == noise_share(differences)
    assert (
        step_noise(0 * differences, differences, claim.model_copy(update={"metric": "train/grad_norm"}))
        is None
    )


def test_the_report_and_the_plan_name_the_share(simulated, judged, snapshot):
    """Arms that differ by nothing but noise from step to step."""
    from rich.console import Console

    from abrun.recorded.stored import load_experiment
    from abrun.report.planning import plan_report

    experiment_dir = simulated(
        seeds=[*range(8)],
        noise=0.0,
        steps=100,
        compare={"primary": [{"metric": "train/reward", "margin": 0.02}]},
    )
    comparison = judged(experiment_dir)
    noise = comparison.content.primaries[0].estimate.step_noise
    assert (
        noise
        and noise.share > 0.5
        and noise.worth_pairs[0] == pytest.approx(8 * noise.share / (2 - noise.share))
    )
    (said,) = step_noise_text(noise)
    assert said in levels(comparison.content)[0].text
    snapshot(said)
    console = Console(width=400, file=io.StringIO(), record=True)
    earlier = load_experiment(experiment_dir)
    console.print(plan_report("next", earlier.compare, 8, earlier=earlier))
    assert said in console.export_text()
    seeds_alone = judged(simulated(seeds=[*range(8)], noise=0.05, steps=100)).content.primaries[0]
    assert seeds_alone.estimate.step_noise is None
