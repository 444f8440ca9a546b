"""Noise of earlier experiments of a recipe, which a launch declares before its runs (Smyth's moderated t).

Only experiments whose baseline has the same settings count, and only records of the claim's metric, window
and scale. What is declared is in the experiment's record and its hash, not the file.
"""

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from abrun.recipe.claims import Claim, Compare, NoisePrior
from abrun.recipe.experiment import AUTO_SETTINGS, ExperimentDeclaration
from abrun.recipe.reading import dotted
from abrun.recipe.run import can_change_numbers, recorded_source
from abrun.runs.experiment import is_experiment, open_experiment
from abrun.runs.metric_names import default_transform
from abrun.runs.noise import NOISE, NoiseRecord, read_noise

Declaration = TypeVar("Declaration", bound=ExperimentDeclaration)


def noise_file(compare: Compare, runs_dir: Path) -> Path | None:
    """Return the history's file; None if it is switched off."""
    if compare.noise == "none":
        return None
    return runs_dir / NOISE if compare.noise == "auto" else Path(compare.noise).expanduser()


def hash_baseline(recipe: ExperimentDeclaration) -> str:
    """Return a hash of the baseline's settings that change numbers, without defaults and `auto` values."""
    config = recipe.with_auto_values().run_config(recipe.baseline)
    settings = dotted(config.model_dump(mode="json", exclude_defaults=True))
    names = [key for key in settings if can_change_numbers(key) and key not in AUTO_SETTINGS]
    return _hash({name: settings[name] for name in names})


def declare_noise(recipe: Declaration, experiment_dir: Path) -> Declaration:
    """Return the recipe with the priors of its claims, fitted to the history or, to resume, as launched.

    Raises StoreError for a damaged history.
    """
    compare = recipe.compare
    changes: dict[str, Any] = {}
    if is_experiment(experiment_dir):
        stored = open_experiment(experiment_dir).get("recipe", {}).get("compare") or {}
        priors = stored.get("noise_priors") or []
        changes["noise_priors"] = [NoisePrior.model_validate(prior) for prior in priors]
        changes["alpha_spending"] = compare.alpha_spending or stored.get("alpha_spending")
    elif not compare.noise_priors:
        changes["noise_priors"] = _fit_priors(recipe, experiment_dir)
    return recipe.model_copy(update={"compare": compare.model_copy(update=changes)})


def _fit_priors(recipe: ExperimentDeclaration, experiment_dir: Path) -> list[NoisePrior]:
    """Return a prior for each claim on paired differences that has a history. Raises StoreError."""
    compare = recipe.compare
    path = noise_file(compare, experiment_dir.parent)
    if path is None or not compare.paired or compare.reference or len(recipe.arms) < 2:
        return []
    decided = recipe.with_auto_values()
    treatments = [decided.run_config(arm) for arm in recipe.arms if arm != recipe.baseline]
    recorded = all(recorded_source(config) is not None for config in treatments)
    baseline = hash_baseline(recipe)
    records = [
        record
        for record in read_noise(path)
        if record.recipe == baseline
        and record.recorded == recorded
        and record.experiment != experiment_dir.name
    ]
    scales = {
        (claim.metric, claim.window, scale_of(claim)): None for claim in compare.claims if is_moderated(claim)
    }
    priors = (
        _fit_prior(
            [record for record in records if (record.metric, record.window, record.transform) == scale]
        )
        for scale in scales
    )
    return [prior for prior in priors if prior]


def is_moderated(claim: Claim) -> bool:
    """Return whether the test of a claim can use a history: a difference, by a margin that is a number."""
    return claim.difference_kind is not None and claim.margin_in[1] == ""


def scale_of(claim: Claim) -> Any:
    return claim.transform or default_transform(claim.metric)


def _fit_prior(records: list[NoiseRecord]) -> NoisePrior | None:
    if not records:
        return None
    from abrun.stats.many_tests import predict_variance  # scipy

    prior = predict_variance([record.sd**2 for record in records], [record.dof for record in records])
    first = records[0]
    return prior and NoisePrior(
        metric=first.metric,
        window=first.window,
        transform=first.transform,
        recorded=first.recorded,
        sd=math.sqrt(prior.variance),
        dof=prior.dof,
        experiments=sum(record.sd**2 > 0 for record in records),
        sha256=_hash([asdict(record) for record in records]),
    )


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
