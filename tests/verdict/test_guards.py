"""One-sided limits and savings."""

import shutil

import numpy as np
import pytest
from scipy.stats import binom

from abrun.logs.recorded.experiment import Pair
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Compare, Guards
from abrun.runs.metric_names import STEP_TIME
from abrun.verdict.guards import check_guards, count_tests, measure_savings
from tests.replications import replicated
from tests.verdict.recorded import sides_of
from tests.verdict.simulate import edit, edit_rows

ERROR = "train/token_mult_prob_error"


def guard(comparison, name):
    return next(one for one in comparison.arms[0].select("guard") if one["guard"] == name)


def set_error(experiment_dir, arm, value, steps=range(1, 41)):
    for directory in (experiment_dir / arm).iterdir():
        edit_rows(directory, lambda row: row.update({ERROR: value}) if row["step"] in steps else None)


@pytest.mark.parametrize(("num_steps", "result"), [(4, "pass"), (5, "open")])
def test_the_share_of_steps_above_the_limit(simulated, judged, num_steps, result):
    experiment_dir = simulated()  # 200 treatment steps: 2 % are 4
    steps = range(10, 10 + num_steps)
    directory = experiment_dir / "treatment/seed-0"
    edit_rows(directory, lambda row: row.update({ERROR: 1.2}) if row["step"] in steps else None)
    one = guard(judged(experiment_dir), "token_mult_prob_error_share")
    assert (one.result, one["value"]) == (result, num_steps / 200)
    report = (experiment_dir / "report/report.md").read_text()
    assert ("token_mult_prob_error_share (at its limit)" in report) == (result == "pass")


def test_what_is_neither_claimed_nor_listed_may_be_nan(simulated, judged):
    experiment_dir = simulated()
    edit_rows(experiment_dir / "treatment/seed-2", lambda row: row.update({"train/entropy": "NaN"}))
    assert guard(judged(experiment_dir), "finite").result == "pass"
    edit(
        experiment_dir / "experiment.json",
        lambda content: content["recipe"]["compare"]["guards"].update(finite=["train/entropy"]),
    )
    assert guard(judged(experiment_dir), "finite").result == "fail"


# --- as tests: how often they alarm on equal arms, and on others ---


def guards_of(baseline, treatment, limits, metric=ERROR, paired=True):
    """The guards over arms of curves [P, S]."""
    sides = sides_of({metric: baseline}, {metric: treatment}, paired=paired)
    pairs = [
        Pair(seed=seed, baseline=left, treatment=right, reruns=())
        for seed, (left, right) in enumerate(zip(sides.baselines, sides.treatments, strict=True))
    ]
    level = limits.alpha / count_tests(Compare(guards=limits))
    savings = measure_savings("treatment", sides)
    found = check_guards("treatment", pairs, sides, limits, savings, windows=(), alpha=level)
    return {one["guard"]: one.result for one in found}


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("num_runs", "result"), [(2, "open"), (3, "fail")])
def test_two_runs_of_an_arm_fail_no_test(num_runs, result, paired):
    """Where a machine slows down half of all runs, two pairs of equal arms look alike in one of eight."""
    rng = np.random.default_rng(num_runs)
    curves = 1.01 * (1 + 1e-4 * rng.standard_normal((num_runs, 60)))
    of_time = guards_of(curves, 2 * curves, Guards(step_time_ratio=1.1), metric=STEP_TIME, paired=paired)
    assert of_time["step_time_ratio"] == result
    broken = np.where(np.arange(60) > 0, np.nan, curves)
    assert guards_of(curves, broken, Guards(), paired=paired)["token_mult_prob_error_median"] == result


@replicated(400)
@pytest.mark.parametrize("num_pairs", [3, 5, 10])
@pytest.mark.parametrize("share", [0.015, 0.03])
def test_spikes_in_equal_arms_alarm_in_no_more_than_the_guards_share(num_pairs, share, num):
    rng = np.random.default_rng([num_pairs, round(1000 * share)])
    alarms = 0
    for _ in range(num):
        seeds = rng.gamma(4, share / 4, num_pairs)[:, None]  # some seeds spike more than others
        arms = [np.where(rng.random((num_pairs, 100)) < seeds, 1.3, 1.01) for _ in range(2)]
        alarms += guards_of(arms[0], arms[1], Guards())["token_mult_prob_error_share"] == "fail"
    assert alarms <= binom.ppf(0.999, num, 0.01 / 3)


