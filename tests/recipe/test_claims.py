"""The words of a claim: its syntax, its direction, and what could be read in two ways."""

import pytest

from abrun.errors import RecipeError
from abrun.recipe.claims import Claim, Compare, claim_option, describe_claim, parse_claim
from abrun.recipe.refusals import validated
from abrun.runs.metric_names import METRICS, better_direction


@pytest.mark.parametrize(
    ("text", "kind", "described", "better"),
    [
        ("train/reward:last 20%:0.02", "within", "±0.02", "higher"),
        ("train/reward:last 20%:within 5%", "within", "±5%", "higher"),
        ("train/reward:last 20%:not_worse 0.02", "not_worse", "at most 0.02 lower", "higher"),
        ("validation/loss:all:not_worse 1.5 sigma", "not_worse", "at most 1.5 sigma higher", "lower"),
        ("train/reward:all:better 0.02", "better", "more than 0.02 higher", "higher"),
        ("timing/train/total_step_time_s:all:better 0", "better", "lower", "lower"),
        ("ifeval:all:better 1, higher is better", "better", "more than 1 higher", "higher"),
        ("train/reward:all:not_worse 1, lower is better", "not_worse", "at most 1 higher", "lower"),
        ("train/reward:all:>0.65", "limit", "level above 0.65", "higher"),
        ("train/reward:all:level < 1.5", "limit", "level below 1.5", "higher"),
        ("train/reward:all:level >-0.02", "limit", "level above -0.02", "higher"),
        ("memory:all:<0.6x", "limit", "below 0.6x the baseline", "lower"),
        ("final_weights:all:<0.05", "limit", "below 0.05", None),
        ("train/reward:all:exact", "exact", "exact", "higher"),
    ],
)
def test_a_claim_reads_back_as_it_is_written(text, kind, described, better):
    claim = parse_claim(text)
    assert (claim.kind, describe_claim(claim), claim.better_direction) == (kind, described, better)
    assert parse_claim(claim_option(claim)) == claim


@pytest.mark.parametrize("sign", ["<", ">"])
@pytest.mark.parametrize("field", ["below", "above"])
def test_a_negative_limit_is_refused_with_both_readings(sign, field):
    """Meant as a loss of at most 0.02, `>-0.02` would as a level pass a loss of 0.33."""
    with pytest.raises(RecipeError, match=r"a level or a difference.*'level -0.02'.*not_worse: 0.02"):
        parse_claim(f"train/reward:last 20%:{sign}-0.02")
    with pytest.raises(RecipeError, match="a level or a difference"):
        validated(Claim, {"metric": "train/reward", field: -0.02}, "recipe.yaml")
    level = validated(Claim, {"metric": "train/reward", field: "level -0.02"}, "recipe.yaml")
    assert level.limit == (-0.02, False)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"not_worse": 0}, "use better: 0"),
        ({"not_worse": -0.02}, "allowed: a number above 0"),
        ({"not_worse": 0.02, "better": 0.02}, "not_worse and better"),
        ({"within": 0.02, "margin": 0.02}, "the same"),
        ({"within": 0.02, "improvement": 0.1}, "improvement without better"),
        ({"better": "100%"}, "less than 100%"),
    ],
)
def test_what_a_claim_cannot_say_is_refused(values, problem):
    with pytest.raises(RecipeError, match=problem):
        validated(Claim, {"metric": "train/reward", **values}, "recipe.yaml")
    assert validated(Claim, {"metric": "train/reward", "within": 0.02}, "") == Claim(
        metric="train/reward", margin=0.02
    )


def test_a_one_sided_claim_needs_a_direction():
    claims = [{"metric": "ifeval", "not_worse": 0.02}]
    with pytest.raises(RecipeError, match="higher_is_better: true or false"):
        validated(Compare, {"claims": claims}, "recipe.yaml")
    claims = [{"metric": "ifeval", "not_worse": 0.02, "higher_is_better": True}]
    assert validated(Compare, {"claims": claims}, "recipe.yaml").claims[0].better_direction == "higher"


def test_the_table_of_metrics_knows_what_is_better():
    directions = {metric.key: metric.better for metric in METRICS}
    assert directions["train/reward"] == "higher" and directions["train/loss"] == "lower"
    assert directions["train/grad_norm"] is None and directions["train/entropy"] is None
    names = {
        "higher": ("critic/score/mean", "eval/acc", "perf/throughput", "gsm8k/exact_match", "tokens_per_sec"),
        "lower": ("eval_loss", "timing_s/step", "perplexity", "wer", "max_memory_bytes", "memory"),
        None: ("actor/grad_norm", "ifeval", "response_length/mean", "actor/entropy"),
    }
    for direction, metrics in names.items():
        assert {metric: better_direction(metric) for metric in metrics} == dict.fromkeys(metrics, direction)


def test_a_share_of_the_level_is_a_ratio_on_a_logarithmic_scale():
    """Step time may rise to 1.05 times, or must fall to 0.95 times, what the baseline takes."""
    step_time = "timing/train/total_step_time_s"
    assert Claim(metric=step_time, not_worse="5%").margin_in == (
        pytest.approx(0.048790, rel=1e-4),
        "",
    )  # log 1.05
    assert Claim(metric=step_time, better="5%").margin_in == (
        pytest.approx(0.051293, rel=1e-4),
        "",
    )  # -log 0.95
    assert Claim(metric="train/reward", not_worse="5%").margin_in == (0.05, "level")
