"""The noise of earlier experiments of logs, and what a report adds to a history (abrun.experiment.noise)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from abrun.errors import ComparisonError, StoreError
from abrun.experiment.noise import fit_priors, hash_content, hash_recipe, noise_file
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import MAX_SD
from abrun.recipe.experiment import parse_stored_recipe
from abrun.runs.experiment import open_experiment
from abrun.runs.noise import NoiseRecord, Scale, add_noise, read_noise
from abrun.verdict.decide import ArmVerdict


def with_history(experiment: RecordedExperiment, path: Path) -> RecordedExperiment:
    """Return logs with a prior for their claims, from the logs that reports have added to a history.

    Raises ComparisonError for runs that have another history or no claim, StoreError for a damaged file.
    """
    if experiment.has_recipe or experiment.regression:
        raise ComparisonError(
            f"--noise: got {path} with {experiment.name}, whose launch declared its history; drop it, or set "
            "compare.noise in the recipe"
        )
    if not experiment.compare.claims:
        raise ComparisonError(f"--noise: got {path} without a claim to test; add --claim, or drop it")
    identity = _identify(experiment)
    priors = fit_priors(experiment.compare.claims, read_noise(path), *identity, recorded=False)
    changes = {"noise": str(path), "noise_priors": priors}
    return replace(experiment, compare=experiment.compare.model_copy(update=changes))


def _identify(experiment: RecordedExperiment) -> tuple[str, str, str, list[int]]:
    """Return an experiment's name, hashes of its recipe and arms, and seeds, as in records.

    Names of logs may be used again: their numbers identify them.
    """
    pairs = [pair for arm in experiment.treatments for pair in experiment.pairs(arm)]
    seeds = sorted({pair.seed for pair in pairs})
    if experiment.directory:
        recipe = parse_stored_recipe(open_experiment(experiment.directory)["recipe"])
        return experiment.directory.name, *hash_recipe(recipe), seeds
    metrics = sorted({claim.metric for claim in experiment.compare.claims})
    runs = [run for pair in pairs if pair.seed == seeds[0] for run in pair.runs]
    numbers = hash_content([run.series(metric).values.tolist() for run in runs for metric in metrics])
    return f"{experiment.name} {numbers}", "", numbers, seeds


def record_noise(experiment: RecordedExperiment, arms: Iterable[ArmVerdict]) -> Iterator[Reason]:
    """Add the spread of tested differences to the history of a launch or of logs; yield why not, if so.

    Several treatments share a baseline, and their mean variance counts once.
    """
    directory, compare = experiment.directory, experiment.compare
    is_named = directory is not None or compare.noise not in ("auto", "none")
    path = noise_file(compare, directory.parent if directory else Path()) if is_named else None
    if path is None or experiment.regression:
        return
    spreads: dict[Scale, list[tuple[float, int]]] = {}  # variance and number of pairs
    for arm in arms:
        recorded = experiment.sides(arm.arm).finished.share_rollouts
        for result in arm.claims:
            terms, sd = result.claim, result.estimate.sd_difference
            is_tested = result.result != "not tested" and terms.unit == "seed" and terms.num_pairs > 1
            if is_tested and sd is not None and sd < MAX_SD and result.estimate.freedom is not None:
                scale = terms.metric, terms.window, terms.transform, recorded
                spreads.setdefault(scale, []).append((sd**2, terms.num_pairs))
    if not spreads:
        return
    name, recipe, arms_hash, seeds = _identify(experiment)
    records = [
        NoiseRecord(
            experiment=name,
            recipe=recipe,
            arms=arms_hash,
            seeds=seeds,
            metric=scale[0],
            window=scale[1],
            transform=scale[2],
            recorded=scale[3],
            sd=math.sqrt(sum(variance for variance, _ in spread) / len(spread)),
            dof=min(num_pairs for _, num_pairs in spread) - 1.0,
        )
        for scale, spread in spreads.items()
    ]
    try:
        add_noise(path, records)
    except StoreError as error:
        yield Code.NOISE_NOT_WRITTEN(problem=str(error))
