"""Versions, devices and code of runs: their differences, and which of these are the treatment."""

from collections.abc import Iterator, Sequence
from typing import Any

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.messages.codes import Code, Reason
from abrun.recipe.run import compare_precisions

INITIAL_WEIGHTS, STARTED_FROM = "initial_weights_hash", "started_from"
SCRIPTS, SOFTWARE_KEYS = "scripts", ("versions", "python")
MACHINE_KEYS = (*SOFTWARE_KEYS, SCRIPTS, "devices")
# Keys of environment.json that must be equal in paired runs. Hosts may differ.
PAIRED_KEYS = (*MACHINE_KEYS, "prompts_sha256", INITIAL_WEIGHTS, STARTED_FROM)


def has_treated_machine(experiment: RecordedExperiment, arm: str) -> bool:
    """Return True if the arms' versions or devices differ by design; then not even step one repeats."""
    keys = [key for key in treated_machine_keys(experiment) if key != SCRIPTS]
    return any(
        find_machine_differences(pair.baseline, pair.treatment, keys) for pair in experiment.pairs(arm)
    )


def treated_machine_keys(experiment: RecordedExperiment) -> Sequence[str]:
    """Return the environment keys that may differ between the arms, as part of what is tested."""
    if experiment.regression:
        return MACHINE_KEYS
    scripts = () if experiment.treatment_diff is not None else (SCRIPTS,)  # edited, perhaps for this test
    return (*SOFTWARE_KEYS, *scripts) if experiment.versions_differ else scripts


def find_machine_differences(
    baseline: RecordedRun, treatment: RecordedRun, keys: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the versions, scripts and devices that differ, as dotted key -> both values."""
    differences: dict[str, list[Any]] = {}
    for key in keys:
        values = [(run.environment or {}).get(key) for run in (baseline, treatment)]
        if key in ("versions", SCRIPTS):
            pairs = _find_version_differences(baseline, treatment, key)
            differences |= {f"{key}.{name}": list(pair) for name, pair in pairs.items()}
        elif values[0] != values[1]:
            differences[key] = values
    return differences


def _find_version_differences(
    baseline: RecordedRun, treatment: RecordedRun, key: str
) -> dict[str, tuple[Any, Any]]:
    """Return packages that either run imports with different versions; None: not installed, or unknown.

    For the key SCRIPTS: scripts that both runs name. Others follow from argv, and older runs record none.
    """
    values: list[dict[str, Any]] = [(run.environment or {}).get(key) or {} for run in (baseline, treatment)]
    pairs = {name: (values[0].get(name), values[1].get(name)) for name in sorted({*values[0], *values[1]})}
    uses = (baseline.uses_package, treatment.uses_package)
    return {
        name: (a, b)
        for name, (a, b) in pairs.items()
        if a != b and (None not in (a, b) if key == SCRIPTS else any(used(name) for used in uses))
    }


def versions_follow_arms(experiment: RecordedExperiment) -> bool:
    """Return True if versions are constant within arms and differ between them, with no declared reason."""
    arms = [tuple(experiment.arm(arm).values()) for arm in experiment.arms]
    all_recorded = all((run.environment or {}).get("versions") for runs in arms for run in runs)
    if (
        "versions" in treated_machine_keys(experiment)
        or not (all_recorded and all(arms))
        or any(find_differences_within_arms(arms, SOFTWARE_KEYS))
    ):
        return False
    return any(find_machine_differences(arms[0][0], runs[0], SOFTWARE_KEYS) for runs in arms[1:])


def find_differences_within_arms(
    arms: Sequence[Sequence[RecordedRun]], keys: Sequence[str]
) -> Iterator[Reason]:
    """Yield differences within one arm, in the keys that may differ between arms."""
    for runs in arms:
        for key in keys:
            recorded = [run for run in runs if (run.environment or {}).get(key) is not None]
            for run in recorded[1:]:
                yield from find_environment_difference(recorded[0], run, key)


def find_environment_difference(baseline: RecordedRun, run: RecordedRun, key: str) -> Iterator[Reason]:
    """Yield a difference of one environment key, if any: both values, or both versions by package."""
    assert baseline.environment is not None and run.environment is not None
    baseline_value, run_value = baseline.environment.get(key), run.environment.get(key)
    if isinstance(baseline_value, dict) and isinstance(run_value, dict):
        values: Any = _find_version_differences(baseline, run, key)
    else:
        values = [] if baseline_value == run_value else [baseline_value, run_value]
    if values:
        yield Code.ENVIRONMENT_DIFFERS(key=key, baseline=str(baseline), run=str(run), values=values)


def environment_notes(experiment: RecordedExperiment) -> Iterator[Reason]:
    """Yield notes on runs of different code or on shared GPUs, and on arms of different precision."""
    yield from code_notes(experiment)
    if numbers := {run.runs_per_gpu for run in experiment.runs.values()} - {1}:
        yield Code.GPUS_SHARED(runs_per_gpu=max(numbers))
    for arm in experiment.treatments:
        sides = experiment.sides(arm)
        if any(run.trains_on_recording for run in sides.treatments):
            yield Code.ON_RECORDED_ROLLOUTS(arm=arm)
        difference = compare_precisions(
            arm, _recorded_precision(sides.baselines), _recorded_precision(sides.treatments)
        )
        if difference:
            yield difference


def code_notes(experiment: RecordedExperiment) -> list[Reason]:
    """Return a note if runs, or attempts of one run, are of different code.

    Different code does not make runs INVALID: an edit of a plot changes no number, and a reference was made
    from other code on purpose.
    """
    runs_of: dict[tuple[str, ...], list[str]] = {}
    for run in experiment.runs.values():
        if run.code and not run.thinned:
            runs_of.setdefault(run.code, []).append(str(run))
    if len(runs_of) < 2 and all(len(code) == 1 for code in runs_of):
        return []
    return [Code.CODE_DIFFERS(versions=[{"code": code, "runs": runs} for code, runs in runs_of.items()])]


def _recorded_precision(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return the precision of LM head and logits from the first run that recorded it; else empty."""
    precisions = ((run.environment or {}).get("precision") for run in runs)
    return next((precision for precision in precisions if isinstance(precision, dict)), {})
