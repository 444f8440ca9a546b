"""What the claims look like while runs are still to come: a line each, and no verdict."""

from collections.abc import Iterator
from pathlib import Path

from abrun.compare.judge.claims import PrimaryResult, judge_primary
from abrun.compare.judge.limits import judge_limit
from abrun.compare.judge.margins import resolved_margin
from abrun.compare.read.experiment import Experiment
from abrun.compare.read.reference import against_reference
from abrun.compare.read.stored import load_experiment
from abrun.equivalence import ALPHA
from abrun.errors import AbrunError
from abrun.messages.numbers import difference_unit


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
                found = judge_limit(arm, sides, claim, grid, ALPHA, ALPHA)
            else:
                found = judge_primary(arm, sides, claim, resolved_margin(claim, experiment.reference), grid)
            said = _said(found)
            if said:
                counted = f"{found.num_pairs} of {planned} pairs"
                if found.num_runs:
                    counted = "{} and {} unpaired runs".format(*found.num_runs)
                yield f"{f'{arm}, ' if several else ''}{found.metric}: {counted} so far, {said}"


def _said(found: PrimaryResult) -> str | None:
    """Difference, interval and margin, or what is limited; None before there is an interval."""
    level = f"{100 * (1 - 2 * found.alpha):.3g} %"
    if found.limited is not None and found.limited_interval is not None:
        low, high = found.limited_interval
        return f"{found.limited:.4g} [{low:.4g}, {high:.4g}] ({level}), limit {found.margin_text}"
    if found.mean_difference is None or found.interval is None:
        return None
    low, high = found.interval
    place = ""
    if found.margin is not None:
        inside, outside = (
            -found.margin < low and high < found.margin,
            low > found.margin or high < -found.margin,
        )
        place = ": inside" if inside else ": outside" if outside else ": not decided"
    interval = f"[{low:.3g}, {high:.3g}]{difference_unit(found.transform)} ({level})"
    return f"difference {found.mean_difference:+.3g} {interval}, margin {found.margin_text}{place}"
