"""Step one where both arms see the same prompts and sample their own completions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import MEAN_GEN_TOKENS, MEAN_PROMPT_LENGTH, REWARD
from abrun.stats.series import Series
from abrun.verdict.decide import ArmVerdict, judge
from abrun.verdict.step_one import has_shared_prompts, has_shared_rollouts
from tests.verdict.recorded import experiment_of, run_of

STEPS = np.arange(1, 41)
ENTROPY, GRAD_NORM = "train/entropy", "train/grad_norm"
Firsts = Mapping[str, Any]  # metric -> first values of baseline and treatment


def experiment(pairs: Sequence[Firsts], **config: Any) -> RecordedExperiment:
    """Return runs with these first values, and equal curves of the reward after them."""
    arms: dict[str, list[RecordedRun]] = {"baseline": [], "treatment": []}
    for seed, firsts in enumerate(pairs):
        rng = np.random.default_rng(seed)
        curve = 0.5 + 0.4 * STEPS / 40 + 0.01 * rng.standard_normal(40)
        for index, (arm, runs) in enumerate(arms.items()):
            metrics = {
                metric: np.array([values[index], *(curve[1:] + 1e-3 * rng.standard_normal(39))])
                for metric, values in firsts.items()
            }
            runs.append(run_of(metrics, arm, seed, status="unknown", config=config.get(arm)))
    return experiment_of(*map(tuple, arms.values()))


def judged(pairs: Sequence[Firsts], metric: str = REWARD, **config: Any) -> ArmVerdict:
    claim = Claim(metric=metric, margin=0.05, climbs=False)
    return judge(experiment(pairs, **config), [claim])[0]


def result_of(verdict: ArmVerdict, metric: str) -> str:
    return next(check.result for check in verdict.select("step one") if check["metric"] == metric)


def sampled(rng: np.random.Generator, num_completions: int, chance: float, low: float) -> Firsts:
    """Return first values of equal arms: rewards of `low` or 1, lengths, an entropy and a norm."""
    hits = rng.binomial(num_completions, chance, 2) / num_completions
    length = rng.normal(180, 4)
    return {
        MEAN_PROMPT_LENGTH: (length, length),
        REWARD: tuple(low + (1 - low) * hits),
        MEAN_GEN_TOKENS: tuple(rng.normal(200, 6, 2)),
        ENTROPY: tuple(rng.normal(0.4, 0.01, 2)),
        GRAD_NORM: tuple(np.exp(rng.normal(-1, 0.25, 2))),
    }


@pytest.mark.parametrize("num_pairs", [3, 5, 10])
@pytest.mark.parametrize(
    ("num_completions", "chance", "low"), [(1024, 0.5, -1.0), (256, 0.05, 0.0), (128, 0.02, 0.0)]
)
def test_equal_arms_that_sample_anew_do_not_fail(num_pairs, num_completions, chance, low):
    """From single pairs, 30 to 98 of 100 such experiments failed."""
    rng = np.random.default_rng([num_pairs, num_completions])
    for digits in (None, 2, 3):
        verdict = judged(
            [logged(sampled(rng, num_completions, chance, low), digits) for _ in range(num_pairs)]
        )
        assert verdict.verdict == "MATCH"
        (reason,) = [one for one in verdict.not_tested if one.code == Code.COMPLETIONS_SAMPLED_ANEW]
        assert REWARD in reason["metrics"]


def logged(firsts: Firsts, digits: int | None) -> Firsts:
    """Return the values as a log of so many digits has them; lengths are left out."""
    if digits is None:
        return firsts
    return {
        metric: (round(values[0], digits), round(values[1], digits))
        for metric, values in firsts.items()
        if metric != MEAN_GEN_TOKENS
    }


@pytest.mark.parametrize("num_pairs", [2, 3, 5])
def test_values_that_a_log_rounds_alike_are_no_common_completions(num_pairs):
    """Entropies of 0.39 to 0.41 in two digits are equal within three pairs in 2 % of experiments."""
    entropies = [0.39, 0.41, 0.4, 0.4, 0.39][:num_pairs]
    pairs: list[Firsts] = [
        {
            MEAN_PROMPT_LENGTH: (180.123 + seed, 180.123 + seed),
            ENTROPY: (entropy, entropy),
            REWARD: (-0.02, 0.03),
        }
        for seed, entropy in enumerate(entropies)
    ]
    assert has_shared_prompts(experiment(pairs).pairs("treatment"))
    assert not has_shared_rollouts(experiment(pairs).pairs("treatment"))
    precise = [{**firsts, ENTROPY: (firsts[ENTROPY][0] + 0.001234,) * 2} for firsts in pairs]
    assert has_shared_rollouts(experiment(precise).pairs("treatment"))


def test_lengths_that_one_arm_logs_in_fewer_digits_are_common():
    pairs: list[Firsts] = [
        {MEAN_GEN_TOKENS: (200.1234 + seed, round(200.1234 + seed, 1)), REWARD: (0.1 * seed, 0.1 * seed)}
        for seed in range(1, 5)
    ]
    assert has_shared_rollouts(experiment(pairs).pairs("treatment"))
    counted = [
        {**firsts, MEAN_GEN_TOKENS: (firsts[MEAN_GEN_TOKENS][0], 1 + firsts[MEAN_GEN_TOKENS][0])}
        for firsts in pairs
    ]
    assert not has_shared_rollouts(experiment(counted).pairs("treatment"))
    same = [{**firsts, ENTROPY: (0.3 + 0.0123 * seed,) * 2} for seed, firsts in enumerate(counted)]
    assert has_shared_rollouts(experiment(same).pairs("treatment"))


def shifted(rng: np.random.Generator, reward: float) -> Firsts:
    firsts = sampled(rng, 1024, 0.5, 0.0)
    return {**firsts, REWARD: (firsts[REWARD][0], firsts[REWARD][1] - reward)}


def test_a_difference_of_all_pairs_fails_and_so_does_a_nan():
    rng = np.random.default_rng(3)
    pairs = [shifted(rng, 0.3) for _ in range(6)]
    assert result_of(judged(pairs), REWARD) == "fail"
    assert result_of(judged(pairs[:2]), REWARD) == "not tested"
    pairs = [sampled(rng, 1024, 0.5, 0.0) for _ in range(5)]
    pairs[2] = {**pairs[2], GRAD_NORM: (0.3, np.nan)}
    assert result_of(judged(pairs), GRAD_NORM) == "fail"


def test_a_reward_that_all_pairs_move_by_one_answer_is_no_fault():
    """Three differences of 1/128 have no spread, but an answer more in each pair is chance."""
    prompts = [(180.123 + seed, 180.123 + seed) for seed in range(3)]
    pairs: list[Firsts] = [
        {MEAN_PROMPT_LENGTH: length, REWARD: (hits / 128, (hits + 1) / 128)}
        for length, hits in zip(prompts, (1, 2, 4), strict=True)
    ]
    alike = experiment(pairs)
    for run in alike.runs.values():
        values = np.round(run.metrics[REWARD].values * 128) / 128
        assert isinstance(run.metrics, dict)
        run.metrics[REWARD] = Series(STEPS, values)
    (verdict,) = judge(alike, [Claim(metric=REWARD, margin=0.05, climbs=False)])
    assert result_of(verdict, REWARD) == "not tested"


def test_the_same_completions_fail_in_a_single_pair():
    rng = np.random.default_rng(4)
    pairs = []
    for _ in range(5):
        firsts = sampled(rng, 1024, 0.5, 0.0)
        length = firsts[MEAN_GEN_TOKENS][0]
        pairs.append({**firsts, MEAN_GEN_TOKENS: (length, length), GRAD_NORM: (0.3, 0.3)})
    pairs[1][GRAD_NORM] = (0.3, 0.7)
    assert has_shared_rollouts(experiment(pairs).pairs("treatment"))
    assert result_of(judged(pairs), GRAD_NORM) == "fail"


def test_other_rollout_settings_are_other_completions_of_abrun_s_trainer():
    rng = np.random.default_rng(5)
    pairs = [sampled(rng, 256, 0.05, 0.0) for _ in range(4)]
    config = {"trainer.type": "abrun", "policy.dtype": "float32", "rollout.engine": "torch"}
    alike = experiment(pairs, baseline=config, treatment={**config, "policy.logprobs.impl": "chunked"})
    other = experiment(pairs, baseline=config, treatment={**config, "rollout.engine": "vllm"})
    assert has_shared_rollouts(alike.pairs("treatment"))
    assert not has_shared_rollouts(other.pairs("treatment"))
    config = {**config, "policy.dtype": "bfloat16"}  # rounding may have changed completions
    assert not has_shared_rollouts(experiment(pairs, baseline=config, treatment=config).pairs("treatment"))
    assert has_shared_prompts(other.pairs("treatment"))
    verdict = judge(other, [Claim(metric=REWARD, margin=0.05, climbs=False)])[0]
    assert {check.result for check in verdict.select("step one")} <= {"pass", "not tested"}


COMPONENTS = ("rewards/accuracy_reward/mean", "rewards/format_reward/mean")


def with_components(seed: int, weight: float, moved: float = 0.0) -> Firsts:
    first, second = 0.2 + 0.01 * seed, 0.3 - 0.02 * seed
    norm = 1.2345 + 0.1 * seed
    return {
        COMPONENTS[0]: (first, first + moved),
        COMPONENTS[1]: (second, second),
        REWARD: (first + second, weight * first + 0.3 * second),
        GRAD_NORM: (norm, norm),
    }


def test_a_reward_of_another_definition_decides_claims_on_that_reward_alone():
    pairs = [with_components(seed, 0.7) for seed in range(3)]
    verdict = judged(pairs, COMPONENTS[0])
    assert (verdict.verdict, result_of(verdict, REWARD)) == ("MATCH", "redefined")
    assert Code.METRIC_REDEFINED in [reason.code for reason in verdict.reasons]
    verdict = judged(pairs)
    assert verdict.verdict == "MISMATCH" and verdict.reasons[0].code == Code.METRIC_REDEFINED


@pytest.mark.parametrize("change", ["components", "norm", "none recorded", "zeros"])
def test_a_reward_is_not_redefined_where_more_than_it_differs(change):
    pairs = [dict(with_components(seed, 0.7, 0.1 * (change == "components"))) for seed in range(3)]
    for firsts in pairs:
        if change == "norm":
            firsts[GRAD_NORM] = (1.0, 2.0)
            firsts[ENTROPY] = (1.2345 * firsts[REWARD][0],) * 2  # shows the same completions
        if change == "zeros":
            firsts.update(dict.fromkeys(COMPONENTS, (0.0, 0.0)))
        if change == "none recorded":
            for component in COMPONENTS:
                firsts.pop(component)
    verdict = judged(pairs, GRAD_NORM if change == "none recorded" else COMPONENTS[1])
    assert (verdict.verdict, result_of(verdict, REWARD)) == ("MISMATCH", "fail")
