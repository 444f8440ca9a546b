"""The code of the runs: which commit and uncommitted changes each attempt was launched from.

Other code is no ground for INVALID: an edit of a plot changes no number. But a reader has to know.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from abrun.compare.read.experiment import Experiment, RecordedRun

MOST_NAMED = 5


def code_notes(experiment: Experiment) -> Iterator[str]:
    """Yield a sentence for each way in which runs of an experiment are of other code than their siblings.

    A reference was made from other code by intention.
    """
    runs = [run for run in experiment.runs.values() if run.code and not run.thinned]
    for run in runs:
        if len(run.code) > 1:
            yield f"{run} was trained by several versions of the code: {', then '.join(run.code)}"
    alike = [run for run in runs if len(run.code) == 1]
    baseline = [run for run in alike if run.name.arm == experiment.baseline]
    common = _most_common(baseline)
    for arm in experiment.treatments:
        treated = [run for run in alike if run.name.arm == arm]
        if baseline and treated and not {run.code for run in baseline} & {run.code for run in treated}:
            yield (
                f"the arms ran different code: {experiment.baseline} {_names(baseline)}, {arm} "
                f"{_names(treated)}; the difference between them includes that of the code"
            )
        else:
            yield from _outliers(treated, common or _most_common(treated))
    yield from _outliers(baseline, common)


def code_untested(experiment: Experiment) -> list[str]:
    """Return what the comparison does not show where runs are of different code."""
    notes = list(code_notes(experiment))
    return [f"whether the code of the runs changes their numbers: {'; '.join(notes)}"] if notes else []


def _outliers(runs: Sequence[RecordedRun], common: tuple[str, ...] | None) -> Iterator[str]:
    if common is None:
        return
    for code in dict.fromkeys(run.code for run in runs if run.code != common):
        names = [str(run) for run in runs if run.code == code]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        shown = f"{', '.join(names[:MOST_NAMED])}{more}"
        yield f"{shown}: trained by the code {code[0]}, other runs by {common[0]}"


def _most_common(runs: Sequence[RecordedRun]) -> tuple[str, ...] | None:
    counted = Counter(run.code for run in runs).most_common(1)
    return counted[0][0] if counted else None


def _names(runs: Sequence[RecordedRun]) -> str:
    return " and ".join(dict.fromkeys(run.code[0] for run in runs))
