"""INVALID comes first: what must hold before two arms are comparable at all (verdict.md, rule 3)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from abrun.compare.guards import shared_peak_counter
from abrun.compare.metrics import PEAK_MEMORY, STEP_TIME, TOKEN_MULT_PROB_ERROR
from abrun.compare.sources import Experiment, Pair, Run, union_of_steps, window_bounds
from abrun.recipe import BASELINE, Primary

# What of environment.json must not differ between paired runs. Hosts may.
ENVIRONMENT = {
    "versions": "package versions differ",
    "python": "the Python version differs",
    "devices": "devices differ",
    "prompts_sha256": "the prompt hash differs",
}


def invalid_reasons(experiment: Experiment, arm: str, primaries: Sequence[Primary]) -> list[str]:
    """One sentence for each thing that makes this arm and the baseline incomparable; empty: comparable.

    A treatment that failed where its baseline finished is not among them: that is a result (see guards).
    """
    pairs = experiment.pairs(arm)
    reruns = [run for run in experiment.runs.values() if run.name.rerun]
    finished = [run for pair in pairs for run in (pair.baseline, pair.treatment) if run.finished]
    finished += [run for run in reruns if run.finished]
    return [
        *_unpaired(experiment, arm),
        *_unfinished([pair.baseline for pair in pairs] + reruns, [pair.treatment for pair in pairs]),
        *_mistaken([*(run for pair in pairs for run in (pair.baseline, pair.treatment)), *reruns]),
        *_config_differences(experiment, arm, pairs, reruns),
        *_environment_differences(pairs),
        *_other_steps(finished),
        *_missing_metrics(experiment, finished, primaries),
        *_baseline_not_a_number(experiment, pairs, primaries),
    ]


def coverage(pairs: Sequence[Pair]) -> dict[str, int]:
    """How many steps the finished pairs share, of those that any of them has."""
    finished = [run for pair in pairs if pair.finished for run in (pair.baseline, pair.treatment)]
    shared = set.intersection(*({int(step) for step in run.steps} for run in finished)) if finished else set()
    return {"shared_steps": len(shared), "all_steps": len(union_of_steps(finished))}


def _unpaired(experiment: Experiment, arm: str) -> Iterator[str]:
    baseline, treatment = experiment.arm(BASELINE), experiment.arm(arm)
    for seed in sorted(baseline.keys() ^ treatment.keys()):
        lacking = arm if seed in baseline else BASELINE
        yield f"unpaired seed {seed}: {lacking} has no run of it; every seed needs both arms"


def _unfinished(baselines: Sequence[Run], treatments: Sequence[Run]) -> Iterator[str]:
    for run in [*baselines, *treatments]:
        if run.status == "failed" and run in baselines:
            yield (
                f"{run} failed ({run.failure}): without its baseline a seed says nothing about "
                "the treatment; mend the cause and launch with --resume"
            )
        elif run.status not in ("finished", "failed"):
            there = "" if run.directory.is_dir() else "; its directory is missing"
            yield f"{run} is not finished ({run.status}{there}): launch with --resume"


def _mistaken(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        planned = {"arm": run.name.arm, "seed": run.name.seed, "rerun": run.name.rerun}
        if run.directory.is_dir() and run.identity != planned:
            states = ", ".join(f"{key} {value}" for key, value in run.identity.items())
            yield f"{run}: its config.json is that of another run ({states}): run directories were exchanged"


def _config_differences(
    experiment: Experiment, arm: str, pairs: Sequence[Pair], reruns: Sequence[Run]
) -> Iterator[str]:
    """Each run's resolved configuration against one baseline's: the declared treatment, and nothing else."""
    if not pairs:
        return
    reference = next((pair.baseline for pair in pairs if pair.baseline.config), pairs[0].baseline)
    declared = {key: values[1] for key, values in experiment.treatment_diff.get(arm, {}).items()}
    if any(key.split(".")[0] in ("model", "task", "warm_start") for key in declared):
        declared["initial_weights"] = ...  # follows from such a treatment: any value
    for run in [*(pair.baseline for pair in pairs), *reruns]:
        yield from _differences(run, reference, {})
    for pair in pairs:
        yield from _differences(pair.treatment, reference, declared)


def _differences(run: Run, reference: Run, declared: dict[str, Any]) -> Iterator[str]:
    if not run.directory.is_dir():
        return  # already said: not finished
    for key in sorted({*run.config, *reference.config}):
        got, expected = run.config.get(key), declared.get(key, reference.config.get(key))
        if got != expected and expected is not ...:
            if key in declared:
                yield f"{run}: config {key} is {got!r}, not {expected!r} as the treatment declares"
            else:
                yield (
                    f"{run}: config {key} is {got!r}, but {expected!r} in {reference}: "
                    "outside the declared treatment"
                )


def _environment_differences(pairs: Sequence[Pair]) -> Iterator[str]:
    for pair in pairs:
        for run in (pair.treatment, *pair.reruns):
            for one in (pair.baseline, run):
                if one.finished and one.environment is None:
                    yield f"{one}: environment.json is missing: versions, devices and prompts are unknown"
            if pair.baseline.environment is None or run.environment is None:
                continue
            for key, what in ENVIRONMENT.items():
                yield from _environment_difference(pair.baseline, run, key, what)


def _environment_difference(baseline: Run, run: Run, key: str, what: str) -> Iterator[str]:
    assert baseline.environment is not None and run.environment is not None
    left, right = baseline.environment.get(key), run.environment.get(key)
    if left == right:
        return
    if isinstance(left, dict) and isinstance(right, dict):
        names = sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
        shown = ", ".join(f"{name} {left.get(name)} against {right.get(name)}" for name in names[:3])
        shown += f" and {len(names) - 3} more" if len(names) > 3 else ""
    else:
        shown = f"{_brief(left)} against {_brief(right)}"
    yield f"{what} between {baseline} and {run}: {shown}"


def _brief(value: Any) -> str:
    if isinstance(value, list):
        names = sorted({str(item) for item in value})
        return f"{len(value)} x {', '.join(names)}"
    return str(value)[:16]


def _other_steps(finished: Sequence[Run]) -> Iterator[str]:
    everything = union_of_steps(finished)
    for run in finished:
        if len(run.steps) < len(everything):
            lacking = np.setdiff1d(everything, run.steps)
            yield (
                f"step grids differ: {run} holds {len(run.steps)} of {len(everything)} steps "
                f"({len(run.steps) / len(everything):.0%}; step {lacking[0]} is the first it lacks); "
                "compared on shared steps only"
            )


def _missing_metrics(
    experiment: Experiment, finished: Sequence[Run], primaries: Sequence[Primary]
) -> Iterator[str]:
    guards = experiment.recipe.compare.guards
    needed = {primary.metric: "primary" for primary in primaries}
    if guards.step_time_ratio is not None:
        needed.setdefault(STEP_TIME, "guard")
    if any(TOKEN_MULT_PROB_ERROR in run.metrics for run in finished):
        needed.setdefault(TOKEN_MULT_PROB_ERROR, "guard")  # an arm must not pass by not measuring
    for metric, role in needed.items():
        grids = {run: set(run.series(metric)) for run in finished}
        everything = set().union(*grids.values())
        for run, grid in grids.items():
            lacking = everything.intersection(run.steps.tolist()) - grid
            if not grid:
                yield f"missing metric: {run} did not record {metric} ({role})"
            elif lacking:
                yield f"missing metric: {run} did not record {metric} ({role}) at step {min(lacking)}"
    if guards.peak_memory_ratio is not None and finished and shared_peak_counter(finished) is None:
        yield f"missing metric: not every run recorded memory/<phase>/{' or '.join(PEAK_MEMORY)} (guard)"


def _baseline_not_a_number(
    experiment: Experiment, pairs: Sequence[Pair], primaries: Sequence[Primary]
) -> Iterator[str]:
    grid = experiment.all_steps()
    if not len(grid):
        return
    for primary in primaries:
        first, last = window_bounds(primary.window, grid, primary.metric)
        for pair in pairs:
            step = pair.baseline.first_non_finite(primary.metric, first, last)
            if step is not None:
                value = pair.baseline.series(primary.metric)[step]
                yield f"{pair.baseline}: {primary.metric} is {value} at step {step} in the baseline itself"
