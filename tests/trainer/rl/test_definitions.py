"""The pages of losses and metrics have every choice of a recipe, every metric and the code's constants."""

import re
from pathlib import Path
from typing import Any, get_args, get_origin

from abrun.logs.aliases import FRAMEWORKS
from abrun.recipe.algorithms import Dpo, Grpo, ImportanceCorrection, OverlongPunishment, Ppo
from abrun.recipe.section import Section
from abrun.runs.metric_names import METRICS
from abrun.trainer.rl import losses
from abrun.trainer.rl.advantages import MIN_VARIANCE, STD_EPSILON, Baseline, NormalizeOver
from abrun.trainer.rl.losses import Correction

DOCS = Path(__file__).parents[3] / "docs"
LOSSES = (DOCS / "explanation" / "logprobs-and-losses.md").read_text()
OURS, THEIRS = (DOCS / "reference" / "metrics.md").read_text().split("## Other trainers' metrics")
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
    lacking = [word for word in words if not re.search(rf"`([\w_]+: )?{re.escape(word)}`", LOSSES)]
    assert sorted(lacking) == []
    fields = {*OverlongPunishment.model_fields, *ImportanceCorrection.model_fields}
    fields |= {"dual_clip", "grad_divisor", "entropy_coefficient", "overlong_filtering", "sft_coefficient"}
    assert sorted(name for name in fields if not re.search(rf"\b{name}\b", LOSSES)) == []


def test_a_recipe_offers_what_the_code_computes() -> None:
    assert literals(Grpo.model_fields["kl_estimator"].annotation) == set(get_args(losses.KlEstimator))
    assert literals(Grpo.model_fields["advantage_baseline"].annotation) == set(get_args(Baseline))
    assert literals(Grpo.model_fields["normalize_over"].annotation) == set(get_args(NormalizeOver))
    assert literals(ImportanceCorrection.model_fields["type"].annotation) == set(get_args(Correction))


def test_every_metric_is_on_the_page_with_its_unit_and_mean() -> None:
    for metric in METRICS:
        rows = re.findall(rf"^- `{re.escape(metric.key)}` \(([^)]+)\): (.+)$", OURS, re.M)
        assert len(rows) == 1, f"{len(rows)} rows of {metric.key}"
        details, definition = rows[0]
        assert len(definition) > 2, metric.key
        mean = metric.combined.removesuffix(" mean")
        assert details.split(";")[0] == (f"{metric.unit}, {mean}" if metric.unit else mean), metric.key


def test_no_metric_of_the_page_is_unknown() -> None:
    rows = re.findall(r"^- `((?:train|validation|timing|performance|memory)/[^`*]+)` \(", OURS, re.M)
    ours = {metric.key for metric in METRICS}
    assert len(rows) == len(ours) and [name for name in rows if name not in ours] == []


def test_formulas_of_the_page_have_the_code_s_constants() -> None:
    most, kl_ratio, kl = losses.MAX_LOG_RATIO, losses.MAX_KL_LOG_RATIO, losses.MAX_KL
    assert f"rho = exp(min(c - p, {most}))" in LOSSES
    assert f"rho = exp(min(mean of c - p over the sequence, {most}))" in LOSSES
    assert f"clamp(r - c, -{kl_ratio}, {kl_ratio}), the value clamped to ±{kl} " in " ".join(LOSSES.split())
    assert "(std + 1e-6)" in LOSSES and float("1e-6") == STD_EPSILON
    assert "max(var(returns), 1e-8)" in OURS and float("1e-8") == MIN_VARIANCE


def test_shared_names_are_aliases() -> None:
    aliased = {ours for table in FRAMEWORKS.values() for ours in table} | {"train/reward", "train/loss"}
    names = re.findall(r"`(train/[\w/]+)`", THEIRS)
    assert len(names) > 6 and [name for name in names if name not in aliased] == []
