"""What an experiment adds to the history of its recipe's noise (see abrun.experiment.noise)."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from abrun.errors import StoreError
from abrun.experiment.noise import hash_baseline, noise_file
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import MAX_SD
from abrun.recipe.experiment import parse_stored_recipe
from abrun.runs.experiment import open_experiment
from abrun.runs.noise import NoiseRecord, add_noise
from abrun.verdict.decide import ArmVerdict
from abrun.verdict.results import ClaimResult


def record_noise(experiment: RecordedExperiment, arms: Iterable[ArmVerdict]) -> Iterator[Reason]:
    """Add the spread of a launched experiment's tested differences to the history; yield why not, if so.

    Several treatments share a baseline, and their mean variance counts once.
    """
    directory = experiment.directory
    if directory is None or experiment.regression or not experiment.compare.paired:
        return
    path = noise_file(experiment.compare, directory.parent)
    spreads: dict[tuple[Any, ...], list[ClaimResult]] = {}
    for arm in arms:
        recorded = experiment.sides(arm.arm).finished.share_rollouts
        for result in filter(_has_spread, arm.claims):
            scale = (result.claim.metric, result.claim.window, result.claim.transform, recorded)
            spreads.setdefault(scale, []).append(result)
    if path is None or not spreads:
        return
    baseline = hash_baseline(parse_stored_recipe(open_experiment(directory)["recipe"]))
    records = [
        NoiseRecord(
            experiment=directory.name,
            recipe=baseline,
            metric=metric,
            window=window,
            transform=transform,
            recorded=recorded,
            sd=math.sqrt(
                sum((result.estimate.sd_difference or 0.0) ** 2 for result in results) / len(results)
            ),
            dof=min(result.claim.num_pairs for result in results) - 1.0,
        )
        for (metric, window, transform, recorded), results in spreads.items()
    ]
    try:
        add_noise(path, records)
    except StoreError as error:
        yield Code.NOISE_NOT_WRITTEN(problem=str(error))


def _has_spread(result: ClaimResult) -> bool:
    """Return whether a claim was tested on pairs of runs whose spread is a number."""
    terms, sd = result.claim, result.estimate.sd_difference
    is_tested = result.result != "not tested" and terms.unit == "seed" and terms.num_pairs > 1
    return is_tested and sd is not None and sd < MAX_SD and result.estimate.freedom is not None
