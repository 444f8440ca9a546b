"""Seeds of a frozen reference without a later run, which `abrun.control_variate` takes into account."""

import numpy as np

from abrun.compare.judge.summaries import outside_domain, summaries
from abrun.compare.read.experiment import Sides
from abrun.metric_names import default_transform
from abrun.recipe import Primary
from abrun.series import Steps


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
