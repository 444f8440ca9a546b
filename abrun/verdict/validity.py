"""Validity checks, which come first: are two arms comparable at all? (docs/explanation/verdict.md)"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from abrun.logs.recorded.experiment import (
    RecordedExperiment,
    RecordedRun,
    Sides,
    no_shared_step_reason,
    union_steps,
)
from abrun.messages.codes import Code, Reason
from abrun.recipe.claims import Claim, Guards
from abrun.recipe.merging import implied_by_types
from abrun.recipe.run import can_change_numbers
from abrun.runs.metric_names import (
    DIVERGENCE_RATE,
    OF_RUNS,
    PEAK_MEMORY,
    STEP_ONE,
    STEP_TIME,
    TOKEN_MULT_PROB_ERROR,
    is_clock,
)
from abrun.runs.redaction import yaml_text
from abrun.stats.series import Array, in_window, intersect_steps, window_bounds
from abrun.verdict.grids import find_grid_problems, find_missing_steps, find_text_values
from abrun.verdict.guards import shared_peak_counter
from abrun.verdict.limits import counts_failures
from abrun.verdict.machines import (
    INITIAL_WEIGHTS,
    MACHINE_KEYS,
    PAIRED_KEYS,
    SCRIPTS,
    STARTED_FROM,
    find_differences_within_arms,
    find_environment_difference,
    find_machine_differences,
    has_treated_machine,
    treated_machine_keys,
)

MAX_NAMED = 12
TRAINER_KEYS = ("trainer.type", "trainer.python", "trainer.argv")


def invalid_reasons(
    experiment: RecordedExperiment, arm: str, num_pairs: int, claims: Sequence[Claim]
) -> list[Reason]:
    """Return everything that makes this arm and the baseline incomparable; empty if they are comparable.

    The first `num_pairs` pairs must have ended. Independent runs may differ in prompts and initial weights. A
    treatment that failed while its baseline finished is a result (see guards).
    """
    sides, pairs = experiment.sides(arm), experiment.pairs(arm)
    runs, baselines = sides.runs, sides.baselines
    finished, treatments = sides.finished.runs, sides.treatments
    if sides.paired:
        needed = pairs[:num_pairs]
        reruns = [run for pair in pairs for run in pair.reruns]
        runs = (*(run for pair in pairs for run in pair.runs), *reruns)
        baselines = tuple(run for pair in needed for run in (pair.baseline, *pair.reruns))
        treatments = tuple(pair.treatment for pair in needed)
        finished = tuple(run for pair in needed for run in (*pair.runs, *pair.reruns) if run.finished)
    return [
        *(_check_seeds(experiment, arm, is_claimed=bool(claims)) if sides.paired else ()),
        *_check_finished(baselines, treatments, paired=sides.paired, may_fail=counts_failures(claims)),
        *_check_identities(runs),
        *check_copies(runs),
        *_check_rollouts(experiment, arm, sides),
        *_check_configs(experiment, arm, sides, [run for pair in pairs for run in pair.reruns]),
        *_check_environments(experiment, arm, sides),
        # What finished runs miss at the steps that claims and guards read
        *_check_steps(experiment, [run for run in finished if not run.thinned], claims),
        *_check_reference_windows(experiment, finished, claims),
        *_check_metrics(experiment, finished, claims),
        *find_text_values(experiment, finished, claims),
        *_check_baseline_finite(experiment, [run for run in baselines if not run.name.rerun], claims),
    ]


def find_treatment_diff(experiment: RecordedExperiment, arm: str) -> dict[str, list[Any]]:
    """Return the arm's config differences: dotted key -> [baseline's value, the arm's], declared or found."""
    if experiment.treatment_diff is not None:
        return {key: list(values) for key, values in experiment.treatment_diff.get(arm, {}).items()}
    sides = experiment.sides(arm)
    if not all(sides.sizes):
        return {}
    # With one run of each independent arm, every key that names the run would differ as well.
    values = _config_values(sides).items() if sides.paired or min(sides.sizes) > 1 else ()
    config_diff = {
        key: [baseline[0], treatment[0]]
        for key, (baseline, treatment) in values
        if _is_constant(baseline, treatment) and baseline[0] != treatment[0]
    }
    return config_diff | find_machine_differences(
        sides.baselines[0], sides.treatments[0], treated_machine_keys(experiment)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Number of steps that all finished pairs, or runs, share, out of those that any of them has."""

    shared_steps: int
    all_steps: int


def measure_coverage(sides: Sides) -> Coverage:
    finished = sides.finished.runs
    all_steps = union_steps(run.steps for run in finished)
    shared = intersect_steps(all_steps, *(run.steps for run in finished))
    return Coverage(shared_steps=len(shared), all_steps=len(all_steps))


def _check_seeds(experiment: RecordedExperiment, arm: str, *, is_claimed: bool) -> Iterator[Reason]:
    """Yield the seeds that only one arm has.

    A description leaves them out, and so does a claim on existing logs if only the baseline lacks some: where
    the treatment does, its runs may have failed.
    """
    baseline, treatment = experiment.arm(experiment.baseline), experiment.arm(arm)
    can_unpair = not experiment.launched_compare_sha256
    if not baseline.keys() & treatment.keys():
        yield Code.NO_SHARED_SEED(
            baseline=experiment.baseline,
            baseline_seeds=sorted(baseline),
            arm=arm,
            arm_seeds=sorted(treatment),
            can_unpair=can_unpair,
        )
        return
    for lacking_arm, seeds in (
        (arm, sorted(baseline.keys() - treatment.keys())),
        (experiment.baseline, sorted(treatment.keys() - baseline.keys())),
    ):
        if not seeds or (experiment.regression and lacking_arm == arm):
            continue  # a later run may have fewer seeds than the reference
        is_harmless = not is_claimed or baseline.keys() < treatment.keys()
        code = Code.SEEDS_NOT_SHARED if can_unpair and is_harmless else Code.UNPAIRED_SEEDS
        yield code(seeds=seeds, arm=lacking_arm, can_unpair=can_unpair)


def _check_finished(
    baselines: Sequence[RecordedRun], treatments: Sequence[RecordedRun], *, paired: bool, may_fail: bool
) -> Iterator[Reason]:
    failed: dict[tuple[bool, str], list[str]] = {}
    for run in baselines:
        if run.status == "failed" and (run.name.rerun or not may_fail):
            failed.setdefault((run.name.rerun > 0, run.failure), []).append(str(run))
    for (is_rerun, failure), runs in failed.items():
        # Pairs are complete without reruns, but step one can fail by the noise floor. A noise floor from only
        # the surviving reruns is smaller than the declared one.
        baseline_code = Code.BASELINE_FAILED if paired else Code.UNPAIRED_BASELINE_FAILED
        yield (Code.RERUN_FAILED if is_rerun else baseline_code)(runs=runs, failure=failure)
    for run in [*baselines, *treatments]:
        if run.status == "unreadable":
            yield Code.RUN_UNREADABLE(run=str(run), problem=run.failure, forbidden=run.forbidden)
        elif not run.finished and run.status != "failed":
            yield Code.RUN_NOT_FINISHED(run=str(run), status=run.status)


def _check_identities(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    for run in runs:
        planned = {"arm": run.name.arm, "seed": run.name.seed, "rerun": run.name.rerun}
        if run.status != "missing" and run.identity is not None and run.identity != planned:
            yield Code.RUNS_EXCHANGED(run=str(run), identity=run.identity)


def _check_rollouts(experiment: RecordedExperiment, arm: str, sides: Sides) -> Iterator[Reason]:
    """Yield the pairs that trained on different recorded rollouts."""
    for run, other in [pair.runs for pair in experiment.pairs(arm)] if sides.paired else ():
        hashes = run.rollouts_sha256, other.rollouts_sha256
        replays = run.trains_on_recording or other.trains_on_recording
        if replays and run.finished and other.finished and hashes[0] != hashes[1]:
            yield Code.ROLLOUTS_DIFFER(run=str(run), other=str(other), recorded=None not in hashes)


def check_copies(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    """Yield copied runs: runs may repeat each other's numbers, but not times. (References are copies.)"""
    earlier: list[RecordedRun] = []
    for run in runs:
        if run.thinned:
            continue
        original = next((earlier_run for earlier_run in earlier if _is_copy(run, earlier_run)), None)
        if original:
            yield Code.RUN_COPIED(run=str(run), original=str(original))
        earlier.append(run)


def _is_copy(run: RecordedRun, earlier_run: RecordedRun) -> bool:
    """Return True if all shared metrics agree to float32, times included (TensorBoard's precision)."""
    metrics = run.metrics.keys() & earlier_run.metrics.keys()
    is_timed = False
    for metric in sorted(metrics, key=is_clock, reverse=True):
        series, earlier_series = run.metrics[metric], earlier_run.metrics[metric]
        shared = intersect_steps(series.steps, earlier_series.steps)
        values = series.values_at(shared)
        if not _is_equal_to_float32(values, earlier_series.values_at(shared)):
            return False
        is_timed |= is_clock(metric) and len(values) > 0 and bool(np.ptp(values) > 0)
    return is_timed


def _is_equal_to_float32(values: Array, other_values: Array) -> bool:
    """Return np.allclose without its overhead, which all pairs of 500 runs would pay."""
    with np.errstate(invalid="ignore", over="ignore"):
        is_close = np.abs(values - other_values) <= 1e-6 * np.abs(other_values)
    is_close &= np.isfinite(other_values)
    return bool((is_close | (values == other_values) | (np.isnan(values) & np.isnan(other_values))).all())


def _check_configs(
    experiment: RecordedExperiment, arm: str, sides: Sides, reruns: Sequence[RecordedRun]
) -> Iterator[Reason]:
    """Yield config differences of a run beyond the declared treatment.

    If nothing was declared: keys that follow neither the arm nor the seed, and do not name the run.
    """
    if experiment.treatment_diff is None:
        yield from check_mixed_configs(sides)
        return
    baselines = [*sides.baselines, *reruns]
    reference = next((run for run in baselines if run.config), None)
    declared = {key: values[1] for key, values in find_treatment_diff(experiment, arm).items()}
    if _declares_other_weights(declared):
        declared["initial_weights"] = ...  # such a treatment may have any initial weights
    if reference is None:
        return
    for run in baselines:
        yield from _check_config(run, reference, {})
    for run in sides.treatments:
        yield from _check_config(run, reference, declared)


def check_mixed_configs(sides: Sides) -> Iterator[Reason]:
    """Yield the keys that follow neither the arm nor the seed, and do not name the run."""
    for key, (baseline, treatment) in _config_values(sides).items():
        if _is_mixed(baseline, treatment, paired=sides.paired):
            texts = map(yaml_text, [*baseline, *treatment])
            values = list(zip(map(str, sides.runs), texts, strict=True))
            groups = [[value] for value in values]
            if sides.paired:
                halves = values[: len(baseline)], values[len(baseline) :]
                groups = [[*pair_values] for pair_values in zip(*halves, strict=True)]
            yield Code.CONFIG_MIXED(key=key, values=groups, paired=sides.paired)


def _declares_other_weights(declared: Iterable[str]) -> bool:
    return any(
        key.split(".")[0] in ("model", "task", "warm_start") or key == "checkpoint.start_from"
        for key in declared
    )


def _check_config(run: RecordedRun, reference: RecordedRun, declared: dict[str, Any]) -> Iterator[Reason]:
    if run.status in ("missing", "unreadable"):
        return  # already reported as not finished
    if run.config is None:
        yield Code.CONFIG_MISSING(run=str(run))
        return
    config, reference_config = _compared_config(run), _compared_config(reference)
    implied = implied_by_types(reference_config, config) - declared.keys()
    for key in sorted({*config, *reference_config} - implied):
        actual, expected = config.get(key), declared.get(key, reference_config.get(key))
        if actual != expected and expected is not ...:
            value, expected_text = yaml_text(actual), yaml_text(expected)
            if key in declared:
                yield Code.CONFIG_NOT_AS_DECLARED(run=str(run), key=key, value=value, declared=expected_text)
            else:
                yield Code.CONFIG_DIFFERS(
                    run=str(run), key=key, value=value, expected=expected_text, reference=str(reference)
                )


def _compared_config(run: RecordedRun) -> Mapping[str, Any]:
    """Return a run's configuration without those of abrun's keys that cannot change a number."""
    config = run.config or {}
    is_abrun = "trainer.type" in config
    return {key: value for key, value in config.items() if not is_abrun or can_change_numbers(key)}


def _config_values(sides: Sides) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return dotted key -> its values in both arms; empty if a run's configuration is unknown."""
    if any(run.config is None for run in sides.runs):
        return {}
    baseline, treatment = (list(map(_compared_config, runs)) for runs in sides.arms)
    keys = sorted({key for run_config in (*baseline, *treatment) for key in run_config})
    return {
        key: ([config.get(key) for config in baseline], [config.get(key) for config in treatment])
        for key in keys
    }


def _is_constant(baseline: Sequence[Any], treatment: Sequence[Any]) -> bool:
    return all(value == arm_values[0] for arm_values in (baseline, treatment) for value in arm_values)


def _is_mixed(baseline: list[Any], treatment: list[Any], *, paired: bool) -> bool:
    """Return True if a key follows neither the arm nor the seed, and does not name the run."""
    if _is_constant(baseline, treatment) or (paired and baseline == treatment):
        return False
    samples = [[*baseline, *treatment]] if paired else [baseline, treatment]
    return any(len({repr(value) for value in sample}) < len(sample) for sample in samples)


def _check_environments(experiment: RecordedExperiment, arm: str, sides: Sides) -> Iterator[Reason]:
    """Yield environment differences within pairs, or among independent runs.

    Against a reference, other versions and devices are what is tested. If the treatment is another trainer,
    other packages belong to it.
    """
    declared, machine_keys = find_treatment_diff(experiment, arm), treated_machine_keys(experiment)
    keys = [key for key in (PAIRED_KEYS if sides.paired else MACHINE_KEYS) if key not in machine_keys]
    if not experiment.regression:
        if any(key in TRAINER_KEYS for key in declared):
            keys = ["devices"]
        yield from find_differences_within_arms([sides.baselines, sides.treatments], machine_keys)
    # On another machine than the reference's, a warm start ends with other roundings
    may_differ = experiment.regression and has_treated_machine(experiment, arm)
    treated_keys = {INITIAL_WEIGHTS} if may_differ or _declares_other_weights(declared) else set[str]()
    treated_keys |= {STARTED_FROM} if "checkpoint.start_from" in declared else set()
    compared = [(sides.runs[0], run) for run in sides.runs[1:]]
    if sides.paired:
        pairs = experiment.pairs(arm)
        compared = [(pair.baseline, run) for pair in pairs for run in (pair.treatment, *pair.reruns)]
    is_declared = experiment.treatment_diff is not None and sides.paired
    for baseline, run in compared:
        for paired_run in (baseline, run):
            if is_declared and paired_run.status == "finished" and paired_run.environment is None:
                yield Code.ENVIRONMENT_MISSING(run=str(paired_run))
        if baseline.environment is None or run.environment is None:
            continue
        for key in keys:
            is_unrecorded = None in (baseline.environment.get(key), run.environment.get(key))
            may_lack = not is_declared or key in (INITIAL_WEIGHTS, SCRIPTS)
            if key in treated_keys or (is_unrecorded and may_lack):
                continue  # not recorded by this framework or version: listed as not tested
            yield from find_environment_difference(baseline, run, key)


def _claim_windows(
    experiment: RecordedExperiment, claims: Sequence[Claim]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each claim's metric with the first and last step of its window, if any run recorded it."""
    for claim in claims:
        grid = experiment.metric_steps(claim.metric)
        if len(grid) and claim.metric != DIVERGENCE_RATE:
            yield claim.metric, window_bounds(claim.window, grid, claim.metric)


def _check_steps(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """Yield runs that lack a claim's window; runs of abrun's own trainer must hold every step."""
    reason = no_shared_step_reason(finished)
    if reason:
        yield reason
        return
    windows: dict[str, tuple[int, int] | None] = {}
    trained_here = any((run.config or {}).get("trainer.type") == "abrun" for run in finished)
    if trained_here:
        recorded = [name for name in STEP_ONE if all(len(run.series(name)) for run in finished)]
        windows = dict.fromkeys(recorded[:1])
    if counts_failures(claims):  # a run that is short of the end has not shown that it does not diverge
        watched = (metric for metric in Guards().finite if len(experiment.metric_steps(metric)))
        claims = [*claims, *(Claim(metric=metric, margin=1) for metric in islice(watched, 1))]
    for metric, bounds in _claim_windows(experiment, claims):
        windows.setdefault(metric, bounds)
    for metric, bounds in windows.items():
        yield from find_grid_problems(finished, metric, bounds, strict=trained_here)


def _check_reference_windows(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """Yield windows in which the later runs hold other steps than the reference."""
    for metric, (first_step, last_step) in _claim_windows(
        experiment, claims if experiment.regression else ()
    ):
        reference, later = (
            steps[in_window(steps, (first_step, last_step))]
            for steps in (
                union_steps(run.series(metric).steps for run in finished if run.thinned == thinned)
                for thinned in (True, False)
            )
        )
        if not np.array_equal(reference, later):
            yield Code.REFERENCE_STEPS_DIFFER(
                metric=metric,
                first=first_step,
                last=last_step,
                num_reference=len(reference),
                num_later=len(later),
            )


def _check_metrics(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    guards = experiment.compare.guards
    needed = {claim.metric: "claim" for claim in claims if claim.metric not in OF_RUNS}
    if guards.step_time_ratio is not None:
        needed.setdefault(STEP_TIME, "guard")
    if any(TOKEN_MULT_PROB_ERROR in run.metrics for run in finished):
        needed.setdefault(TOKEN_MULT_PROB_ERROR, "guard")  # an arm must not pass by not recording it
    for metric, role in needed.items():
        all_steps = union_steps(run.series(metric).steps for run in finished)
        if finished and not len(all_steps):
            yield _metric_missing_reason(metric, role, None, None, finished[0])
            continue
        for run in finished:
            grid = run.series(metric).steps
            if not len(grid):
                yield _metric_missing_reason(metric, role, run, None, run)
            elif role == "guard" and not run.thinned:
                absent = find_missing_steps(run, metric, intersect_steps(all_steps, run.steps))
                if len(absent):
                    yield _metric_missing_reason(metric, role, run, int(absent[0]), run)
    if guards.peak_memory_ratio is not None and finished and shared_peak_counter(finished) is None:
        yield Code.PEAK_MEMORY_MISSING(counters=" or ".join(PEAK_MEMORY))


def _metric_missing_reason(
    metric: str, role: str, run: RecordedRun | None, step: int | None, example: RecordedRun
) -> Reason:
    """Return that a run, or every run (None), lacks a metric. `example` shows what its log has instead."""
    alias_name = (example.config or {}).get(f"trainer.aliases.{metric}")
    alias = {"name": str(alias_name), "logged": sorted(example.metrics)[:MAX_NAMED]}
    return Code.METRIC_MISSING(
        metric=metric,
        role=role,
        run=None if run is None else str(run),
        step=step,
        unread=example.unread.get(metric),
        alias=None if alias_name is None else alias,
    )


def _check_baseline_finite(
    experiment: RecordedExperiment, baselines: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    for metric, (first_step, last_step) in _claim_windows(experiment, claims):
        for run in baselines:
            step = run.first_non_finite(metric, first_step, last_step)
            if step is not None:
                value = run.series(metric).value_at(step)
                yield Code.BASELINE_NOT_FINITE(run=str(run), metric=metric, value=value, step=step)
