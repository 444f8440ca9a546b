"""Runs beside the pairs that a claim's test uses: A/A reruns, and seeds of a reference without a partner.

A rerun of an arm and seed differs from its run as a paired run of an equal arm would. With k runs of one seed
the sum of squares around their mean has k - 1 degrees of freedom, and twice the variance of one run is that
of a difference: a prior of known mean for `VariancePrior.moderate_alike`, whose F test leaves it out where
the treatment adds noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Sides
from abrun.recipe.claims import NoisePrior
from abrun.runs.metric_names import Transform
from abrun.stats.many_tests import VariancePrior
from abrun.stats.series import Array, Steps
from abrun.verdict.machines import MACHINE_KEYS, find_machine_differences
from abrun.verdict.summaries import reduce_window, transform_with_gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareRuns:
    """What may inform a test beside its pairs. Rollouts that pairs share are not those of other runs."""

    priors: Sequence[NoisePrior] = ()
    repeats: Sequence[Sequence[RecordedRun]] = ()  # of one arm and seed
    without_pair: Sequence[RecordedRun] = ()


NO_SPARE_RUNS = SpareRuns()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Borrowed:
    """The same for one claim: a prior of the variance of differences, and further baselines."""

    law: VariancePrior | None
    num_experiments: int
    num_reruns: int
    levels: Array  # [U] of the baseline's seeds without a partner
    seeds: list[int]  # [U]


def find_spare_runs(experiment: RecordedExperiment, arm: str, sides: Sides) -> SpareRuns:
    """Return the spare runs of a comparison of paired seeds."""
    if not sides.paired:
        return NO_SPARE_RUNS
    priors = () if experiment.regression else experiment.compare.noise_priors
    if sides.share_rollouts:
        return SpareRuns(priors=priors)
    repeats: dict[tuple[str, int], list[RecordedRun]] = {}
    for name, run in experiment.runs.items():
        if name.arm in (experiment.baseline, arm) and run.finished:
            repeats.setdefault((name.arm, name.seed), []).append(run)
    paired_seeds = experiment.arm(arm).keys()
    baselines = experiment.arm(experiment.baseline).items()
    return SpareRuns(
        priors=priors,
        repeats=[runs for runs in repeats.values() if len(runs) > 1],
        without_pair=[
            run
            for seed, run in baselines
            if seed not in paired_seeds and run.finished and not _is_moved(run, sides.baselines)
        ]
        if experiment.regression
        else (),
    )


def _is_moved(run: RecordedRun, others: Sequence[RecordedRun]) -> bool:
    """Return whether a run had other versions, code or devices than all of these runs of its arm."""
    return all(find_machine_differences(other, run, MACHINE_KEYS) for other in others)


def borrow(
    spare: SpareRuns, prior: NoisePrior | None, metric: str, transform: Transform, steps: Steps
) -> Borrowed:
    """Return what spare runs with finite values at all steps [W] of a claim's window, and a prior, tell."""
    law = VariancePrior(prior.sd**2, prior.dof) if prior else None
    squares, num_reruns = 0.0, 0
    for runs in spare.repeats:
        levels = [level for run in runs if (level := _level(run, metric, transform, steps)) is not None]
        if len(levels) > 1:
            squares += 2 * float(np.var(levels)) * len(levels)
            num_reruns += len(levels) - 1
    if squares > 0:  # reruns that repeat every bit show no noise
        law = VariancePrior(*(law or VariancePrior(0.0, 0.0)).moderate(squares / num_reruns, num_reruns))
    all_levels = {run.name.seed: _level(run, metric, transform, steps) for run in spare.without_pair}
    levels_by_seed = {seed: level for seed, level in all_levels.items() if level is not None}
    return Borrowed(
        law=law,
        num_experiments=prior.experiments if prior else 0,
        num_reruns=num_reruns if squares > 0 else 0,
        levels=np.array([*levels_by_seed.values()]),
        seeds=[*levels_by_seed],
    )


def _level(run: RecordedRun, metric: str, transform: Transform, steps: Steps) -> float | None:
    series = run.series(metric)
    if not (len(steps) and np.isin(steps, series.steps).all()):
        return None
    level = float(reduce_window(transform_with_gaps(series.values_at(steps), transform), metric))
    return level if np.isfinite(level) else None
