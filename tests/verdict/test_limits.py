"""Claims that are no equivalence: limits on levels and ratios, relative margins, bit-exactness."""

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from abrun.errors import RecipeError
from abrun.logs.recorded.experiment import RecordedRun, Sides
from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim, claim_option, describe_claim, parse_claim
from abrun.stats.equivalence import equivalence_test, limit_test
from abrun.verdict.limits import judge_limit
from abrun.verdict.outcomes import outcome_reason
from abrun.verdict.results import ErrorRates
from tests.replications import replicated
from tests.verdict.recorded import run_of, sides_of
from tests.verdict.simulate import edit, edit_rows

REWARD, MEMORY, STEP_TIME = "train/reward", "memory", "timing/train/total_step_time_s"


def verdict_of(comparison):
    return comparison.verdict, comparison.arms[0].claims[0].result


def first_reason(comparison):
    return comparison.content.reasons[0]


def test_the_peak_of_one_phase_has_a_level(simulated, judged):
    claim = Claim(metric="memory/logprobs/peak_allocated_bytes", below=2.1 * 2**30)
    assert verdict_of(judged(simulated(), claims=[claim])) == ("PASS", "holds")


@pytest.mark.parametrize(
    "claim",
    [
        {"metric": STEP_TIME, "below": "1.02x"},
        {"metric": STEP_TIME, "margin": "50%"},
        {"metric": MEMORY, "below": "0.6x"},
    ],
)
def test_no_time_of_runs_that_shared_gpus_is_judged(simulated, judged, claim, snapshot):
    directory = simulated()
    launches = {"launches": [{"runs_per_gpu": 4, "mps": True}, {"runs_per_gpu": 2}]}
    (directory / "treatment" / "seed-1" / "launch.json").write_text(json.dumps(launches))
    comparison = judged(directory, claims=[Claim.model_validate(claim)])
    expected = "holds" if claim["metric"] == MEMORY else "not tested"
    assert verdict_of(comparison)[1] == expected
    assert comparison.verdict == ("PASS" if expected == "holds" else "INCONCLUSIVE")
    quantities = {saving["quantity"] for saving in comparison.content.select("cost")}
    assert "step time" not in quantities and "peak memory" in quantities
    assert Code.GPUS_SHARED(runs_per_gpu=4) in comparison.content.notes
    snapshot(sentence(first_reason(comparison)))


def ended_apart(experiment_dir, share_of_seed):
    """The baseline moves by 1 in each of four numbers; the treatment ends so far from it."""
    first = {"a": np.zeros(3), "b": np.zeros(1)}
    for seed, share in share_of_seed.items():
        for arm, end in (("baseline", 1.0), ("treatment", 1.0 + share)):
            folder = experiment_dir / f"{arm}/seed-{seed}"
            last = {name: np.full_like(one, end) for name, one in first.items()}
            save_file(last, folder / "final-sketch.safetensors")
            save_file(first, folder / "initial-sketch.safetensors")
            edit(folder / "result.json", lambda content, end=end: content.update(final_weights_hash=f"{end}"))


def test_final_weights_may_be_limited_in_units_of_how_far_the_baseline_moved(simulated, judged, snapshot):
    experiment_dir = simulated()
    shares = dict(enumerate((0.02, 0.03, 0.025, 0.02, 0.03)))
    claim = [parse_claim("final_weights:all:<0.05")]
    assert first_reason(judged(experiment_dir, claims=claim)).code == Code.CLAIM_NOT_TESTED
    ended_apart(experiment_dir, shares)
    comparison = judged(experiment_dir, claims=claim)
    assert comparison.verdict == "MATCH"
    (found,) = comparison.arms[0].claims
    values = np.array(list(shares.values()))
    reach = 2.131847 * values.std(ddof=1) / math.sqrt(5)
    assert found.estimate.limited == pytest.approx(0.025, rel=1e-5)
    assert found.estimate.limited_interval[1] == pytest.approx(0.025 + reach, rel=1e-4)
    assert first_reason(comparison)["measure"] == "distance"
    snapshot(sentence(first_reason(comparison)))
    for limit, verdict in ((0.0265, "INCONCLUSIVE"), (0.01, "MISMATCH")):
        tighter = [Claim(metric="final_weights", below=limit)]
        assert verdict_of(judged(experiment_dir, claims=tighter))[0] == verdict
    ended_apart(experiment_dir, {0: 0.0})
    (found,) = judged(experiment_dir, claims=claim).arms[0].claims
    assert found.estimate.limited == pytest.approx(0.105 / 5, rel=1e-5) and found.result == "holds"
    ended_apart(experiment_dir, dict.fromkeys(range(5), 0.0))
    assert verdict_of(judged(experiment_dir, claims=claim))[0] == "MATCH"


