"""What the claims look like while runs are still to come: a line each, and no verdict."""

from collections.abc import Iterator
from pathlib import Path

from abrun.errors import AbrunError
from abrun.messages.numbers import difference_unit, interval_level_text
from abrun.recorded.experiment import Experiment
from abrun.recorded.reference import against_reference
from abrun.recorded.stored import load_experiment
from abrun.verdict.claims import judge_primary
from abrun.verdict.limits import judge_limit
from abrun.verdict.margins import resolved_margin
from abrun.verdict.results import PrimaryResult


def so_far(experiment_dir: Path) -> list[str]:
    """A line for each claim and arm over the pairs that have finished; none before two have.

    Looking at them changes no verdict; stopping by them is for `compare.looks`, at their level. What cannot
    be read yet is left out: the comparison at the end says what is wrong.
    """
    try:
        experiment = load_experiment(experiment_dir)
        if experiment.reference and not experiment.treatments:
            experiment = against_reference(experiment, experiment.reference, experiment.baseline)
        return list(_lines(experiment))
    except AbrunError:
        return []


def _lines(experiment: Experiment) -> Iterator[str]:
    several = len(experiment.treatments) > 1
    for arm in experiment.treatments:
        sides = experiment.sides(arm).finished
        planned = len(experiment.pairs(arm)) or min(experiment.sides(arm).sizes)
        for claim in experiment.compare.primary:
            grid = experiment.steps_of(claim.metric)
            if claim.margin is None:
                found = judge_limit(arm, sides, claim, grid)
            else:
                found = judge_primary(arm, sides, claim, resolved_margin(claim, experiment.reference), grid)
            said = _said(found)
            if said:
                counted = f"{found.claim.num_pairs} of {planned} pairs"
                if found.claim.num_runs:
                    counted = "{} and {} unpaired runs".format(*found.claim.num_runs)
                yield f"{f'{arm}, ' if several else ''}{claim.metric}: {counted} so far, {said}"


def _said(found: PrimaryResult) -> str | None:
    """Difference, interval and margin, or what is limited; None before there is an interval."""
    claim, estimate = found.claim, found.estimate
    level = interval_level_text(claim.alpha)
    if estimate.limited is not None and estimate.limited_interval is not None:
        low, high = estimate.limited_interval
        return f"{estimate.limited:.4g} [{low:.4g}, {high:.4g}] ({level}), limit {claim.margin_text}"
    if estimate.mean_difference is None or estimate.interval is None:
        return None
    low, high = estimate.interval
    place = ""
    if claim.margin is not None:
        inside, outside = (
            -claim.margin < low and high < claim.margin,
            low > claim.margin or high < -claim.margin,
        )
        place = ": inside" if inside else ": outside" if outside else ": not decided"
    interval = f"[{low:.3g}, {high:.3g}]{difference_unit(claim.transform)} ({level})"
    return f"difference {estimate.mean_difference:+.3g} {interval}, margin {claim.margin_text}{place}"
