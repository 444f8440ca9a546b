"""Noise of earlier experiments of a recipe, which a launch declares before its runs (Smyth's moderated t).

Only experiments whose baseline has the same settings count, and only records of the claim's metric, window
and scale. What is declared is in the experiment's record and its hash, not the file. Logs have no settings:
whoever names a file for them says that it is of one training.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from abrun.errors import StoreError
from abrun.recipe.claims import Claim, Compare, NoisePrior
from abrun.recipe.experiment import AUTO_SETTINGS, ExperimentDeclaration
from abrun.recipe.reading import dotted
from abrun.recipe.run import can_change_numbers, recorded_source
from abrun.runs.experiment import is_experiment, open_experiment
from abrun.runs.metric_names import default_transform
from abrun.runs.noise import NOISE, NoiseRecord, Scale, read_noise

Declaration = TypeVar("Declaration", bound=ExperimentDeclaration)


def noise_file(compare: Compare, runs_dir: Path) -> Path | None:
    """Return the history's file; None if it is switched off."""
    if compare.noise == "none":
        return None
    return runs_dir / NOISE if compare.noise == "auto" else Path(compare.noise).expanduser()


def hash_recipe(recipe: ExperimentDeclaration) -> tuple[str, str]:
    """Return hashes of the baseline's settings and of all arms', of those that change numbers.

    They are without defaults and `auto` values.
    """
    decided = recipe.with_auto_values()
    settings = {
        arm: {
            key: value
            for key, value in dotted(
                decided.run_config(arm).model_dump(mode="json", exclude_defaults=True)
            ).items()
            if can_change_numbers(key) and key not in AUTO_SETTINGS
        }
        for arm in recipe.arms
    }
    return hash_content(settings[recipe.baseline]), hash_content(settings)


def declare_noise(recipe: Declaration, experiment_dir: Path) -> Declaration:
    """Return the recipe with the priors of its claims, fitted to the history or, to resume, as launched.

    Raises StoreError for a damaged history.
    """
    compare, changes = recipe.compare, dict[str, Any]()
    if is_experiment(experiment_dir):
        stored = open_experiment(experiment_dir).get("recipe", {}).get("compare") or {}
        priors = [NoisePrior.model_validate(prior) for prior in stored.get("noise_priors") or []]
        spending = compare.alpha_spending or stored.get("alpha_spending")
        changes = {"noise_priors": priors, "alpha_spending": spending}
    elif not compare.noise_priors and compare.paired and not compare.reference and len(recipe.arms) > 1:
        changes = {"noise_priors": _fit_priors(recipe, experiment_dir)}
    return recipe.model_copy(update={"compare": compare.model_copy(update=changes)})


def _fit_priors(recipe: ExperimentDeclaration, experiment_dir: Path) -> list[NoisePrior]:
    """Return a prior for each claim with a history."""
    path = noise_file(recipe.compare, experiment_dir.parent)
    try:
        records = read_noise(path) if path else []
    except StoreError as error:
        raise StoreError(f"{error}; or launch with compare.noise: none") from None
    if not records:
        return []
    decided, hashes = recipe.with_auto_values(), hash_recipe(recipe)
    treatments = [decided.run_config(arm) for arm in recipe.arms if arm != recipe.baseline]
    recorded = all(recorded_source(config) is not None for config in treatments)
    identity = experiment_dir.name, *hashes, recipe.seeds
    return fit_priors(recipe.compare.claims, records, *identity, recorded=recorded)


def fit_priors(
    claims: Sequence[Claim],
    records: list[NoiseRecord],
    name: str,  # of the experiment that is to be tested, with its hashes and seeds
    baseline: str,
    arms: str,
    seeds: Sequence[int],
    *,
    recorded: bool,
) -> list[NoisePrior]:
    """Return a prior for each claim on a difference, by a margin that is a number, with a history."""
    records = _without_repeats(records, name, arms, seeds)
    priors: dict[Scale, NoisePrior | None] = {}
    for claim in claims:
        if claim.difference_kind and claim.margin_in[1] == "":
            scale = (claim.metric, claim.window, claim.transform or default_transform(claim.metric), recorded)
            history = [record for record in records if (record.recipe, record.scale) == (baseline, scale)]
            priors[scale] = _fit_prior(scale, history)
    return [prior for prior in priors.values() if prior]


def _without_repeats(
    records: list[NoiseRecord], name: str, arms: str, seeds: Sequence[int]
) -> list[NoiseRecord]:
    """Leave out what repeats this or an earlier experiment: arms and a seed again give the same numbers."""
    counted = {name: (arms, {*seeds})}
    for record in records:
        is_repeat = any(
            record.arms == other_arms and other_seeds & {*record.seeds}
            for experiment, (other_arms, other_seeds) in counted.items()
            if experiment != record.experiment
        )
        if not is_repeat:
            counted.setdefault(record.experiment, (record.arms, {*record.seeds}))
    return [record for record in records if record.experiment in counted and record.experiment != name]


def _fit_prior(scale: Scale, records: list[NoiseRecord]) -> NoisePrior | None:
    from abrun.stats.many_tests import predict_variance  # scipy

    prior = predict_variance([record.sd**2 for record in records], [record.dof for record in records])
    if prior is None or not prior.variance:  # no record, or so unlike ones that it underflows
        return None
    values = dict(zip(("metric", "window", "transform", "recorded"), scale, strict=True))
    values |= {"experiments": sum(record.sd**2 > 0 for record in records)}
    values |= {"sha256": hash_content([asdict(record) for record in records])}
    return NoisePrior.model_validate({**values, "sd": math.sqrt(prior.variance), "dof": prior.dof})


def hash_content(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
