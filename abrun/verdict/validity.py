"""INVALID comes first: what must hold before two arms are comparable at all (verdict.md, rule 3)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abrun.metric_names import (
    FINAL_WEIGHTS,
    MEMORY_PEAK,
    PEAK_MEMORY,
    STEP_ONE,
    STEP_TIME,
    TOKEN_MULT_PROB_ERROR,
    is_clock,
)
from abrun.reasons import Code, Reason
from abrun.recipe.claims import Claim
from abrun.recipe.run import can_change_numbers
from abrun.recorded.experiment import (
    RecordedExperiment,
    RecordedRun,
    Sides,
    no_shared_step_reason,
    union_steps,
)
from abrun.redaction import in_yaml
from abrun.stats.series import Array, Steps, shared_steps, window_bounds
from abrun.verdict.grids import lacking, text_in_windows, unlike_grids
from abrun.verdict.guards import shared_peak_counter
from abrun.verdict.machines import (
    ENVIRONMENT,
    INITIAL_WEIGHTS,
    OF_THE_MACHINE,
    STARTED_FROM,
    environment_difference,
    machine_differences,
    treated_keys,
    within_arms,
)

MOST_NAMED = 12
OTHER_TRAINER = ("trainer.type", "trainer.python", "trainer.argv")


def invalid_reasons(
    experiment: RecordedExperiment, arm: str, num_pairs: int, claims: Sequence[Claim]
) -> list[Reason]:
    """Return each thing that makes this arm and the baseline incomparable; empty: comparable.

    Of the pairs, the first `num_pairs` must have ended; independent runs may differ in prompts and initial
    weights. A treatment that failed where its baseline finished is a result (see guards).
    """
    sides, pairs = experiment.sides(arm), experiment.pairs(arm)
    runs, baselines = sides.runs, sides.baselines
    finished, treatments = sides.finished.runs, sides.treatments
    if sides.paired:
        needed = pairs[:num_pairs]
        reruns = [run for pair in pairs for run in pair.reruns]
        runs = (*(run for pair in pairs for run in (pair.baseline, pair.treatment)), *reruns)
        baselines = tuple(run for pair in needed for run in (pair.baseline, *pair.reruns))
        treatments = tuple(pair.treatment for pair in needed)
        finished = tuple(
            run for pair in needed for run in (pair.baseline, pair.treatment, *pair.reruns) if run.finished
        )
    return [
        *(_unpaired(experiment, arm) if sides.paired else ()),
        *_unfinished(baselines, treatments, paired=sides.paired),
        *_mistaken(runs),
        *_copies(runs),
        *_config_differences(experiment, arm, sides, [run for pair in pairs for run in pair.reruns]),
        *_environment_differences(experiment, arm, sides),
        *_unlike_metrics(experiment, finished, claims),
        *_baseline_not_a_number(experiment, [run for run in baselines if not run.name.rerun], claims),
    ]


def _unlike_metrics(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """Yield what finished runs lack at the steps where claims and guards read them."""
    yield from _other_steps(experiment, [run for run in finished if not run.thinned], claims)
    yield from _other_windows(experiment, finished, claims)
    yield from _missing_metrics(experiment, finished, claims)
    yield from text_in_windows(experiment, finished, claims)


def differences(experiment: RecordedExperiment, arm: str) -> dict[str, list[Any]]:
    """Return what the arm differs in, dotted key -> [baseline's value, the arm's], as declared or found."""
    if experiment.treatment_diff is not None:
        return {key: list(values) for key, values in experiment.treatment_diff.get(arm, {}).items()}
    sides = experiment.sides(arm)
    if not all(sides.sizes):
        return {}
    # Of one run of each independent arm, everything that names the run would differ as well
    values = _config_values(sides).items() if sides.paired or min(sides.sizes) > 1 else ()
    found = {
        key: [left[0], right[0]]
        for key, (left, right) in values
        if _is_constant(left, right) and left[0] != right[0]
    }
    return found | machine_differences(sides.baselines[0], sides.treatments[0], treated_keys(experiment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Steps that the finished pairs, or runs, share, of those that any of them has."""

    shared_steps: int
    all_steps: int


def coverage(sides: Sides) -> Coverage:
    finished = sides.finished.runs
    everything = union_steps(run.steps for run in finished)
    shared = shared_steps(everything, *(run.steps for run in finished))
    return Coverage(shared_steps=len(shared), all_steps=len(everything))