def test_a_tensor_counts_by_its_norm_and_without_sketches_nothing_is_said(simulated, judged):
    experiment_dir = simulated()
    ended_apart(experiment_dir, dict.fromkeys(range(5), 0.5))
    for seed in range(5):
        last = {"a": np.full(3, 1.0), "b": np.full(1, 1.5)}
        save_file(last, experiment_dir / f"treatment/seed-{seed}/final-sketch.safetensors")
    claim = [Claim(metric="final_weights", below=0.3)]
    (found,) = judged(experiment_dir, claims=claim).arms[0].claims
    assert found.estimate.limited == pytest.approx(0.5 * math.sqrt(1 / 4))
    (experiment_dir / "baseline/seed-2/initial-sketch.safetensors").unlink()
    comparison = judged(experiment_dir, claims=claim)
    assert comparison.verdict == "INCONCLUSIVE" and first_reason(comparison).code == Code.CLAIM_NOT_TESTED


@pytest.mark.parametrize(
    "claim",
    [
        {"metric": REWARD},
        {"metric": REWARD, "margin": 0.1, "below": 1.0},
        {"metric": REWARD, "below": "1.2 x"},
        {"metric": REWARD, "margin": "5 %"},
        {"metric": MEMORY, "margin": 0.1},
        {"metric": "final_weights", "margin": 0.1},
        {"metric": "final_weights", "above": 0.1},
        {"metric": "final_weights", "below": "0.6x"},
        {"metric": "final_weights", "below": 0},
    ],
    ids=str,
)
def test_what_claims_nothing_or_too_much_is_refused(claim, snapshot):
    with pytest.raises(ValidationError) as refused:
        Claim.model_validate(claim)
    (problem,) = refused.value.errors()
    snapshot(problem["msg"])


def test_claims_on_the_command_line(snapshot):
    assert parse_claim("memory:all:<0.6x") == Claim(metric="memory", window="all", below="0.6x")
    assert parse_claim("a:b:last 10%:>0.65") == Claim(metric="a:b", window="last 10%", above=0.65)
    assert parse_claim("train/loss:all:exact") == Claim(metric="train/loss", window="all", exact=True)
    for text in ("memory:all:<0.6x", "a:b:last 10%:>0.65", "train/loss:all:exact", "a:all:1.5 sigma"):
        assert claim_option(parse_claim(text)) == text
    assert parse_claim("train/reward:all:5% of climb").margin == "5% of climb"
    with snapshot.refused(RecipeError):
        parse_claim("memory:all:0.05")


# --- ratios of token_mult_prob_error: of the excess over 1 ---

ERROR = "train/token_mult_prob_error"


def limited(baseline, treatment, metric=ERROR, window="all", paired=True, **claim):
    """The result of a limit over arms of curves [P, S]."""
    sides = sides_of({metric: baseline}, {metric: treatment}, paired=paired)
    claim = Claim(metric=metric, window=window, **claim)
    return judge_limit("treatment", sides, claim, np.arange(1, len(baseline[0]) + 1), ErrorRates(0.05, 0.04))


