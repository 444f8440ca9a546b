"""`abrun power`: power and pairs from assumptions, or from what an earlier experiment measured."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from abrun.cli import app
from abrun.experiment.power import ClaimPower, Spread, assumed_spread, plan_claim_power
from abrun.logs.recorded.stored import load_experiment
from abrun.recipe.claims import Claim, Compare, NoisePrior
from abrun.report.designs import PricedDesign, measure_pair_hours, price_designs
from abrun.report.planning import PowerPlan, measure_spread
from abrun.stats.equivalence import equivalence_test
from abrun.stats.power import pairs_needed, power_at, sd_of_difference, welch_dof_per_run
from abrun.stats.sigma_margin import sigma_lower_bound
from tests.verdict.simulate import RECIPE, write_experiment


def shown(report) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report)
    return capture.get()


def reward_margin(**fields) -> Claim:
    return Claim.model_validate({"metric": "train/reward", "margin": 1.0, **fields})


def test_an_earlier_experiment_says_spread_and_correlation(simulated):
    experiment = load_experiment(simulated(seeds=list(range(8))))
    spread = measure_spread(experiment, reward_margin(margin=0.02))
    windows = {
        arm: np.array([run.series("train/reward").values[-8:].mean() for run in experiment.arm(arm).values()])
        for arm in experiment.arms
    }
    assert spread and spread.sigma == pytest.approx(windows["baseline"].std(ddof=1))
    assert spread.correlation == pytest.approx(np.corrcoef(windows["baseline"], windows["treatment"])[0, 1])
    difference = windows["treatment"] - windows["baseline"]
    assert spread.sd_difference == pytest.approx(difference.std(ddof=1))
    text = shown(
        PowerPlan("next", Compare(claims=[reward_margin(margin=0.02)]), 4, earlier=experiment).render()
    )
    assert spread.num_pairs == 8 and f"({spread.source}" in " ".join(text.split())
    assert f"upper 80 % bound, {spread.planned_sd:.3g}; " in " ".join(text.split())
    assert re.search(r"\d+ pairs \(\d+ to \d+\)", text)  # a measured spread has a range


def test_windows_are_priced_and_only_flat_ones_are_proposed(simulated):
    experiment = load_experiment(simulated(seeds=[0, 1, 2, 3]))
    config = {"cluster.nodes": 2, "cluster.gpus_per_node": 4}
    runs = {
        name: replace(run, span_s=(0.0, 3600.0 * (1 + name.seed)), runs_per_gpu=2, config=config)
        for name, run in experiment.runs.items()
    }
    experiment = replace(experiment, runs=runs)
    assert measure_pair_hours(experiment) == 2 * 2.5 * 8 / 2  # two arms, mean hours, half of eight GPUs
    unrecorded = {name: replace(run, span_s=None) for name, run in runs.items()}
    assert np.isnan(measure_pair_hours(replace(experiment, runs=unrecorded)))

    def windows(margin: float, **options) -> dict[str, PricedDesign]:
        plan = PowerPlan(
            "next", Compare(claims=[reward_margin(margin=margin)]), 4, earlier=experiment, **options
        )
        return {priced.window: priced for priced in plan.priced(plan.claims[0])}

    rising, wide = windows(1e-3), windows(9.0, hours=3.0)  # the curve climbs: flat beside a wide margin alone
    assert [*rising] and not any(priced.is_flat for priced in rising.values())
    assert {"last 20%", "last 50%", "last 90%"} == {*wide} and all(priced.is_flat for priced in wide.values())
    for window, priced in wide.items():
        spread = measure_spread(experiment, reward_margin(margin=9.0, window=window))
        assert spread and priced.sd_difference == spread.sd_difference
        assert priced.pairs_needed and priced.hours == priced.pairs_needed * 3.0 * 2
    wide_plan = PowerPlan("next", Compare(claims=[reward_margin(margin=9.0)]), 4, earlier=experiment)
    text = shown(wide_plan.render())
    assert f"Cheapest that decides: window: {next(iter(wide))}" in text and "GPU hours" in text
    on_cores = {name: replace(run, config={"cluster.gpus_per_node": 0}) for name, run in runs.items()}
    text = shown(replace(wide_plan, earlier=replace(experiment, runs=on_cores)).render())
    assert "hours" in text and "GPU" not in text


def test_settings_that_were_measured_are_priced_by_their_hours(tmp_path):
    free, recorded = (
        load_experiment(write_experiment(tmp_path / name, noise=noise, seeds=[0, 1, 2, 3]))
        for name, noise in (("free", 0.02), ("recorded", 0.004))
    )
    slow = {name: replace(run, span_s=(0.0, 36_000.0)) for name, run in recorded.runs.items()}
    fast = {name: replace(run, span_s=(0.0, 3_600.0)) for name, run in free.runs.items()}
    claim = reward_margin(margin=0.05, window="steps 30-40")
    plan = PowerPlan(
        "next",
        Compare(claims=[claim], interim=[4, 8]),
        8,
        earlier=replace(free, runs=fast),
        variants=[replace(recorded, runs=slow)],
    )
    rows = {(row.experiment, row.window): row for row in plan.priced(plan.claims[0])}
    dear, cheap = rows["recorded", claim.window], rows["free", claim.window]
    assert dear.pairs_needed and cheap.pairs_needed and dear.pairs_needed < cheap.pairs_needed
    assert (cheap.hours, dear.hours) == (2 * cheap.pairs_needed, 20 * dear.pairs_needed)
    assert plan.priced(plan.claims[0])[0].experiment == "free"
    assert replace(plan, hours=1.0).priced(plan.claims[0])[0].experiment == "recorded"
    text = shown(plan.render())
    assert re.search(r"Cheapest that decides: window: .*, trained as free", text)
    assert plan.designs and f"{2 * plan.designs.pairs_if_equal:.3g}" in text and "hours if equal" in text


def test_of_windows_that_cost_the_same_the_declared_one_is_first(simulated):
    earlier, claim = load_experiment(simulated()), reward_margin(window="last 30%")
    power = plan_claim_power(claim, Compare(claims=[claim]), Spread(sigma=1, correlation=0, sd_difference=1))
    sds = iter([3.0, 2.0, 1.0, 0.5])  # the declared window is asked for first

    def plan(_: object, __: Claim) -> tuple[Spread, ClaimPower | None]:
        return Spread(sigma=1.0, correlation=0.0, sd_difference=next(sds)), power

    first, *others = price_designs([earlier], claim, plan, 1e9, 1.0)
    assert first.window == "last 30%" and {row.pairs_needed for row in others} == {first.pairs_needed}


def test_the_noise_of_earlier_experiments_is_a_spread_and_degrees_of_freedom():
    prior = {"metric": "train/reward", "window": "last 20%", "transform": "identity", "experiments": 3}
    compare = Compare(claims=[reward_margin(margin=2.0)], noise_priors=[NoisePrior(**prior, sd=1.0, dof=4.0)])
    planned = PowerPlan("next", compare, 5).claims[0]
    assert planned.spread and planned.spread.source == "noise of 3 earlier experiments" and planned.power
    assert planned.power.power(2) == power_at(2.0, 1.0, 2, prior_dof=4.0) > 2 * power_at(2.0, 1.0, 2)
    few = Compare(claims=compare.claims, noise_priors=[NoisePrior(**prior, sd=1.0, dof=1.0)])
    (unsure,) = PowerPlan("next", few, 5).claims
    assert unsure.spread and unsure.spread.planned_sd == pytest.approx(1 / stats.chi2.ppf(0.2, 1) ** 0.5)
    designs = PowerPlan("next", compare, 3).designs
    assert designs and designs.interim[0] == 2
    no_power = PowerPlan("next", Compare(claims=compare.claims), 5).claims[0]
    assert no_power.spread is None and no_power.power is None


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"seeds": [7, 8], "steps": 80, "compare": {}}, False),
        ({"task": {"type": "arithmetic", "max_operand": 3}}, True),
        ({"algorithm": {"type": "ppo", "prompts_per_step": 4}, "model": {"path": "a/b"}}, True),
    ],
)
def test_a_spread_that_was_measured_in_other_runs_is_planned_with_and_said(
    simulated, tmp_path, monkeypatch, change, differs, snapshot
):
    recipe = tmp_path / "next.yaml"
    recipe.write_text(json.dumps({**RECIPE, "name": "next", **change}))
    monkeypatch.chdir(simulated().parent)
    found = CliRunner().invoke(app, ["power", str(recipe), "--from", "./simulated"])
    assert found.exit_code == 0 and found.stdout.startswith("next: ")
    assert bool(found.stderr) == differs
    if differs:
        snapshot(found.stderr)


@pytest.mark.parametrize("margin", [1.5, "1.5 sigma"])
def test_both_designs_are_shown_with_their_pairs(margin):
    """`tests/experiment/test_designs.py` checks the numbers."""
    claim = reward_margin(margin=margin, sigma=1.0, correlation=0.5)
    compare = Compare(claims=[claim], interim=[3, 6, 12])
    text = shown(PowerPlan("next", compare, 12).render())
    assert "interim analyses at 3, 6, 12 pairs" in text and "one analysis" in text
    assert "Interim analyses are cheaper: " in text
    plan = PowerPlan("next", compare, 12).as_json()
    designs = plan["designs"]
    assert 3 < designs["pairs_if_equal"] < designs["fixed_pairs"] < designs["pairs_at_margin"] <= 12
    undeclared = shown(PowerPlan("next", Compare(claims=[claim]), 12, seeds=range(12)).render())
    assert "launch with --seeds 0,1,2,3,4,5 --until-decided --max-seeds 1" in undeclared


def test_margins_in_sigmas_need_no_sigma():
    text = shown(PowerPlan("next", Compare(claims=[reward_margin(margin="1 sigma")]), 4).render())
    assert "margin in sigmas" in text and "22 pairs" in text


def test_a_measure_spread_of_a_margin_in_sigmas_is_planned_with_its_upper_bound(simulated, snapshot):
    """At the estimate itself, "80 %" of pilots of three and five pairs was .64 to .78 on average."""
    experiment = load_experiment(simulated(seeds=list(range(4))))
    claim = reward_margin(margin="1 sigma")
    spread = measure_spread(experiment, claim)
    assert spread and spread.law.sd_difference == pytest.approx(spread.planned_sd / (spread.sigma or 1.0))
    expected = plan_claim_power(claim, Compare(), spread)
    assert expected and expected.pairs_needed_range
    text = shown(PowerPlan("next", Compare(claims=[claim]), 4, earlier=experiment).render())
    snapshot(text.splitlines()[2])
    low, high = expected.pairs_needed_range
    assert low and expected.pairs_needed and high and low < expected.pairs_needed < high


def test_sigmas_of_a_reference_are_planned_by_the_bound_that_the_verdict_takes(tmp_path):
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"runs": [{"seed": seed} for seed in range(5)]}))
    claim = reward_margin(margin="1.5 sigma", correlation=0.8)
    expected = plan_claim_power(claim, Compare(reference=str(reference)), assumed_spread(claim, True))
    assert expected and expected.power(5) == pytest.approx(
        power_at(1.5 * sigma_lower_bound(1.0, 5), sd_of_difference(1.0, 0.8), 5)
    )
    gone = Compare(reference=str(tmp_path / "none.json"))
    assert plan_claim_power(claim, gone, assumed_spread(claim, True)) is None


def test_runs_that_are_not_paired_are_planned_as_such(simulated):
    """By Welch, without the correlation of pairs: as many as a verdict over them says are needed."""
    compare, assumed = (
        Compare(claims=[reward_margin(margin=0.1, sigma=0.1, correlation=0.9)], paired=False),
        [],
    )
    for paired in (True, False):
        told = compare.model_copy(update={"paired": paired})
        expected = plan_claim_power(
            told.claims[0], told, assumed_spread(told.claims[0], False, paired=paired)
        )
        assert expected is not None
        assumed.append(expected.pairs_needed)
    independent = pairs_needed(0.1, sd_of_difference(0.1, 0.0), dof_per_pair=welch_dof_per_run((0.1, 0.1)))
    assert assumed == [pairs_needed(0.1, sd_of_difference(0.1, 0.9)), independent]
    rng = np.random.default_rng(0)
    left, right = rng.normal(0, 0.1, (2, 800, assumed[1]))
    found = [equivalence_test(a, b, 0.1, paired=False).equivalent for a, b in zip(left, right, strict=True)]
    assert np.mean(found) == pytest.approx(expected.power(assumed[1]), abs=0.04)
    experiment = load_experiment(simulated(seeds=[*range(6)]))
    for text in (
        shown(PowerPlan("next", compare, 5).render()),
        shown(PowerPlan("next", compare, 5, earlier=experiment).render()),
        shown(
            PowerPlan(
                "next", compare.model_copy(update={"claims": [reward_margin(margin="2 sigma")]}), 5
            ).render()
        ),
    ):
        assert text.startswith("next: 5 runs ") and " unpaired" in text
        assert re.findall(r"\bpairs?\b", text) == []


def test_a_share_of_the_climb_is_planned_with_the_climb_s_own_spread(simulated):
    """By the spread of the differences alone half of the pairs were named."""
    experiment = load_experiment(simulated(seeds=list(range(8))))
    level = 0.2 * np.random.default_rng(0).standard_normal(8)
    for run in experiment.runs.values():  # a start of its own for each seed: the climbs vary, the ends do not
        run.metrics["train/reward"].values[:8] += level[run.name.seed]
    spreads = [
        measure_spread(experiment, reward_margin(margin=margin))
        for margin in ("10% of climb", "50% of climb")
    ]
    plain = measure_spread(experiment, reward_margin(margin=0.1))
    assert plain and spreads[0] and spreads[1]
    assert plain.sd_difference < spreads[0].sd_difference < spreads[1].sd_difference
    climb_sd = np.std(
        [
            run.series("train/reward").values[-4:].mean() - run.series("train/reward").values[:4].mean()
            for run in experiment.arm("baseline").values()
        ],
        ddof=1,
    )
    assert spreads[1].sd_difference == pytest.approx(0.5 * climb_sd, rel=0.2)


def test_power_of_a_share_of_the_climb_counts_the_spread_of_the_climb():
    """Before: .41 .65 .84 .99 at 3, 4, 5, 8 pairs, where .26 .50 .70 .96 match."""
    rng, share, climb = np.random.default_rng(0), 0.5, (0.15, 0.05)
    sd = np.hypot(0.045, share * climb[1])  # of difference ± share of the climb, as a long pilot measures it
    measured = Spread(sigma=None, correlation=0.0, sd_difference=float(sd), climb=climb[0])
    planned = plan_claim_power(reward_margin(margin="50% of climb"), Compare(), measured)
    assert planned
    for num_pairs in (3, 5, 8, 10):
        differences = 0.045 * rng.standard_normal((20_000, num_pairs))
        margins = share * (climb[0] + climb[1] * rng.standard_normal((20_000, num_pairs)))
        reach = stats.t.ppf(0.95, num_pairs - 1) / np.sqrt(num_pairs)
        above = [
            (each.mean(axis=1) > reach * each.std(axis=1, ddof=1))
            for each in (margins - differences, margins + differences)
        ]
        matched = np.mean(above[0] & above[1])
        assert planned.power(num_pairs) == pytest.approx(matched, abs=0.06), num_pairs
        forgetful = plan_claim_power(
            reward_margin(margin="50% of climb"), Compare(), replace(measured, sd_difference=0.045)
        )
        assert forgetful and forgetful.power(num_pairs) > planned.power(num_pairs)


def test_a_pilot_of_a_share_of_the_level_measures_the_spread_at_the_margin(simulated):
    earlier = load_experiment(simulated())
    spreads = {margin: measure_spread(earlier, reward_margin(margin=margin)) for margin in (0.1, "50%")}
    alone, at_margin = spreads[0.1], spreads["50%"]
    assert alone and at_margin and at_margin.sd_difference > 1.05 * alone.sd_difference
