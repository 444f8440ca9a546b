"""Runs scored per prompt: the prompts that all runs share, and prompts as the units of a test.

With several runs of an arm the seed is the unit: each run's mean over the shared prompts is one observation.
With one run of each arm the prompt is the unit, and the result covers these two runs only. Differences are
taken prompt by prompt, and the samples of a prompt were averaged before, which is the clustered error of
equally weighted prompts (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, sections 2.2 and 4).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.log import Log
from abrun.logs.recorded.experiment import RecordedRun, Sides
from abrun.messages.codes import Code, Reason
from abrun.runs.layout import RunName
from abrun.stats.series import Series, Steps


def share_prompts(logs: Mapping[RunName, Log]) -> tuple[dict[RunName, Log], list[Reason]]:
    """Return the logs with only the prompts that all of them have, and the metrics that lost some.

    A metric that some run lacks stays as it is. Raises ComparisonError for a metric without a shared prompt.
    """
    left_out: list[Reason] = []
    shared_logs = dict(logs)
    if any(log.axis != "prompts" for log in logs.values()):
        return shared_logs, left_out
    for metric in sorted({metric for log in logs.values() for metric in log.metrics}):
        series = [log.metrics[metric] for log in logs.values() if metric in log.metrics]
        if len(series) < len(logs):
            continue
        grids = [metric_series.steps for metric_series in series]
        shared, all_prompts = reduce(np.intersect1d, grids), reduce(np.union1d, grids)
        if len(shared) == len(all_prompts):
            continue
        if not len(shared):
            places = [log.place for log in logs.values()][:2]
            raise ComparisonError(
                f"{metric}: no prompt is in every run ({places}); score all runs on the same prompts"
            )
        left_out.append(Code.PROMPTS_NOT_SHARED(metric=metric, shared=len(shared), total=len(all_prompts)))
        for name, log in shared_logs.items():
            prompts = log.metrics[metric]
            inside = np.isin(prompts.steps, shared)
            cut_series = Series(prompts.steps[inside], prompts.values[inside])
            shared_logs[name] = replace(log, metrics={**log.metrics, metric: cut_series})
    return shared_logs, left_out


def has_prompts_as_units(sides: Sides) -> bool:
    """Return True for one run of each arm, or of the only arm, scored per prompt."""
    return sides.sizes in ((1, 1), (0, 1)) and sides.axis == "prompts"


def select_units(sides: Sides, metric: str) -> Sides:
    """Return the observations of a claim on a metric: the runs, or the prompts of one run of each arm.

    Each prompt becomes a run with one score, at the first prompt's step.
    """
    if not has_prompts_as_units(sides):
        return sides
    shared = reduce(np.intersect1d, [run.series(metric).steps for run in sides.runs])
    baselines, treatments = (
        tuple(prompt_run for run in runs for prompt_run in _make_prompt_runs(run, metric, shared))
        for runs in sides.arms
    )
    return Sides(baselines=baselines, treatments=treatments, paired=sides.paired or bool(baselines))


def _make_prompt_runs(run: RecordedRun, metric: str, prompts: Steps) -> Iterator[RecordedRun]:
    for prompt, score in zip(prompts.tolist(), run.series(metric).values_at(prompts), strict=True):
        yield RecordedRun(
            name=RunName(arm=run.name.arm, seed=prompt, rerun=run.name.rerun),
            place=run.place,
            status=run.status,
            metrics={metric: Series(prompts[:1], np.array([score]))},
            axis="prompts",
        )