@replicated(400)
@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_step_time_at_its_limit_alarms_in_no_more_than_the_guards_share(num_pairs, num):
    rng = np.random.default_rng(num_pairs)
    limits = Guards(step_time_ratio=1.02)
    alarms, called = 0, 0
    for _ in range(num):
        slower = np.exp(0.02 * rng.standard_normal((num_pairs, 1)))
        times = np.exp(0.01 * rng.standard_normal((num_pairs, 20)))
        alarms += guards_of(times, 1.02 * slower * times, limits, STEP_TIME)["step_time_ratio"] == "fail"
        called += guards_of(times, 2 * slower * times, limits, STEP_TIME)["step_time_ratio"] == "fail"
    assert alarms <= binom.ppf(0.999, num, 0.01 / 4)
    assert called > 0.97 * num


@pytest.mark.parametrize(
    ("arms", "steps", "verdict"),
    [
        (["treatment"], range(2, 41), "MISMATCH"),
        (["baseline", "treatment"], range(1, 41), "INCONCLUSIVE"),
        (["baseline", "treatment"], range(6, 41), "INCONCLUSIVE"),
        (["baseline", "treatment"], [1], "MATCH"),  # nothing was measured there
        (["baseline"], range(2, 41), "MATCH"),
    ],
)
def test_a_token_error_that_is_nan_is_above_its_limit(simulated, judged, snapshot, arms, steps, verdict):
    experiment_dir = simulated()
    for arm in arms:
        set_error(experiment_dir, arm, "NaN", steps=steps)
    comparison = judged(experiment_dir)
    assert comparison.verdict == verdict
    unmeasured = Code.TOKEN_ERROR_NOT_MEASURED(metric=ERROR, recorded=True)
    assert (unmeasured in comparison.content.not_tested) == (len(steps) == 40)
    if verdict == "MISMATCH":
        broken = comparison.content.reasons[0]["reason"]
        assert broken.code is Code.TOKEN_ERROR_EXCEEDED and not np.isfinite(broken["value"])
        assert (broken["above"], broken["limit"]) == (None, 1.05)
        snapshot(sentence(broken))
    clean = ["train/loss", "train/grad_norm", "train/reward"]
    assert guard(comparison, "finite").reason == Code.FINITE(clean=clean, broken=[], paired=True)


def test_more_nan_than_the_baseline_has_is_new(simulated, judged, snapshot):
    experiment_dir = simulated()
    for arm, steps in (("baseline", [3]), ("treatment", range(3, 39, 2))):
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(
                directory,
                lambda row, of=steps: row.update({"train/loss": "NaN"}) if row["step"] in of else None,
            )
    one = guard(judged(experiment_dir), "finite")
    assert one.result == "fail" and one.reason.code is Code.NOT_FINITE_MORE_OFTEN
    assert (one.reason["metric"], one.reason["share"]) == ("train/loss", pytest.approx(0.45))
    snapshot(sentence(one.reason))


def test_nan_in_the_window_of_a_claim_is_never_excused(simulated, judged, snapshot):
    experiment_dir = simulated()
    for directory in (experiment_dir / "baseline").iterdir():  # early, which no claim reads
        edit_rows(directory, lambda row: row.update({"train/reward": "NaN"}) if row["step"] == 3 else None)
    for seed in (0, 2, 4):
        directory = experiment_dir / f"treatment/seed-{seed}"
        edit_rows(directory, lambda row: row.update({"train/reward": "NaN"}) if row["step"] == 36 else None)
    comparison = judged(experiment_dir)
    assert comparison.verdict == "MISMATCH"
    one = guard(comparison, "finite")
    assert (one.result, one["value"]) == ("fail", 3)
    assert (one.reason.code, one.reason["num_more"]) == (Code.FIRST_OF_SEVERAL, 2)
    first = one.reason["first"]
    assert (first.code, first["metric"], first["run"], first["step"]) == (
        Code.NOT_FINITE_IN_WINDOW,
        "train/reward",
        "treatment/seed-0",
        36,
    )
    snapshot(sentence(one.reason))