def excesses(rng, num_pairs, ratio, num_steps=9):
    """Curves of both arms, whose excesses over 1 have this ratio: noise of pairs, and of each step."""
    level = 0.004 * np.exp(0.3 * rng.standard_normal((num_pairs, 1)))
    noise = np.exp(0.2 * rng.standard_normal((2, num_pairs, num_steps)))
    apart = ratio * np.exp(0.1 * rng.standard_normal((num_pairs, 1)))
    return 1 + level * noise[0], 1 + apart * level * noise[1]


def test_a_ratio_is_one_of_the_excess_over_1(snapshot):
    rng = np.random.default_rng(0)
    baseline, treatment = excesses(rng, 5, 0.5)
    found = limited(baseline, treatment, below="1x")
    logs = [np.median(np.log(arm - 1 + 1e-6), axis=1) for arm in (baseline, treatment)]
    apart = logs[1] - logs[0]
    reach = 2.131847 * apart.std(ddof=1) / math.sqrt(5)
    assert found.estimate.limited is not None and 0.4 < found.estimate.limited < 0.6
    assert found.estimate.limited == pytest.approx(np.exp(apart.mean()))
    assert found.estimate.limited_interval == pytest.approx(
        np.exp([apart.mean() - reach, apart.mean() + reach]), rel=1e-5
    )
    assert (found.result, found.claim.transform, found.claim.test) == ("holds", "log_excess", "ratio limit")
    assert found.estimate.baseline_mean == pytest.approx(np.median(baseline, axis=1).mean())
    opposite = limited(baseline, treatment, above="1x")
    assert opposite.estimate.p_beyond is not None and opposite.estimate.p_beyond < 1e-3
    assert [limited(baseline, treatment, below=f"{of}x").result for of in (0.8, 0.5)] == [
        "holds",
        "undecided",
    ]
    assert limited(treatment, baseline, above="1.5x").result == "holds"
    reason = outcome_reason(found, has_recipe=False)
    assert (reason.code, reason["measure"], reason["limit"]) == (Code.LIMIT_HOLDS, "excess", 1.0)
    snapshot(sentence(reason))
    independent = limited(baseline, treatment, below="1x", paired=False)
    assert (
        independent.estimate.limited == pytest.approx(found.estimate.limited)
        and independent.result == "holds"
    )
    of_values = limited(baseline, treatment, below="1x", transform="identity")
    assert (
        of_values.estimate.limited == pytest.approx(0.998, abs=1e-3)
        and of_values.claim.transform == "identity"
    )
    for other in ("policy/mult_prob_error", "mine"):
        found = limited(baseline, treatment, other, below="1x", transform="log_excess")
        assert found.claim.transform == "log_excess"


def test_a_level_stays_a_level_and_a_ratio_needs_values_from_1():
    rng = np.random.default_rng(1)
    baseline, treatment = excesses(rng, 5, 0.5)
    found = limited(baseline, treatment, below=1.003)
    assert (
        found.estimate.limited == pytest.approx(np.median(treatment, axis=1).mean())
        and found.claim.test == "limit"
    )
    assert describe_claim(Claim(metric=ERROR, below=1.003)) == "level below 1.003"
    assert describe_claim(Claim(metric=MEMORY, below="0.6x")) == "below 0.6x the baseline"
    low = treatment.copy()
    low[2, 4] = 0.99
    refused = limited(baseline, low, below="1x")
    assert refused.problem == Code.VALUES_UNFIT(needed="excess")
    assert limited(baseline, low, below="1x", transform="identity").problem is None
    exact = np.ones_like(treatment)
    exact[:, 3] += 1e-9 * np.arange(5)  # no two seeds are one run
    assert limited(baseline, exact, below="0.01x").result == "holds"


