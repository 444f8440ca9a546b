"""INVALID comes first: what must hold before two arms are comparable at all (verdict.md, rule 3)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
from abrun.recipe.claims import Primary
from abrun.recipe.run import can_change_numbers
from abrun.recorded.experiment import Experiment, Pair, RecordedRun, Sides, no_shared_step, union
from abrun.redaction import in_yaml
from abrun.stats.series import Array, Steps, shared_steps, window_bounds
from abrun.verdict.grids import lacking, text_in_windows, unlike_grids
from abrun.verdict.guards import shared_peak_counter
from abrun.verdict.machines import (
    ENVIRONMENT,
    INITIAL_WEIGHTS,
    OF_THE_MACHINE,
    OF_THE_STACK,
    STARTED_FROM,
    environment_difference,
    machine_differences,
    treated_keys,
    within_arms,
)

MOST_NAMED = 12
OTHER_TRAINER = ("trainer.type", "trainer.python", "trainer.argv")


def invalid_reasons(
    experiment: Experiment, arm: str, num_pairs: int, primaries: Sequence[Primary]
) -> list[Reason]:
    """Return each thing that makes this arm and the baseline incomparable; empty: comparable.

    Of the pairs, the first `num_pairs` must have ended. A treatment that failed where its baseline finished
    is not among the reasons: that is a result (see guards).
    """
    if not experiment.compare.paired:
        return _invalid_apart(experiment, arm, primaries)
    pairs = experiment.pairs(arm)
    reruns = [run for pair in pairs for run in pair.reruns]
    runs = [*(run for pair in pairs for run in (pair.baseline, pair.treatment)), *reruns]
    needed = pairs[:num_pairs]
    baselines = [run for pair in needed for run in (pair.baseline, *pair.reruns)]
    finished = [
        run for pair in needed for run in (pair.baseline, pair.treatment, *pair.reruns) if run.finished
    ]
    return [
        *_unpaired(experiment, arm),
        *_unfinished(baselines, [pair.treatment for pair in needed]),
        *_mistaken(runs),
        *_copies(runs),
        *_config_differences(experiment, arm, pairs, reruns),
        *_environment_differences(experiment, arm, pairs),
        *_unlike_metrics(experiment, finished, primaries),
        *_baseline_not_a_number(experiment, [pair.baseline for pair in needed], primaries),
    ]


def _invalid_apart(experiment: Experiment, arm: str, primaries: Sequence[Primary]) -> list[Reason]:
    """The same of independent arms: prompts and initial weights may differ from run to run."""
    sides = experiment.sides(arm)
    finished = sides.finished.runs
    return [
        *(
            Code.UNPAIRED_BASELINE_FAILED(run=str(run), failure=run.failure)
            for run in sides.baselines
            if run.status == "failed"
        ),
        *_unfinished([], sides.runs),
        *_mistaken(sides.runs),
        *_copies(sides.runs),
        *_config_differences_apart(experiment, arm, sides),
        *_machine_differences(experiment, sides),
        *_unlike_metrics(experiment, finished, primaries),
        *_baseline_not_a_number(experiment, sides.baselines, primaries),
    ]


def _unlike_metrics(
    experiment: Experiment, finished: Sequence[RecordedRun], primaries: Sequence[Primary]
) -> Iterator[Reason]:
    """Yield what finished runs lack at the steps where claims and guards read them."""
    yield from _other_steps(experiment, [run for run in finished if not run.thinned], primaries)
    yield from _other_windows(experiment, finished, primaries)
    yield from _missing_metrics(experiment, finished, primaries)
    yield from text_in_windows(experiment, finished, primaries)


def differences(experiment: Experiment, arm: str) -> dict[str, list[Any]]:
    """What the arm differs in, dotted key -> [baseline's value, the arm's]: as declared, or else as found."""
    if experiment.treatment_diff is not None:
        return {key: list(values) for key, values in experiment.treatment_diff.get(arm, {}).items()}
    if not experiment.compare.paired:
        sides = experiment.sides(arm)
        values = _values_by_arm(sides).items()
        found = {key: [left[0], right[0]] for key, (left, right) in values if _differs_by_arm(left, right)}
        if experiment.versions_differ and all(sides.sizes):
            found |= machine_differences(sides.baselines[0], sides.treatments[0], OF_THE_STACK)
        return found
    pairs = experiment.pairs(arm)
    found = {
        key: [values[0][0], values[0][1]]
        for key, values in _config_values(pairs).items()
        if _kind(values) == "treatment"
    }
    if experiment.regression or experiment.versions_differ:
        for pair in pairs[:1]:
            found |= machine_differences(pair.baseline, pair.treatment, treated_keys(experiment))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Steps that the finished pairs, or runs, share, of those that any of them has."""

    shared_steps: int
    all_steps: int


