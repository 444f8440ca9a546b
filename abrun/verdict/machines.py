"""Versions, devices and code of runs: what differs between them, and what of that is the treatment."""

from collections.abc import Iterator, Sequence
from typing import Any

from abrun.reasons import Code, Reason
from abrun.recipe.run import compare_precisions
from abrun.recorded.experiment import Experiment, RecordedRun

INITIAL_WEIGHTS, STARTED_FROM = "initial_weights_hash", "started_from"
OF_THE_STACK = ("versions", "python")
OF_THE_MACHINE = (*OF_THE_STACK, "devices")
# What of environment.json must not differ between paired runs. Hosts may.
ENVIRONMENT = (*OF_THE_MACHINE, "prompts_sha256", INITIAL_WEIGHTS, STARTED_FROM)


def other_machine(experiment: Experiment, arm: str) -> bool:
    """Return whether the arms ran with other versions or devices by design: not even step one repeats."""
    treated = treated_keys(experiment)
    return any(machine_differences(pair.baseline, pair.treatment, treated) for pair in experiment.pairs(arm))


def treated_keys(experiment: Experiment) -> Sequence[str]:
    """Return what of the machine may differ between the arms, as part of what is tested."""
    return OF_THE_MACHINE if experiment.regression else OF_THE_STACK if experiment.versions_differ else ()


def machine_differences(left: RecordedRun, right: RecordedRun, keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return the versions and devices that differ, dotted key -> both values."""
    found = {}
    if "versions" in keys:
        found = {f"versions.{name}": list(both) for name, both in _other_versions(left, right).items()}
    for key in keys:
        both = [(run.environment or {}).get(key) for run in (left, right)]
        if both[0] != both[1] and key != "versions":
            found[key] = both
    return found


def _other_versions(left: RecordedRun, right: RecordedRun) -> dict[str, tuple[Any, Any]]:
    """Packages that either imports, of which they have other versions; None: not installed, or not said."""
    versions: list[dict[str, Any]] = [(run.environment or {}).get("versions") or {} for run in (left, right)]
    names = sorted({*versions[0], *versions[1]})
    both = {name: (versions[0].get(name), versions[1].get(name)) for name in names}
    return {
        name: (a, b)
        for name, (a, b) in both.items()
        if a != b and (left.imports(name) or right.imports(name))
    }


def versions_follow_arms(experiment: Experiment) -> bool:
    """Return True where arms of one version each differ in theirs, and none is declared as the treatment."""
    arms = [tuple(experiment.arm(arm).values()) for arm in experiment.arms]
    says = all((run.environment or {}).get("versions") for runs in arms for run in runs)
    if treated_keys(experiment) or not (says and all(arms)) or any(within_arms(arms, OF_THE_STACK)):
        return False
    return any(machine_differences(arms[0][0], runs[0], OF_THE_STACK) for runs in arms[1:])


def within_arms(arms: Sequence[Sequence[RecordedRun]], keys: Sequence[str]) -> Iterator[Reason]:
    """Yield what differs between the runs of one arm, of what may differ between arms."""
    for runs in arms:
        for key in keys:
            known = [run for run in runs if (run.environment or {}).get(key) is not None]
            for run in known[1:]:
                yield from environment_difference(known[0], run, key)


def environment_difference(baseline: RecordedRun, run: RecordedRun, key: str) -> Iterator[Reason]:
    """Yield what of the environment differs, if anything: both values, or both versions by package."""
    assert baseline.environment is not None and run.environment is not None
    left, right = baseline.environment.get(key), run.environment.get(key)
    if isinstance(left, dict) and isinstance(right, dict):
        values: Any = _other_versions(baseline, run)
    else:
        values = [] if left == right else [left, right]
    if values:
        yield Code.ENVIRONMENT_DIFFERS(key=key, baseline=str(baseline), run=str(run), values=values)


def stack_notes(experiment: Experiment) -> Iterator[Reason]:
    """Yield what a reader has to know: runs of different code, and arms of another precision."""
    yield from code_notes(experiment)
    for arm in experiment.treatments:
        sides = experiment.sides(arm)
        difference = compare_precisions(arm, _precision(sides.baselines), _precision(sides.treatments))
        if difference:
            yield difference


def code_notes(experiment: Experiment) -> list[Reason]:
    """Return a note where runs, or attempts of one, are of different code.

    Other code is no ground for INVALID: an edit of a plot changes no number. A reference was made from other
    code by intention.
    """
    runs_of: dict[tuple[str, ...], list[str]] = {}
    for run in experiment.runs.values():
        if run.code and not run.thinned:
            runs_of.setdefault(run.code, []).append(str(run))
    if len(runs_of) < 2 and all(len(code) == 1 for code in runs_of):
        return []
    return [Code.CODE_DIFFERS(versions=[{"code": code, "runs": runs} for code, runs in runs_of.items()])]


def _precision(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return the precision of LM head and logits that the first run has recorded; empty where none has."""
    precisions = ((run.environment or {}).get("precision") for run in runs)
    return next((each for each in precisions if isinstance(each, dict)), {})
