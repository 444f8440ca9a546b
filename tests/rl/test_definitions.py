"""docs/definitions.md names every choice of a recipe and every metric, with the constants of the code."""

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from abrun.logs.aliases import FRAMEWORKS
from abrun.metric_names import METRICS
from abrun.recipe.algorithms import Dpo, Grpo, ImportanceCorrection, OverlongPunishment, Ppo
from abrun.recipe.section import Section
from abrun.rl import losses
from abrun.rl.advantages import STD_EPSILON, Baseline, NormalizeOver
from abrun.rl.importance import Correction
from abrun.rl.values import MIN_VARIANCE

PAGE = (Path(__file__).parents[2] / "docs" / "definitions.md").read_text()
OURS, THEIRS = PAGE.split("## Differences from other frameworks")
CONSTANTS = {
    "STD_EPSILON": STD_EPSILON,
    "MAX_LOG_RATIO": losses.MAX_LOG_RATIO,
    "MAX_KL_LOG_RATIO": losses.MAX_KL_LOG_RATIO,
    "MAX_KL": losses.MAX_KL,
    "MIN_VARIANCE": MIN_VARIANCE,
}
# Choices that are no definitions: where a network lies, how a weight is stored, how much is reported.
ELSEWHERE = {"type", "value_head_dtype", "metrics", "value_optimizer"}


def literals(annotation: Any) -> set[str]:
    """The words that an annotation allows, however it is nested."""
    parts = get_args(annotation)
    if get_origin(annotation) is not None and all(isinstance(part, str) for part in parts):
        return set(parts)
    return {word for part in parts for word in literals(part)}


def choices(section: type[Section]) -> set[str]:
    fields = section.model_fields.items()
    return {word for name, field in fields if name not in ELSEWHERE for word in literals(field.annotation)}


def test_every_choice_of_a_recipe_is_on_the_page() -> None:
    words = choices(Grpo) | choices(Ppo) | choices(Dpo) | set(get_args(Correction))
    assert {"clipped", "gspo", "cispo", "k3+", "leave_one_out", "icepop", "document_sum"} <= words
    assert sorted(word for word in words if not re.search(rf"`([\w_]+: )?{re.escape(word)}`", PAGE)) == []
    fields = {*OverlongPunishment.model_fields, *ImportanceCorrection.model_fields}
    fields |= {"dual_clip", "grad_divisor", "entropy_coefficient", "overlong_filtering", "sft_coefficient"}
    assert sorted(name for name in fields if not re.search(rf"\b{name}\b", PAGE)) == []


def test_a_recipe_offers_what_the_code_computes() -> None:
    assert literals(Grpo.model_fields["kl_estimator"].annotation) == set(get_args(losses.KlEstimator))
    assert literals(Grpo.model_fields["advantage_baseline"].annotation) == set(get_args(Baseline))
    assert literals(Grpo.model_fields["normalize_over"].annotation) == set(get_args(NormalizeOver))
    assert literals(ImportanceCorrection.model_fields["type"].annotation) == set(get_args(Correction))


@pytest.mark.parametrize("key", [metric.key for metric in METRICS])
def test_every_metric_is_on_the_page_with_its_mean(key: str) -> None:
    metric = next(metric for metric in METRICS if metric.key == key)
    rows = re.findall(rf"^\| `{re.escape(key)}` \| (.+) \| ([^|]+) \|$", OURS, re.M)
    assert len(rows) == 1, f"{len(rows)} rows of {key}"
    definition, mean = rows[0]
    assert len(definition) > 2
    assert mean.split(";")[0].strip() == metric.combined.removesuffix(" mean")


def test_no_metric_of_the_page_is_unknown() -> None:
    rows = re.findall(r"^\| `((?:train|validation|timing|performance|memory)/[^`*]+)` \| ", OURS, re.M)
    ours = {metric.key for metric in METRICS}
    assert len(rows) == len(ours) and [name for name in rows if name not in ours] == []


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_page_are_those_of_the_code(name: str) -> None:
    (value,) = re.findall(rf"^\| `{name}` \| (\S+) \| ", PAGE, re.M)
    assert float(value) == CONSTANTS[name]


def test_formulas_of_the_page_have_the_code_s_constants() -> None:
    most, kl_ratio, kl = losses.MAX_LOG_RATIO, losses.MAX_KL_LOG_RATIO, losses.MAX_KL
    assert f"rho = exp(min(c - p, {most}))" in PAGE
    assert f"of (c - p), {most}))" in PAGE
    assert f"clamp(r - c, -{kl_ratio}, {kl_ratio})" in PAGE
    assert f"clamp(estimator(x), -{kl}, {kl})" in PAGE
    assert "(std + 1e-6)" in PAGE and float("1e-6") == STD_EPSILON
    assert "max(var(returns), 1e-8)" in PAGE and float("1e-8") == MIN_VARIANCE


def test_links_inside_of_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) - anchors == set()


def test_shared_names_are_aliases_and_metrics_left_out_are_none() -> None:
    shared, left_out = THEIRS.split("## Differences under")[1].split("These have no")
    aliased = {ours for table in FRAMEWORKS.values() for ours in table} | {"train/reward", "train/loss"}
    cells = " ".join(re.findall(r"^\| (`train.+?) \| ", shared, re.M))
    names = re.findall(r"`(train/[\w/]+)`", cells)
    assert len(names) > 9 and [name for name in names if name not in aliased] == []
    cells = " ".join(re.findall(r"^\| (\w.+?) \| ", left_out, re.M))
    apart = re.findall(r"([\w-]+)(?:'s)? `([\w/-]+)`", cells)
    assert len(apart) > 10
    for framework, name in apart:
        table = FRAMEWORKS[framework.lower().replace("torchtitan", "torchtitan-rl")]
        ours = {ours for ours, theirs in table.items() if theirs in (name, f"train/{name}")}
        assert ours == ({"train/document_entropy"} if name == "rl/entropy" else set()), name