def coverage(sides: Sides) -> Coverage:
    finished = sides.finished.runs
    everything = union(run.steps for run in finished)
    shared = shared_steps(everything, *(run.steps for run in finished))
    return Coverage(shared_steps=len(shared), all_steps=len(everything))


def _unpaired(experiment: Experiment, arm: str) -> Iterator[Reason]:
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


def _unfinished(baselines: Sequence[RecordedRun], treatments: Sequence[RecordedRun]) -> Iterator[Reason]:
    failed: dict[tuple[bool, str], list[RecordedRun]] = {}
    for run in baselines:
        if run.status == "failed":
            failed.setdefault((run.name.rerun > 0, run.failure), []).append(run)
    for (is_rerun, failure), runs in failed.items():
        # No pair lacks a rerun. But step one may end in a mismatch by the noise floor, and one of those that
        # survived alone is smaller than the declared one.
        failed_runs = [str(run) for run in runs]
        if is_rerun:
            yield Code.RERUN_FAILED(runs=failed_runs, failure=failure)
        else:
            yield Code.BASELINE_FAILED(runs=failed_runs, failure=failure)
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
    experiment: Experiment, arm: str, pairs: Sequence[Pair], reruns: Sequence[RecordedRun]
) -> Iterator[Reason]:
    """Each run's resolved configuration against one baseline's: the declared treatment, and nothing else."""
    if not pairs:
        return
    if experiment.treatment_diff is None:
        yield from _undeclared_differences(pairs)
        return
    baselines = [*(pair.baseline for pair in pairs), *reruns]
    yield from _undeclared_values(experiment, arm, baselines, [pair.treatment for pair in pairs])


def _undeclared_values(
    experiment: Experiment, arm: str, baselines: Sequence[RecordedRun], treatments: Sequence[RecordedRun]
) -> Iterator[Reason]:
    """Compare each run's configuration with that of the first baseline that has one."""
    reference = next((run for run in baselines if run.config), baselines[0])
    declared = {key: values[1] for key, values in differences(experiment, arm).items()}
    if _declares_other_weights(declared):
        declared["initial_weights"] = ...  # follows from such a treatment: any value
    for run in baselines:
        yield from _differences(run, reference, {})
    for run in treatments:
        yield from _differences(run, reference, declared)


def _declares_other_weights(declared: Iterable[str]) -> bool:
    return any(
        key.split(".")[0] in ("model", "task", "warm_start") or key == "checkpoint.start_from"
        for key in declared
    )


def _differences(run: RecordedRun, reference: RecordedRun, declared: dict[str, Any]) -> Iterator[Reason]:
    if run.status in ("missing", "unreadable") or reference.config is None:
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


def _undeclared_differences(pairs: Sequence[Pair]) -> Iterator[Reason]:
    """Where nothing was declared: keys that neither follow the arm, nor the seed, nor name the run."""
    for key, values in _config_values(pairs).items():
        if _kind(values) == "mixed":
            of_runs = [
                [(str(pair.baseline), in_yaml(a)), (str(pair.treatment), in_yaml(b))]
                for pair, (a, b) in zip(pairs, values, strict=True)
            ]
            yield Code.CONFIG_MIXED(key=key, values=of_runs, paired=True)