def _unpaired(experiment: RecordedExperiment, arm: str) -> Iterator[Reason]:
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
    for without, seeds in (
        (arm, sorted(baseline.keys() - treatment.keys())),
        (experiment.baseline, sorted(treatment.keys() - baseline.keys())),
    ):
        if not seeds or (experiment.regression and without == arm):
            continue  # a later run may have fewer seeds than the reference
        yield Code.UNPAIRED_SEEDS(seeds=seeds, arm=without, can_unpair=can_unpair)


def _unfinished(
    baselines: Sequence[RecordedRun], treatments: Sequence[RecordedRun], *, paired: bool
) -> Iterator[Reason]:
    failed: dict[tuple[bool, str], list[str]] = {}
    for run in baselines:
        if run.status == "failed":
            failed.setdefault((run.name.rerun > 0, run.failure), []).append(str(run))
    for (is_rerun, failure), runs in failed.items():
        # No pair lacks a rerun. But step one may end in a mismatch by the noise floor, and one of those that
        # survived alone is smaller than the declared one.
        of_baseline = Code.BASELINE_FAILED if paired else Code.UNPAIRED_BASELINE_FAILED
        yield (Code.RERUN_FAILED if is_rerun else of_baseline)(runs=runs, failure=failure)
    for run in [*baselines, *treatments]:
        if run.status == "unreadable":
            yield Code.RUN_UNREADABLE(run=str(run), problem=run.failure, forbidden=run.forbidden)
        elif not run.finished and run.status != "failed":
            yield Code.RUN_NOT_FINISHED(run=str(run), status=run.status)


