"""Seeds of a frozen reference without a later run, which `abrun.stats.control_variate` takes into account."""

import numpy as np

from abrun.metric_names import default_transform
from abrun.recipe.claims import Primary
from abrun.recorded.experiment import Sides
from abrun.stats.equivalence import mean_and_sd
from abrun.stats.series import Array, Steps
from abrun.verdict.skewness import skewness
from abrun.verdict.summaries import outside_domain, summaries

REPEATS = 0.05  # of the reference's sd over seeds: later runs that are all so close repeat their seeds
SKEWED = 0.2  # p of the reference's skewness among normal samples, below which the pairs alone are tested


def unused_summaries(sides: Sides, primary: Primary, steps: Steps) -> dict[int, float]:
    """Return the summary of each unused seed that holds numbers at every step of the window [W]."""
    summary_of = {}
    transform = primary.transform or default_transform(primary.metric)
    for run in sides.unused:
        series = run.series(primary.metric)
        values = series.values[np.isin(series.steps, steps)]
        if len(values) == len(steps) and np.isfinite(values).all() and not outside_domain(values, transform):
            summary_of[run.name.seed] = float(summaries(values[None], primary)[0])
    return summary_of


def has_use(baseline: Array, treatment: Array, unused: Array) -> bool:
    """Return whether unused seeds help: not where later runs repeat theirs, nor where seeds may be skewed.

    Differences of equally skewed runs are symmetric, t - c b is not. Of fewer than four seeds, and of values
    that are mostly alike, skewness is not known.
    """
    reference = np.concatenate([baseline, unused])
    if not len(unused) or len(baseline) < 2:
        return False
    if np.abs(treatment - baseline).max() <= REPEATS * mean_and_sd(reference)[1]:
        return False
    found = skewness(reference)
    return found is not None and found[1] >= SKEWED