def _config_values(pairs: Sequence[Pair]) -> dict[str, list[tuple[Any, Any]]]:
    """Dotted key -> its value in both runs of every pair; nothing where a run's configuration is unknown."""
    if any(run.config is None for pair in pairs for run in (pair.baseline, pair.treatment)):
        return {}
    known = [(_compared(pair.baseline), _compared(pair.treatment)) for pair in pairs]
    keys = sorted({key for both in known for config in both for key in config})
    return {key: [(a.get(key), b.get(key)) for a, b in known] for key in keys}


def _kind(values: Sequence[tuple[Any, Any]]) -> Literal["same", "seed", "treatment", "run", "mixed"]:
    """What a configuration key follows, from its values in both runs of every pair."""
    if all(a == b for a, b in values):
        return "same" if all(one == values[0] for one in values) else "seed"
    if all(one == values[0] for one in values):
        return "treatment"
    flat = [repr(value) for both in values for value in both]
    return "run" if len(set(flat)) == len(flat) else "mixed"


def _config_differences_apart(experiment: Experiment, arm: str, sides: Sides) -> Iterator[Reason]:
    """Declared: each run against one baseline's. Else: keys that neither follow the arm nor name the run."""
    if experiment.treatment_diff is not None:
        yield from _undeclared_values(experiment, arm, sides.baselines, sides.treatments)
        return
    for key, (left, right) in _values_by_arm(sides).items():
        texts = [in_yaml(value) for value in (*left, *right)]
        constant = all(value == left[0] for value in left) and all(value == right[0] for value in right)
        distinct = all(len({repr(value) for value in of}) == len(of) for of in (left, right))
        if not (constant or distinct):
            of_runs = [[(str(run), text)] for run, text in zip(sides.runs, texts, strict=True)]
            yield Code.CONFIG_MIXED(key=key, values=of_runs, paired=False)


def _values_by_arm(sides: Sides) -> dict[str, tuple[list[Any], list[Any]]]:
    """Dotted key -> its values in both arms; nothing where a run's configuration is unknown."""
    if any(run.config is None for run in sides.runs):
        return {}
    left, right = (list(map(_compared, runs)) for runs in (sides.baselines, sides.treatments))
    keys = sorted({key for config in (*left, *right) for key in config})
    return {key: ([one.get(key) for one in left], [one.get(key) for one in right]) for key in keys}


def _differs_by_arm(left: list[Any], right: list[Any]) -> bool:
    """Of several runs an arm: of one each, everything that names the run would differ as well."""
    several = min(len(left), len(right)) > 1
    constant = all(one == left[0] for one in left) and all(one == right[0] for one in right)
    return several and constant and left[0] != right[0]


def _machine_differences(experiment: Experiment, sides: Sides) -> Iterator[Reason]:
    """Versions and devices must not differ from run to run, except against a reference."""
    if experiment.regression or not sides.baselines:
        return
    declared = differences(experiment, sides.treatments[0].name.arm) if sides.treatments else {}
    other_trainer = any(key in OTHER_TRAINER for key in declared)
    first = sides.baselines[0]
    treated = treated_keys(experiment)
    yield from within_arms([sides.baselines, sides.treatments], treated)
    keys = [key for key in (("devices",) if other_trainer else OF_THE_MACHINE) if key not in treated]
    for run in sides.runs[1:]:
        for key in keys:
            if None not in ((one.environment or {}).get(key) for one in (first, run)):
                yield from environment_difference(first, run, key)


