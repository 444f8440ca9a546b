"""Sentences on seed noise: one arm alone, and one run beside several."""

from collections.abc import Mapping, Sequence

from abrun.messages.codes import Code
from abrun.messages.message import Message
from abrun.messages.numbers import count_text, counted, difference_unit, interval_text, listed

SURPRISING_SDS = 3  # a distance that would be unusual if the sd were known


def _seed_noise(metric, transform, level, num_runs, steps, sd, interval) -> str:
    value = f"{level:.4g}{difference_unit(transform)}"
    return (
        f"{metric} is {value} over {num_runs} runs ({_window(steps)}); from run to run it varies by "
        f"{sd:.3g} (sd; 90 % CI {interval_text(interval)})"
    )


def _window(steps: Sequence[int] | None) -> str:
    return f"steps {steps[0]}-{steps[1]}" if steps else "final scores"


def _normal_gap(metric, transform, arm, gap, level) -> str:
    share = ""
    if transform == "identity" and gap < abs(level):
        percent = 100 * gap / abs(level)
        share = f" ({percent:{'.0f' if percent >= 10 else '.2g'}} % of the level)"
    return (
        f"two runs of {arm} differ by up to {gap:.3g}{difference_unit(transform)}{share} in {metric} by "
        "their seeds alone; only a larger gap is unusual (95 %)"
    )


def _pairs_show(counts: Sequence[int], differences: Sequence[float]) -> str:
    shown = ", ".join(f"{difference:.3g}" for difference in differences[:-1])
    return (
        f"with {listed(counts[:-1])} or {counts[-1]} pairs of runs, the smallest difference that shows is "
        f"{shown} or {differences[-1]:.3g} (80 % power; arms that do not correlate)"
    )


def _level_alone(arm, metric, level, steps, num_runs) -> str:
    if level is None:
        return f"{metric}: {arm} has no level"
    return f"{metric} is {level:.4g} in {counted(num_runs, 'run')} of {arm} ({_window(steps)})"


def _two_groups(runs: Sequence[Sequence[str]], levels: Sequence[float]) -> str:
    groups = " and ".join(
        f"{level:.3g} ({', '.join(names[:4])}{' ...' * (len(names) > 4)})"
        for names, level in zip(runs, levels, strict=True)
    )
    return (
        f"the runs form two groups, at {groups}: they may be two arms, or some seeds fail; the spread is not "
        "that of one group, so compare the groups, such as A=FOLDER B=FOLDER"
    )


def _new_run(run, several, num_runs, metric, transform, difference, num_sds, p, is_outside) -> str:
    if difference == 0:
        return f"{metric} of {run} is exactly the mean of {several}"
    direction = "below" if difference < 0 else "above"
    place = f"{metric} of {run} is {abs(difference):.3g}{difference_unit(transform)} {direction} {several}"
    if num_sds is None:
        return f"{place}, whose runs do not vary at all, so there is no spread to compare it with"
    finding = "seed noise does not explain it" if is_outside else "seed noise can explain it"
    if not is_outside and num_sds > SURPRISING_SDS:
        finding = f"seed noise can explain it, because the sd of {num_runs} runs is uncertain"
    return f"{place}, {num_sds:.2g} times the usual seed sd: {finding} (p = {p:.2g})"


def _new_run_range(several, steps, num_runs, mean, sd, level, interval, num_metrics) -> str:
    """The levels behind a single run's place, and the range of further runs."""
    if sd == 0:
        own = f"the run's level is {level:.4g} ({_window(steps)})"
        return f"{own}; all {num_runs} runs of {several} are at {mean:.4g}"
    corrected = f"; p is Holm-corrected over {num_metrics} metrics" if num_metrics > 1 else ""
    return (
        f"the run's level is {level:.4g} ({_window(steps)}); the {num_runs} runs of {several} have the mean "
        f"{mean:.4g} and the sd {sd:.3g}, so 95 of 100 further runs would be in {interval_text(interval)}"
        f"{corrected}"
    )


def _new_run_elsewhere(apart: Mapping[str, float], num_metrics: int) -> str:
    """Other metrics of a single run that seed noise does not explain."""
    others = count_text(num_metrics, "other metric")
    if not apart:
        return f"seed noise can explain the difference in {others}, too"
    differences = ", ".join(f"{metric} {difference:+.3g}" for metric, difference in apart.items())
    return f"seed noise does not explain {differences} ({others} tested)"


MESSAGES: dict[Code, Message] = {
    Code.SEED_NOISE: _seed_noise,
    Code.NORMAL_GAP: _normal_gap,
    Code.PAIRS_SHOW: _pairs_show,
    Code.LEVEL_ALONE: _level_alone,
    Code.TWO_GROUPS: _two_groups,
    Code.NEW_RUN: _new_run,
    Code.NEW_RUN_RANGE: _new_run_range,
    Code.NEW_RUN_ELSEWHERE: _new_run_elsewhere,
    Code.NOTHING_TO_COMPARE: "one arm alone: this measures its seed noise and tests nothing; for a verdict "
    "give a second arm, --reference FILE, or a claim on its level",
    Code.ONE_RUN_ALONE: "{run} is the only run, and one run does not show how far seeds are apart, so no gap "
    "can be called normal; train at least two more seeds",
    Code.OUTCOMES_HAVE_NO_GAP: "all values are 0 or 1: the gap of two runs says nothing; claim a level",
    Code.RUNS_ALIKE: "all {num_runs} runs have the same level: they may share a seed, or the metric does not "
    "depend on it, so any difference would count; check that the seed changes the run",
    Code.NO_RUN_IN_WINDOW: "{metric}: no run has finite values at the same steps of the window {window:repr}",
    Code.NO_METRIC_TO_DESCRIBE: "{arm}: no metric is recorded in every run, so there is no level to measure; "
    "map names that mean the same, such as --alias train/reward=NAME",
    Code.UNFINISHED_LEFT_OUT: "runs that did not finish do not count: {num}",
    Code.LEFT_OUT_UNRECORDED: "{run} does not count: it did not record {metric}",
    Code.LEFT_OUT_SHORT: "{run} does not count: it has {metric} at steps {covered[0]}-{covered[1]} of the "
    "window {window[0]}-{window[1]}",
    Code.LEFT_OUT_NOT_FINITE: "{run} does not count: {metric} is not finite at step {step}",
    Code.FEW_STEPS_IN_COMMON: "{metric}: the levels are of the {num_shared} steps that all runs share, of "
    "{num_recorded} in the window; log it at the same steps",
    Code.METRICS_WITHOUT_LEVEL: "not measured, as no run has finite values in the window: {metrics:list}",
}