@replicated(400)
@pytest.mark.parametrize("num_pairs", [3, 5, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("limit", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_ratio_of_excesses_at_its_limit_is_claimed_one_time_in_twenty(num_pairs, limit, num):
    rng = np.random.default_rng([num_pairs, round(10 * limit)])
    for window in ("all", "steps 1-1"):
        claims = [
            limited(*excesses(rng, num_pairs, limit), window=window, below=f"{limit:g}x") for _ in range(num)
        ]
        for p in ("p_equivalence", "p_beyond"):
            rate = np.mean([getattr(one.estimate, p) < 0.05 for one in claims])
            assert rate <= 0.05 + 3.1 * np.sqrt(0.05 * 0.95 / num)


# --- their levels ---


@replicated(300)
@pytest.mark.parametrize("num_pairs", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8, 10))])
@pytest.mark.parametrize(("sd", "own_sd"), [(0.02, 0.02), (0.3, 0.05), (0.05, 0.3)])
def test_a_share_of_a_level_that_is_itself_measured_keeps_its_level(num_pairs, sd, own_sd, num):
    rng = np.random.default_rng([num_pairs, round(100 * sd)])
    share, found = 0.1, 0
    baseline = 1 + sd * rng.standard_normal((num, num_pairs))
    treatment = (1 + share) + (baseline - 1) + own_sd * rng.standard_normal((num, num_pairs))
    for left, right in zip(baseline, treatment, strict=True):
        found += equivalence_test(left, right, share, yardstick=left).equivalent
    assert found / num <= 0.05 + 3.1 * np.sqrt(0.05 * 0.95 / num)


@pytest.mark.parametrize("num_pairs", [3, 5, 10])
def test_a_limit_at_the_truth_is_claimed_and_broken_one_time_in_twenty(num_pairs):
    rng = np.random.default_rng(num_pairs)
    tests = [limit_test(1 + rng.standard_normal(num_pairs), 1.0) for _ in range(1000)]
    for p in ("p_below", "p_above"):
        rate = np.mean([getattr(test, p) < 0.05 for test in tests])
        assert rate == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 / 1000))


@pytest.mark.parametrize(("far", "num_far"), [(2.0, None), (1e10, 1)])
def test_a_claim_on_skewed_values_says_so(simulated, judged, far, num_far):
    """Of a long tail towards the limit the t-test claims too much; margins said so, limits did not."""
    experiment_dir = simulated(seeds=list(range(6)))
    edit_rows(
        experiment_dir / "treatment/seed-3",
        lambda row: row.update({REWARD: row[REWARD] + far * (row["step"] > 1)}),
    )
    claims = {"values": Claim(metric=REWARD, below=far + 1), "differences": Claim(metric=REWARD, margin=0.02)}
    for sample, claim in claims.items():
        (skewed, *_) = first_reason(judged(experiment_dir, claims=[claim]))["warnings"]
        assert (skewed.code, skewed["sample"], skewed["num_far"]) == (Code.SKEWED, sample, num_far)
        assert (skewed["skewness"] or 0) > 0 or num_far


def test_a_ratio_of_constant_ones_is_no_rate_of_outcomes() -> None:
    """Logarithms of such ratios are 0, which are no failures."""
    steps, rng = np.arange(1, 11), np.random.default_rng(0)
    baseline, treatment = (
        {"updates": np.ones((3, 10)), "train/loss": rng.standard_normal((3, 10))} for _ in range(2)
    )
    sides = sides_of(baseline, treatment)
    result = judge_limit("treatment", sides, Claim(metric="updates", below="1.1x", window="all"), steps)
    assert (result.problem, result.result) == (None, "holds")
    assert result.estimate.limited_interval == (1.0, 1.0)


@pytest.mark.parametrize(("moved", "result"), [(0.0, "holds"), (0.004, "different")])
def test_exact_claims_compare_the_steps_that_both_runs_have(moved: float, result: str) -> None:
    def run(arm: str, every: int) -> RecordedRun:
        steps = np.arange(0, 51, every)
        values = (np.sin(steps) + moved * (arm == "treatment") * (steps >= 30)).astype(np.float64)
        return run_of({"train/loss": (steps, values)}, arm)

    sides = Sides(baselines=(run("baseline", 5),), treatments=(run("treatment", 2),), paired=True)
    claim = Claim(metric="train/loss", exact=True, window="all")
    judged = judge_limit("treatment", sides, claim, np.arange(0, 51))
    assert judged.result == result
    if moved:
        assert judged.estimate.detail is not None and judged.estimate.detail["step"] == 30