def _environment_differences(experiment: Experiment, arm: str, pairs: Sequence[Pair]) -> Iterator[Reason]:
    """Rule 3. Against a reference, other versions and devices are what is tested; with another trainer as the
    treatment, other packages belong to it.
    """
    declared, treated = differences(experiment, arm), treated_keys(experiment)
    keys = [key for key in ENVIRONMENT if key not in treated]
    if not experiment.regression:
        if any(key in OTHER_TRAINER for key in declared):
            keys = ["devices"]
        both = [[pair.baseline for pair in pairs], [pair.treatment for pair in pairs]]
        yield from within_arms(both, treated)
    by_treatment = {INITIAL_WEIGHTS} if _declares_other_weights(declared) else set[str]()
    by_treatment |= {STARTED_FROM} if "checkpoint.start_from" in declared else set()
    for pair in pairs:
        for run in (pair.treatment, *pair.reruns):
            for one in (pair.baseline, run):
                if (
                    one.status == "finished"
                    and one.environment is None
                    and experiment.treatment_diff is not None
                ):
                    yield Code.ENVIRONMENT_MISSING(run=str(one))
            if pair.baseline.environment is None or run.environment is None:
                continue
            for key in keys:
                unsaid = None in (pair.baseline.environment.get(key), run.environment.get(key))
                if key in by_treatment or (
                    unsaid and (experiment.treatment_diff is None or key == INITIAL_WEIGHTS)
                ):
                    continue  # a framework, or an older version, that does not say: among the not tested
                yield from environment_difference(pair.baseline, run, key)


def _other_steps(
    experiment: Experiment, finished: Sequence[RecordedRun], primaries: Sequence[Primary]
) -> Iterator[Reason]:
    """Every run must hold a claim's window whole; where abrun trained them, every step of the training."""
    if apart := no_shared_step(finished):
        yield apart
        return
    windows: dict[str, tuple[int, int] | None] = {}
    trained_here = any((run.config or {}).get("trainer.type") == "abrun" for run in finished)
    if trained_here:
        recorded = [one for one in STEP_ONE if all(len(run.series(one)) for run in finished)]
        windows = dict.fromkeys(recorded[:1])
    for primary in primaries:
        grid = experiment.steps_of(primary.metric)
        if len(grid) and primary.metric not in windows:
            windows[primary.metric] = window_bounds(primary.window, grid, primary.metric)
    for metric, bounds in windows.items():
        yield from unlike_grids(finished, metric, bounds, strict=trained_here)


def _other_windows(
    experiment: Experiment, finished: Sequence[RecordedRun], primaries: Sequence[Primary]
) -> Iterator[Reason]:
    """A reference holds every step of its claims' windows, and so must the later runs."""
    for primary in primaries if experiment.regression else ():
        grid = experiment.steps_of(primary.metric)
        if not len(grid):
            continue
        first, last = window_bounds(primary.window, grid, primary.metric)
        held: dict[bool, Steps] = {}
        for thinned in (True, False):
            steps = union(run.series(primary.metric).steps for run in finished if run.thinned == thinned)
            held[thinned] = steps[(first <= steps) & (steps <= last)]
        if not np.array_equal(held[True], held[False]):
            yield Code.REFERENCE_STEPS_DIFFER(
                metric=primary.metric,
                first=first,
                last=last,
                num_reference=len(held[True]),
                num_later=len(held[False]),
            )


def _missing_metrics(
    experiment: Experiment, finished: Sequence[RecordedRun], primaries: Sequence[Primary]
) -> Iterator[Reason]:
    guards = experiment.compare.guards
    of_whole_runs = (MEMORY_PEAK, FINAL_WEIGHTS)  # found missing where they are judged
    needed = {one.metric: "primary" for one in primaries if one.metric not in of_whole_runs}
    if guards.step_time_ratio is not None:
        needed.setdefault(STEP_TIME, "guard")
    if any(TOKEN_MULT_PROB_ERROR in run.metrics for run in finished):
        needed.setdefault(TOKEN_MULT_PROB_ERROR, "guard")  # an arm must not pass by not measuring
    for metric, role in needed.items():
        everything = union(run.series(metric).steps for run in finished)
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
    experiment: Experiment, baselines: Sequence[RecordedRun], primaries: Sequence[Primary]
) -> Iterator[Reason]:
    for primary in primaries:
        grid = experiment.steps_of(primary.metric)
        if not len(grid):
            continue
        first, last = window_bounds(primary.window, grid, primary.metric)
        for run in baselines:
            step = run.first_non_finite(primary.metric, first, last)
            if step is not None:
                value = run.series(primary.metric).at(step)
                yield Code.BASELINE_NOT_FINITE(run=str(run), metric=primary.metric, value=value, step=step)