def _mistaken(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    for run in runs:
        planned = {"arm": run.name.arm, "seed": run.name.seed, "rerun": run.name.rerun}
        if run.status != "missing" and run.identity is not None and run.identity != planned:
            yield Code.RUNS_EXCHANGED(run=str(run), identity=run.identity)


def _copies(runs: Sequence[RecordedRun]) -> Iterator[Reason]:
    """Runs may repeat each other's numbers, but not their seconds. (A reference is a copy by intention.)"""
    earlier: list[RecordedRun] = []
    for run in runs:
        if run.thinned:
            continue
        original = next((other for other in earlier if _repeats(run, other)), None)
        if original:
            yield Code.RUN_COPIED(run=str(run), original=str(original))
        earlier.append(run)


def _repeats(run: RecordedRun, other: RecordedRun) -> bool:
    """Whether all metrics of both agree where both have them, to float32 (TensorBoard's; wandb has more)."""
    metrics = run.metrics.keys() & other.metrics.keys()
    is_timed = False
    for metric in sorted(metrics, key=is_clock, reverse=True):
        one, two = run.metrics[metric], other.metrics[metric]
        shared = shared_steps(one.steps, two.steps)
        values = one.values_at(shared)
        if not _same_to_float32(values, two.values_at(shared)):
            return False
        is_timed |= is_clock(metric) and len(values) > 0 and bool(np.ptp(values) > 0)
    return is_timed


def _same_to_float32(values: Array, others: Array) -> bool:
    """Return np.allclose of the two without its overhead, which all pairs of 500 runs would pay."""
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(values - others) <= 1e-6 * np.abs(others)
    close &= np.isfinite(others)
    return bool((close | (values == others) | (np.isnan(values) & np.isnan(others))).all())


def _config_differences(
    experiment: RecordedExperiment, arm: str, sides: Sides, reruns: Sequence[RecordedRun]
) -> Iterator[Reason]:
    """Yield where a run's resolved configuration differs by more than the declared treatment.

    Where nothing was declared: keys that follow neither the arm nor the seed, nor name the run.
    """
    if experiment.treatment_diff is None:
        for key, (left, right) in _config_values(sides).items():
            if _is_mixed(left, right, paired=sides.paired):
                values = [
                    (str(run), in_yaml(value)) for run, value in zip(sides.runs, [*left, *right], strict=True)
                ]
                groups = [[value] for value in values]
                if sides.paired:
                    halves = values[: len(left)], values[len(left) :]
                    groups = [[*both] for both in zip(*halves, strict=True)]
                yield Code.CONFIG_MIXED(key=key, values=groups, paired=sides.paired)
        return
    baselines = [*sides.baselines, *reruns]
    reference = next((run for run in baselines if run.config), None)
    declared = {key: values[1] for key, values in differences(experiment, arm).items()}
    if _declares_other_weights(declared):
        declared["initial_weights"] = ...  # follows from such a treatment: any value
    if reference is None:
        return
    for run in baselines:
        yield from _differences(run, reference, {})
    for run in sides.treatments:
        yield from _differences(run, reference, declared)


def _declares_other_weights(declared: Iterable[str]) -> bool:
    return any(
        key.split(".")[0] in ("model", "task", "warm_start") or key == "checkpoint.start_from"
        for key in declared
    )


def _differences(run: RecordedRun, reference: RecordedRun, declared: dict[str, Any]) -> Iterator[Reason]:
    if run.status in ("missing", "unreadable"):
        return  # already said: not finished
    if run.config is None:
        yield Code.CONFIG_MISSING(run=str(run))
        return
    config, of_reference = _compared(run), _compared(reference)
    for key in sorted({*config, *of_reference}):
        got, expected = config.get(key), declared.get(key, of_reference.get(key))
        if got != expected and expected is not ...:
            value, other = in_yaml(got), in_yaml(expected)
            if key in declared:
                yield Code.CONFIG_NOT_AS_DECLARED(run=str(run), key=key, value=value, declared=other)
            else:
                yield Code.CONFIG_DIFFERS(
                    run=str(run), key=key, value=value, expected=other, reference=str(reference)
                )


def _compared(run: RecordedRun) -> Mapping[str, Any]:
    """Return a run's configuration without the keys of abrun's that cannot change a number."""
    config = run.config or {}
    of_abrun = "trainer.type" in config
    return {key: value for key, value in config.items() if not of_abrun or can_change_numbers(key)}


def _config_values(sides: Sides) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return dotted key -> its values in both arms; nothing where a run's configuration is unknown."""
    if any(run.config is None for run in sides.runs):
        return {}
    left, right = (list(map(_compared, runs)) for runs in (sides.baselines, sides.treatments))
    keys = sorted({key for config in (*left, *right) for key in config})
    return {key: ([one.get(key) for one in left], [one.get(key) for one in right]) for key in keys}


def _is_constant(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether a key has one value in all runs of each arm."""
    return all(value == of[0] for of in (left, right) for value in of)


def _is_mixed(left: list[Any], right: list[Any], *, paired: bool) -> bool:
    """Return whether a key follows neither the arm nor the seed, nor names the run."""
    if _is_constant(left, right) or (paired and left == right):
        return False
    samples = [[*left, *right]] if paired else [left, right]
    return any(len({repr(value) for value in of}) < len(of) for of in samples)


def _environment_differences(experiment: RecordedExperiment, arm: str, sides: Sides) -> Iterator[Reason]:
    """Yield rule 3: what of the environment differs within pairs, or among independent runs.

    Against a reference, other versions and devices are what is tested; with another trainer as the treatment,
    other packages belong to it.
    """
    declared, treated = differences(experiment, arm), treated_keys(experiment)
    keys = [key for key in (ENVIRONMENT if sides.paired else OF_THE_MACHINE) if key not in treated]
    if not experiment.regression:
        if any(key in OTHER_TRAINER for key in declared):
            keys = ["devices"]
        yield from within_arms([sides.baselines, sides.treatments], treated)
    by_treatment = {INITIAL_WEIGHTS} if _declares_other_weights(declared) else set[str]()
    by_treatment |= {STARTED_FROM} if "checkpoint.start_from" in declared else set()
    compared = [(sides.runs[0], run) for run in sides.runs[1:]]
    if sides.paired:
        pairs = experiment.pairs(arm)
        compared = [(pair.baseline, run) for pair in pairs for run in (pair.treatment, *pair.reruns)]
    is_declared = experiment.treatment_diff is not None and sides.paired
    for baseline, run in compared:
        for one in (baseline, run):
            if is_declared and one.status == "finished" and one.environment is None:
                yield Code.ENVIRONMENT_MISSING(run=str(one))
        if baseline.environment is None or run.environment is None:
            continue
        for key in keys:
            unsaid = None in (baseline.environment.get(key), run.environment.get(key))
            if key in by_treatment or (unsaid and (not is_declared or key == INITIAL_WEIGHTS)):
                continue  # a framework, or an older version, that does not say: among the not tested
            yield from environment_difference(baseline, run, key)


def _windows(
    experiment: RecordedExperiment, claims: Sequence[Claim]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each claim's metric with the first and last step of its window, where any run recorded steps."""
    for claim in claims:
        grid = experiment.metric_steps(claim.metric)
        if len(grid):
            yield claim.metric, window_bounds(claim.window, grid, claim.metric)


def _other_steps(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """Every run must hold a claim's window whole; where abrun trained them, every step of the training."""
    if apart := no_shared_step_reason(finished):
        yield apart
        return
    windows: dict[str, tuple[int, int] | None] = {}
    trained_here = any((run.config or {}).get("trainer.type") == "abrun" for run in finished)
    if trained_here:
        recorded = [one for one in STEP_ONE if all(len(run.series(one)) for run in finished)]
        windows = dict.fromkeys(recorded[:1])
    for metric, bounds in _windows(experiment, claims):
        windows.setdefault(metric, bounds)
    for metric, bounds in windows.items():
        yield from unlike_grids(finished, metric, bounds, strict=trained_here)


def _other_windows(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    """A reference holds every step of its claims' windows, and so must the later runs."""
    for metric, (first, last) in _windows(experiment, claims if experiment.regression else ()):
        held: dict[bool, Steps] = {}
        for thinned in (True, False):
            steps = union_steps(run.series(metric).steps for run in finished if run.thinned == thinned)
            held[thinned] = steps[(first <= steps) & (steps <= last)]
        if not np.array_equal(held[True], held[False]):
            yield Code.REFERENCE_STEPS_DIFFER(
                metric=metric,
                first=first,
                last=last,
                num_reference=len(held[True]),
                num_later=len(held[False]),
            )


def _missing_metrics(
    experiment: RecordedExperiment, finished: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    guards = experiment.compare.guards
    of_whole_runs = (MEMORY_PEAK, FINAL_WEIGHTS)  # found missing where they are judged
    needed = {one.metric: "claim" for one in claims if one.metric not in of_whole_runs}
    if guards.step_time_ratio is not None:
        needed.setdefault(STEP_TIME, "guard")
    if any(TOKEN_MULT_PROB_ERROR in run.metrics for run in finished):
        needed.setdefault(TOKEN_MULT_PROB_ERROR, "guard")  # an arm must not pass by not measuring
    for metric, role in needed.items():
        everything = union_steps(run.series(metric).steps for run in finished)
        if finished and not len(everything):
            yield _missing(metric, role, None, None, finished[0])
            continue
        for run in finished:
            grid = run.series(metric).steps
            if not len(grid):
                yield _missing(metric, role, run, None, run)
            elif role == "guard" and not run.thinned:
                absent = lacking(run, metric, shared_steps(everything, run.steps))
                if len(absent):
                    yield _missing(metric, role, run, int(absent[0]), run)
    if guards.peak_memory_ratio is not None and finished and shared_peak_counter(finished) is None:
        yield Code.PEAK_MEMORY_MISSING(counters=" or ".join(PEAK_MEMORY))


def _missing(
    metric: str, role: str, run: RecordedRun | None, step: int | None, example: RecordedRun
) -> Reason:
    """Return that a run, or every run (None), lacks a metric. An example says what its log has instead."""
    named = (example.config or {}).get(f"trainer.aliases.{metric}")
    alias = {"name": str(named), "logged": sorted(example.metrics)[:MOST_NAMED]}
    return Code.METRIC_MISSING(
        metric=metric,
        role=role,
        run=None if run is None else str(run),
        step=step,
        unread=example.unread.get(metric),
        alias=None if named is None else alias,
    )


def _baseline_not_a_number(
    experiment: RecordedExperiment, baselines: Sequence[RecordedRun], claims: Sequence[Claim]
) -> Iterator[Reason]:
    for metric, (first, last) in _windows(experiment, claims):
        for run in baselines:
            step = run.first_non_finite(metric, first, last)
            if step is not None:
                value = run.series(metric).at(step)
                yield Code.BASELINE_NOT_FINITE(run=str(run), metric=metric, value=value, step=step)
