"""What an experiment adds to the history of its recipe's noise (see abrun.experiment.noise)."""

import math
from collections.abc import Iterable, Iterator

from abrun.errors import StoreError
from abrun.experiment.noise import hash_recipe, noise_file
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import MAX_SD
from abrun.recipe.experiment import parse_stored_recipe
from abrun.runs.experiment import open_experiment
from abrun.runs.noise import NoiseRecord, Scale, add_noise
from abrun.verdict.decide import ArmVerdict


def record_noise(experiment: RecordedExperiment, arms: Iterable[ArmVerdict]) -> Iterator[Reason]:
    """Add the spread of a launched experiment's tested differences to the history; yield why not, if so.

    Several treatments share a baseline, and their mean variance counts once.
    """
    directory = experiment.directory
    path = noise_file(experiment.compare, directory.parent) if directory else None
    if directory is None or path is None or experiment.regression:
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
    baseline, arms_hash = hash_recipe(parse_stored_recipe(open_experiment(directory)["recipe"]))
    seeds = sorted({pair.seed for arm in experiment.treatments for pair in experiment.pairs(arm)})
    records = [
        NoiseRecord(
            experiment=directory.name,
            recipe=baseline,
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
