"""Step one, divergence, and the error rates of the equivalence claim on experiments with a known truth."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.report.evidence import evidence_lines
from abrun.runs.metric_names import GEN_KL_ERROR, TOKEN_MULT_PROB_ERROR
from abrun.runs.metric_names import STEP_ONE as STEP_ONE_METRICS
from abrun.stats.many_tests import maxima_ratio_quantile
from abrun.stats.power import power_at
from abrun.verdict.claims import add_statistics, apply_holm
from abrun.verdict.decide import decide_verdict
from abrun.verdict.evidence import Evidence
from abrun.verdict.results import ClaimEstimate
from tests.reasons import only
from tests.replications import replicated
from tests.verdict import verdicts
from tests.verdict.simulate import edit, edit_rows, write_rows

# --- T1 ---


def first_step(metric, value):
    def change(row):
        if row["step"] == 1:
            row[metric] = value

    return change


def check(comparison, metric):
    return next(one for one in comparison.arms[0].select("step one") if one["metric"] == metric)


def began_after(experiment_dir, step, of="a" * 64):
    """As runs that went on from a checkpoint: their first step is a later one than 1."""
    origin = {"run": "baseline/seed-0 x", "step": step, "sha256": of}
    for run in {path.parent for path in experiment_dir.glob("*/*/metrics.jsonl")}:
        edit(run / "environment.json", lambda content: content.update(started_from=origin))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        write_rows(run, [row for row in rows if row["step"] > step])


def test_the_first_step_after_a_shared_checkpoint_is_step_one(simulated, judged):
    experiment_dir = simulated()
    began_after(experiment_dir, 10)
    assert check(judged(experiment_dir), "train/grad_norm")["step"] == 11
    edit(experiment_dir / "treatment/seed-1/environment.json", lambda content: content.pop("started_from"))
    (reason,) = judged(experiment_dir).content.reasons
    assert (reason.code, reason["key"]) == (Code.ENVIRONMENT_DIFFERS, "started_from")
    assert reason["baseline"] == "baseline/seed-1"


@pytest.mark.parametrize(("deviation", "passes"), [(0.9e-4, True), (1.1e-4, False)])
def test_float32_may_round_a_metric_by_1e_4(simulated, judged, deviation, passes):
    experiment_dir = simulated()
    for arm, value in (("baseline", 2.0), ("baseline", 2.0), ("treatment", 2.0 * (1 + deviation))):
        edit_rows(experiment_dir / f"{arm}/seed-2", first_step("train/grad_norm", value))
    one = check(judged(experiment_dir), "train/grad_norm")
    assert one.result == ("pass" if passes else "fail")
    assert (one["tolerance"], one["tolerance_from"], one["seed"]) == (1e-4, "rounding of float32", 2)


def test_the_coarsest_dtype_sets_the_rounding(simulated, judged):
    arms = {"baseline": {}, "treatment": {"policy.dtype": "bfloat16"}}
    one = check(judged(simulated(arms=arms)), "train/grad_norm")
    assert (one["tolerance"], one["tolerance_from"]) == (2e-2, "rounding of bfloat16")


@pytest.mark.parametrize(("treatment", "result"), [(1.02, "pass"), (3.0, "fail")])
def test_what_the_machine_s_own_reruns_do_is_tolerated(simulated, judged, treatment, result):
    experiment_dir = simulated(controls={"aa_reruns": 10})
    for seed in range(5):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step("train/grad_norm", 1.0))
        for rerun in (1, 2):
            edit_rows(experiment_dir / f"baseline/seed-{seed}-aa{rerun}", first_step("train/grad_norm", 0.99))
        edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step("train/grad_norm", 1.0))
    edit_rows(experiment_dir / "treatment/seed-1", first_step("train/grad_norm", treatment))
    one = check(judged(experiment_dir), "train/grad_norm")
    factor = maxima_ratio_quantile(5, 10, 0.01 / 4 / len(STEP_ONE_METRICS))
    assert one["aa_deviation"] == pytest.approx(0.01) and 2 < factor < 4
    assert one["tolerance"] == pytest.approx(0.01 * factor)
    assert one["tolerance_from"] == f"{factor:.3g}x the largest A/A deviation of 10"
    assert one.result == result


def test_reruns_too_few_to_bound_anything_are_said(simulated, judged, snapshot):
    experiment_dir = simulated(controls={"aa_reruns": 1})
    edit_rows(experiment_dir / "baseline/seed-0-aa1", first_step("train/grad_norm", 0.5))
    edit_rows(experiment_dir / "treatment/seed-0", first_step("train/grad_norm", 0.6))
    unsettled = judged(experiment_dir).content.not_tested[0]
    assert unsettled.code is Code.STEP_ONE_NOT_SETTLED and unsettled["tolerance"] > 1
    assert (unsettled["metric"], unsettled["seed"]) == ("train/grad_norm", 0)
    snapshot(sentence(unsettled))


@pytest.mark.parametrize(("num_pairs", "num_reruns"), [(3, 1), (5, 3), (10, 2)])
def test_the_factor_of_maxima_is_the_quantile_of_drawn_ones(num_pairs, num_reruns):
    rng = np.random.default_rng(3)
    pairs = np.abs(rng.standard_normal((200_000, num_pairs))).max(axis=1)
    reruns = np.abs(rng.standard_normal((200_000, num_reruns))).max(axis=1)
    beyond = np.mean(pairs > maxima_ratio_quantile(num_pairs, num_reruns, 0.01) * reruns)
    assert beyond == pytest.approx(0.01, abs=4 * np.sqrt(0.01 * 0.99 / 200_000))


BF16 = {"arms": {"baseline": {}, "treatment": {"policy.dtype": "bfloat16"}}, "controls": {"aa_reruns": 0}}


def test_a_bf16_deviation_that_rounding_alone_may_cause_is_not_tested(simulated, judged, snapshot):
    """PPO in bf16 on two backends: the gradient norms of one seed differ by 4 %, of others by 0.6 and 0.1."""
    experiment_dir = simulated(**BF16, seeds=[0, 1, 2])
    for seed, deviation in enumerate((0.006, -0.001, 0.042)):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step("train/grad_norm", 1.0))
        edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step("train/grad_norm", 1.0 + deviation))
    comparison = judged(experiment_dir)
    assert check(comparison, "train/grad_norm").result == "not tested"
    assert comparison.verdict == "MATCH"
    unsettled = only(comparison.content.not_tested, Code.STEP_ONE_NOT_SETTLED)
    assert (unsettled["metric"], unsettled["tolerance"]) == ("train/grad_norm", 0.02)
    assert not unsettled["raised_by_rounding"] and unsettled["has_recipe"]
    snapshot(sentence(unsettled))
    snapshot(dict(evidence_lines(comparison.content))["step one"])


@pytest.mark.parametrize("deviations", [(0.10, 0.101, 0.099), (0.0, 0.0, 0.6)])
def test_a_bf16_deviation_of_all_seeds_alike_or_a_gross_one_fails(simulated, judged, deviations):
    experiment_dir = simulated(**BF16, seeds=[0, 1, 2])
    for seed, deviation in enumerate(deviations):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step("train/grad_norm", 1.0))
        edit_rows(
            experiment_dir / f"treatment/seed-{seed}", first_step("train/grad_norm", 1.0 / (1 - deviation))
        )
    comparison = judged(experiment_dir)
    assert (check(comparison, "train/grad_norm").result, comparison.verdict) == ("fail", "MISMATCH")


@pytest.mark.parametrize(
    ("metric", "left", "right", "gross"),
    [(GEN_KL_ERROR, 2e-4, 1.8e-3, 0.2), (TOKEN_MULT_PROB_ERROR, 1.0, 1.03, 2.2)],
)
@pytest.mark.parametrize("aa_reruns", [0, 1])
def test_what_rounding_raises_is_no_mismatch_and_no_match(
    simulated, judged, metric, left, right, gross, aa_reruns
):
    """PPO in bf16 on two backends, one of which rounds as the engine does, as its own reruns do."""
    controls = {"aa_reruns": aa_reruns}
    experiment_dir = simulated(policy={"dtype": "bfloat16"}, controls=controls, seeds=[0, 1, 2])

    def change(arm, value):
        for seed in range(3):
            edit_rows(experiment_dir / f"{arm}/seed-{seed}", first_step(metric, value * (1 + 1e-4 * seed)))

    change("baseline", left)
    for seed in range(aa_reruns):
        edit_rows(experiment_dir / f"baseline/seed-{seed}-aa1", first_step(metric, left * 1.01))
    change("treatment", right)
    comparison = judged(experiment_dir)
    assert (check(comparison, metric).result, comparison.verdict) == ("open", "INCONCLUSIVE")
    assert comparison.content.reasons[0].code is Code.STEP_ONE_OPEN
    steps = [one.command for one in comparison.next_steps]
    assert "--set policy.dtype=float32 --set steps=1" in steps[0] and '"step_one_tolerance"' in steps[1]
    edit_rows(experiment_dir / "treatment/seed-1", first_step(metric, right + gross))
    assert check(judged(experiment_dir), metric).result == "fail"
    change("baseline", right)
    change("treatment", left)  # it agrees better
    for seed in range(aa_reruns):
        edit_rows(experiment_dir / f"baseline/seed-{seed}-aa1", first_step(metric, right * 1.01))
    comparison = judged(experiment_dir)
    assert (check(comparison, metric).result, comparison.verdict) == ("not tested", "MATCH")


@pytest.mark.parametrize(
    ("raised", "result"), [([0.04] * 4 + [-0.45], "open"), ([0.0] * 4 + [0.25], "not tested")]
)
def test_one_pair_neither_hides_what_is_raised_nor_is_it(simulated, judged, raised, result):
    experiment_dir = simulated(**BF16)
    for seed, nats in enumerate(raised):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step(GEN_KL_ERROR, 0.5**2 / 2))
        edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step(GEN_KL_ERROR, (0.5 + nats) ** 2 / 2))
    comparison = judged(experiment_dir)
    assert check(comparison, GEN_KL_ERROR).result == result
    unsettled = [one for one in comparison.content.not_tested if one.code is Code.STEP_ONE_NOT_SETTLED]
    assert all(reason["raised_by_rounding"] for reason in unsettled)
    assert bool(unsettled) == (result == "not tested")


def test_what_is_open_at_a_look_is_so_by_its_own_pairs(simulated, judged):
    compare = {"claims": [{"metric": "train/reward", "margin": 0.02}], "interim": [2, 5]}
    for raised in ((0, 1), (2, 3, 4)):
        experiment_dir = simulated(**BF16, compare=compare)
        for seed in range(5):
            edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step(GEN_KL_ERROR, 2e-4))
            value = 1.8e-3 if seed in raised else 2e-4
            edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step(GEN_KL_ERROR, value))
        verdicts = [look.verdict for look in judged(experiment_dir).arms[0].interim_analyses]
        assert verdicts == (["INCONCLUSIVE", "MATCH"] if 0 in raised else ["MATCH", None])


def test_a_tolerance_of_one_metric_alone(simulated, judged):
    claim, tolerance = {"metric": "train/reward", "margin": 0.02}, {GEN_KL_ERROR: 0.05}
    compare = {"claims": [claim], "step_one_tolerance": tolerance}
    experiment_dir = simulated(**BF16, seeds=[0, 1, 2], compare=compare)
    for seed in range(3):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step(GEN_KL_ERROR, 2e-4))
        edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step(GEN_KL_ERROR, 1.8e-3))
    comparison = judged(experiment_dir)
    assert (check(comparison, GEN_KL_ERROR)["tolerance_from"], comparison.verdict) == ("recipe", "MATCH")
    assert check(comparison, "train/grad_norm")["tolerance"] == 0.02
    for seed in range(3):
        edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step(TOKEN_MULT_PROB_ERROR, 1.04))
    edit_rows(experiment_dir / "baseline/seed-2", first_step("train/grad_norm", 1.0))
    edit_rows(experiment_dir / "treatment/seed-2", first_step("train/grad_norm", 1.1))
    (step,) = judged(experiment_dir).next_steps  # not in float32: the arm's dtype is what is tested
    assert '"train/gen_kl_error": 0.05, "train/token_mult_prob_error": 0.0' in step.command
    assert "grad_norm" not in step.command and step.text.endswith(": train/grad_norm)")


@pytest.mark.parametrize(
    ("advantage", "scale", "passes"), [(None, 1.0, True), (2.0, 2.0, True), (0.01, 0.01, False)]
)
def test_a_loss_near_zero_is_measured_by_the_advantages_that_cancel(
    simulated, judged, advantage, scale, passes, snapshot
):
    experiment_dir = simulated()
    for arm, loss in (("baseline", 1e-9), ("treatment", 5e-5)):
        directory = experiment_dir / f"{arm}/seed-3"  # seeds 0 and 1 have reruns
        edit_rows(directory, first_step("train/loss", loss))
        if advantage is not None:
            edit_rows(directory, lambda row: row.update({"train/advantages/min": -advantage}))
            edit_rows(directory, lambda row: row.update({"train/advantages/max": 0.0}))
    found = judged(experiment_dir)
    one = check(found, "train/loss")
    assert one.result == ("pass" if passes else "fail") and one["scale"] == pytest.approx(scale)
    assert one["deviation"] == pytest.approx(abs(one["treatment"] - one["baseline"]) / one["scale"])
    snapshot(dict(evidence_lines(found.content))["step one"])
    if not passes:
        reason = only(found.content.reasons, Code.STEP_ONE_DIFFERS)
        assert (reason["deviation"], reason["tolerance"]) == (one["deviation"], 1e-4)
        snapshot(sentence(reason))


@pytest.mark.parametrize(("kl_error", "passes"), [(4e-13, True), (3e-9, True), (8e-9, False)])
def test_gen_kl_error_is_read_as_the_logprob_error_it_is_the_square_of(simulated, judged, kl_error, passes):
    experiment_dir = simulated()  # sqrt(2 * 5e-9) is 1e-4, the rounding of float32
    for arm, value in (("baseline", 1e-13), ("treatment", kl_error)):
        for directory in (experiment_dir / arm).iterdir():
            edit_rows(directory, lambda row, value=value: row.update({"train/gen_kl_error": value}))
    comparison = judged(experiment_dir)
    assert check(comparison, "train/gen_kl_error").result == ("pass" if passes else "fail")
    assert divergence(comparison, "train/gen_kl_error")["mean_difference"] == pytest.approx(kl_error - 1e-13)


@pytest.mark.parametrize(
    ("kl_error", "passes"), [(3e-9, True), (-3e-9, True), ("NaN", False), ("Infinity", False)]
)
def test_gen_kl_error_below_zero_is_rounding_and_nan_is_not(simulated, judged, kl_error, passes):
    experiment_dir = simulated()
    for seed in range(5):
        edit_rows(experiment_dir / f"baseline/seed-{seed}", first_step("train/gen_kl_error", -1e-9))
        edit_rows(experiment_dir / f"treatment/seed-{seed}", first_step("train/gen_kl_error", -1e-9))
    edit_rows(experiment_dir / "treatment/seed-3", first_step("train/gen_kl_error", kl_error))
    assert check(judged(experiment_dir), "train/gen_kl_error").result == ("pass" if passes else "fail")


def test_a_crashed_treatment_s_first_step_still_counts(simulated, judged):
    experiment_dir = simulated()
    edit_rows(experiment_dir / "treatment/seed-4", first_step("train/entropy", 9.0))
    (experiment_dir / "treatment/seed-4/result.json").unlink()
    edit(
        experiment_dir / "treatment/seed-4/attempts/0001.json",
        lambda content: content.update(status="failed"),
    )
    comparison = judged(experiment_dir)
    assert check(comparison, "train/entropy")["seed"] == 4
    codes = {reason.code for reason in comparison.content.reasons}
    assert codes == {Code.STEP_ONE_DIFFERS, Code.GUARD_FAILS}


# --- T2 ---


def divergence(comparison, metric="train/reward"):
    return next(one for one in comparison.arms[0].select("divergence") if one["metric"] == metric)


def constant_runs(experiment_dir, values):
    """Runs whose reward is a constant plus what `values` adds from step 20 on."""
    for name, (early, late) in values.items():
        path = experiment_dir / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["train/reward"] = 0.5 + (late if row["step"] >= 20 else early)
        write_rows(path.parent, rows)


def test_divergence_is_measured_against_the_noise_floor(simulated, judged):
    experiment_dir = simulated(seeds=[0, 1], controls={"aa_reruns": 1})
    arms = {"baseline/seed-0": (0, 0), "baseline/seed-1": (0, 0), "baseline/seed-0-aa1": (0.01, 0.01)}
    constant_runs(
        experiment_dir, {**arms, "treatment/seed-0": (0.005, 0.03), "treatment/seed-1": (0.005, 0.03)}
    )
    one = divergence(judged(experiment_dir))
    assert (one["noise_floor"], one["first_step_apart"]) == ("measured", None)
    assert one["aa_mean_difference"] == pytest.approx(0.01)
    assert one["mean_difference"] == pytest.approx((0.005 * 19 + 0.03 * 21) / 40)
    assert one["ratio"] == pytest.approx(one["mean_difference"] / 0.01)


def test_a_baseline_that_repeats_itself_has_a_floor_of_zero(simulated, judged, snapshot):
    experiment_dir = simulated(seeds=[0, 1], controls={"aa_reruns": 1})
    constant_runs(experiment_dir, {"baseline/seed-0": (0, 0), "baseline/seed-0-aa1": (0, 0)})
    constant_runs(experiment_dir, {"treatment/seed-0": (0, 0.03), "baseline/seed-1": (0.01, 0.01)})
    constant_runs(experiment_dir, {"treatment/seed-1": (0.01, 0.01)})
    comparison = judged(experiment_dir)
    one = divergence(comparison)
    assert (one["noise_floor"], one["ratio"], one["first_step_apart"]) == ("zero", None, 20)
    snapshot(dict(evidence_lines(comparison.content))["divergence"])


# --- T3: error rates over simulated experiments ---

STEP_ONE = Evidence(kind="step one", arm="treatment", result="pass", values={"metric": "train/reward"})


def claim(name="train/reward", margin=1.0):
    terms = {"margin": margin, "margin_number": margin, "alpha_difference": 0.04, "num_pairs": 6}
    return replace(
        verdicts.claim(name, seeds=tuple(range(6)), **terms), estimate=ClaimEstimate(), result="not tested"
    )


def rates(shift, num, *, num_claims=1, sd=0.7, num_pairs=6, seed=11, margin=1.0):
    """Verdicts over experiments whose paired differences have mean `shift` (in margins) and the given sd."""
    rng = np.random.default_rng(seed)
    reason = Code.FINITE(clean=[], broken=[], paired=True)
    passing = Evidence(
        kind="guard",
        arm="treatment",
        result="pass",
        reason=reason,
        values={"guard": "finite", "limit": 0, "value": 0},
    )
    found = []
    for _ in range(num):
        results = []
        for number in range(num_claims):
            baseline = rng.normal(5, 2, num_pairs)
            treatment = baseline + rng.normal(shift, sd, num_pairs)
            results.append(add_statistics(claim(f"m{number}", margin), baseline, treatment))
        found.append(decide_verdict([], [STEP_ONE, passing], apply_holm(results))[0])
    return {verdict: found.count(verdict) for verdict in ("MATCH", "MISMATCH", "INCONCLUSIVE")}


def rare(num, rate=0.05):
    """A count that an event of this rate exceeds once in a thousand tries."""
    return binom.ppf(0.999, num, rate)


@replicated(400)
def test_equal_arms_match_as_often_as_the_power_says(num):
    counts = rates(0.0, num)
    expected = power_at(1.0, 0.7, 6)
    assert counts["MATCH"] / num == pytest.approx(expected, abs=4 * np.sqrt(0.25 / num))
    assert counts["MISMATCH"] <= rare(num, 0.01)  # needs p < alpha and a mean beyond the margin


@replicated(400)
@pytest.mark.parametrize("num_pairs", [2, 3, 6, 15])
@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_a_difference_of_the_margin_is_called_either_way_at_most_as_often_as_alpha(shift, num_pairs, num):
    assert rates(shift, num, sd=0.3, num_pairs=num_pairs)["MATCH"] <= rare(num)
    assert rates(shift, num, sd=0.7, num_pairs=num_pairs)["MISMATCH"] <= rare(num)


@replicated(400)
def test_arms_that_differ_by_twice_the_margin_are_called_different(num):
    counts = rates(2.0, num)
    assert counts["MATCH"] == 0
    assert counts["MISMATCH"] > 0.85 * num  # of the margin exceeded, not only of a difference


@replicated(400)
def test_many_claims_do_not_make_false_mismatches(num):
    # A tiny margin leaves only the test of difference: without Holm 23 % of these would be mismatches.
    assert rates(0.0, num, num_claims=5, sd=1.0, seed=5, margin=1e-9)["MISMATCH"] <= rare(num)


def test_holm_counts_every_tested_claim():
    def tested(name, p):
        differences = np.array([1.0, 2.0, 3.0, 2.5])
        result = add_statistics(claim(name), np.zeros(4), differences)
        return replace(result, estimate=replace(result.estimate, p_difference=p, p_beyond=p))

    results = apply_holm([tested("a", 0.01), tested("b", 0.04), tested("c", 0.03), claim("untested")])
    assert [result.estimate.p_difference_holm for result in results[:3]] == pytest.approx([0.03, 0.06, 0.06])
    assert [result.result for result in results] == ["different", "undecided", "undecided", "not tested"]