@pytest.mark.parametrize(
    ("broken", "result"),
    [
        ({"baseline": [3], "treatment": range(10, 41)}, "fail"),
        ({"baseline": [3], "treatment": [39, 40]}, "pass"),  # by chance
        ({"baseline": range(31, 41), "treatment": range(29, 41)}, "pass"),  # both arms went
        ({"baseline": [3, 17], "treatment": [5, 21, 30]}, "pass"),
    ],
)
def test_a_metric_that_stays_nan_is_new_where_the_baseline_s_recovers(
    simulated, judged, snapshot, broken, result
):
    experiment_dir = simulated(seeds=[0, 1], controls={"aa_reruns": 0})
    for arm, steps in broken.items():
        edit_rows(
            experiment_dir / f"{arm}/seed-1",
            lambda row, steps=steps: row.update({"train/loss": "NaN"}) if row["step"] in steps else None,
        )
    one = guard(judged(experiment_dir), "finite")
    assert one.result == result
    if result == "fail":
        assert one.reason.code is Code.STAYS_NOT_FINITE
        assert (one.reason["run"], one.reason["step"]) == ("treatment/seed-1", 10)
        snapshot(sentence(one.reason))


def test_where_every_treatment_was_removed_no_guard_passes(simulated, judged):
    experiment_dir = simulated()
    shutil.rmtree(experiment_dir / "treatment")
    comparison = judged(experiment_dir)
    assert comparison.verdict == "INVALID"
    finished = guard(comparison, "finished")
    assert (finished.result, finished.reason) == ("not recorded", Code.NO_RUN_ENDED(arm="treatment"))
    assert guard(comparison, "finite").result == "not recorded"


@pytest.mark.parametrize("limit", ["step_time_ratio", "peak_memory_ratio"])
def test_a_ratio_guard_without_its_metric_is_invalid(simulated, judged, limit):
    experiment_dir = simulated(compare={"claims": [], "guards": {limit: 0.9}})
    prefix = "timing" if limit == "step_time_ratio" else "memory"

    def drop(row):
        for key in [key for key in row if key.startswith(prefix)]:
            del row[key]

    edit_rows(experiment_dir / "treatment/seed-0", drop)
    comparison = judged(experiment_dir)
    assert comparison.verdict == "INVALID"
    missing = Code.METRIC_MISSING if limit == "step_time_ratio" else Code.PEAK_MEMORY_MISSING
    assert comparison.content.reasons[0].code is missing


def test_savings_are_geometric_mean_ratios(simulated, judged):
    experiment_dir = simulated(seeds=[0, 1], controls={"aa_reruns": 0})
    times = {("baseline", 0): 1.0, ("baseline", 1): 2.0, ("treatment", 0): 0.5, ("treatment", 1): 4.0}
    for (arm, seed), time in times.items():
        edit_rows(
            experiment_dir / f"{arm}/seed-{seed}",
            lambda row, time=time: row.update({"timing/train/total_step_time_s": time}),
        )
    savings = {one["quantity"]: one for one in judged(experiment_dir).arms[0].select("cost")}
    step_time = savings["step time"]
    assert step_time["ratio"] == pytest.approx(1.0)  # halved and doubled
    # log ratios -log 2 and log 2: sd sqrt(2) log 2, standard error log 2, t(0.975, 1) = 12.706
    assert step_time["ci95"] == pytest.approx((2**-12.7062, 2**12.7062), rel=1e-4)
    assert savings["peak memory, logprobs"]["ratio"] == pytest.approx(1 / 3)
    assert savings["peak memory"]["ratio"] == pytest.approx(np.sqrt(5 / 9 * (5 * 1024 + 1) / (9 * 1024 + 1)))


def test_allocator_peaks_are_never_set_against_live_tensors(simulated, judged):
    experiment_dir = simulated()

    def to_cpu(row):
        for key in [key for key in row if key.startswith("memory/")]:
            row[key.replace("peak_allocated", "peak_live_tensor")] = row.pop(key)

    for seed in range(5):
        edit_rows(experiment_dir / f"treatment/seed-{seed}", to_cpu)
    assert [one["quantity"] for one in judged(experiment_dir).arms[0].select("cost")] == ["step time"]
    for seed in range(5):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", to_cpu)
    assert "peak memory" in [one["quantity"] for one in judged(experiment_dir).arms[0].select("cost")]
