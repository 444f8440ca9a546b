"""The code of the runs: which commit and uncommitted changes each attempt was launched from.

Other code is no ground for INVALID: an edit of a plot changes no number. But a reader has to know.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from abrun.reasons import Code, Reason
from abrun.recorded.experiment import Experiment, RecordedRun


def code_notes(experiment: Experiment) -> Iterator[Reason]:
    """Yield each way in which runs of an experiment are of other code than their siblings.

    A reference was made from other code by intention.
    """
    runs = [run for run in experiment.runs.values() if run.code and not run.thinned]
    for code, names in _by_code(run for run in runs if len(run.code) > 1):
        yield Code.CODE_CHANGED(runs=names, versions=code)
    alike = [run for run in runs if len(run.code) == 1]
    baseline = [run for run in alike if run.name.arm == experiment.baseline]
    mixed = list(baseline)  # the baseline, and the arms that share code with it
    for arm in experiment.treatments:
        treated = [run for run in alike if run.name.arm == arm]
        if baseline and treated and not {run.code for run in baseline} & {run.code for run in treated}:
            yield Code.ARMS_OF_OTHER_CODE(
                baseline=experiment.baseline,
                baseline_code=_versions(baseline),
                arm=arm,
                code=_versions(treated),
            )
        else:
            mixed += treated
    yield from _outliers(mixed, _most_common(baseline or mixed))


def code_untested(experiment: Experiment) -> list[Reason]:
    """Return what the comparison does not show where runs are of different code."""
    differs = any(True for _ in code_notes(experiment))
    return [Code.OTHER_CODE()] if differs else []


def _outliers(runs: Sequence[RecordedRun], common: tuple[str, ...] | None) -> Iterator[Reason]:
    for code, names in _by_code(run for run in runs if common and run.code != common):
        assert common
        yield Code.RUNS_OF_OTHER_CODE(runs=names, code=code[0], usual_code=common[0])


def _by_code(runs: Iterable[RecordedRun]) -> Iterable[tuple[tuple[str, ...], list[str]]]:
    """Return each code with the names of its runs."""
    names: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        names.setdefault(run.code, []).append(str(run))
    return names.items()


def _most_common(runs: Sequence[RecordedRun]) -> tuple[str, ...] | None:
    counted = Counter(run.code for run in runs).most_common(1)
    return counted[0][0] if counted else None


def _versions(runs: Sequence[RecordedRun]) -> list[str]:
    return list(dict.fromkeys(run.code[0] for run in runs))
