"""Where and at which precision the runs of a pair ran: what the runs recorded, not what was asked for.

Other kinds of devices make a pair INVALID (see validity). Other hosts, drivers or hours do not: they change
times, and what depends on the kernels that a driver compiles, so that a reader has to know.
"""

from collections.abc import Iterator, Sequence

from abrun.reasons import Code, Reason
from abrun.recipe.run import precision_difference
from abrun.recorded.experiment import Experiment, Pair, RecordedRun

APART_S = 3600.0  # between the end of one run and the start of the other
KEYS = ("hosts", "drivers")


def placement_notes(experiment: Experiment) -> Iterator[Reason]:
    """Yield each way in which pairs were placed differently; none against a reference."""
    if experiment.regression:
        return
    for arm in experiment.treatments:
        pairs = [pair for pair in experiment.pairs(arm) if pair.finished]
        for key in KEYS:
            found = [(pair.seed, _values(pair.baseline, key), _values(pair.treatment, key)) for pair in pairs]
            differing = [each for each in found if each[1] and each[2] and each[1] != each[2]]
            if differing:
                seed, left, right = differing[0]
                yield Code.OTHER_MACHINES(
                    kind=key,
                    arm=arm,
                    num_differing=len(differing),
                    num_pairs=len(pairs),
                    seed=seed,
                    value=right,
                    baseline=left,
                )
        apart = [(pair.seed, gap_s) for pair in pairs if (gap_s := _gap_s(pair)) > APART_S]
        if apart:
            seed, gap_s = max(apart, key=lambda one: one[1])
            yield Code.HOURS_APART(
                arm=arm, num_apart=len(apart), num_pairs=len(pairs), seed=seed, gap_s=gap_s
            )


def precision_notes(experiment: Experiment) -> Iterator[Reason]:
    """Yield each treatment whose LM head or logits had another precision than the baseline's."""
    for arm in experiment.treatments:
        sides = experiment.sides(arm)
        recorded = [_precision(runs) for runs in (sides.baselines, sides.treatments)]
        difference = precision_difference(arm, *recorded)
        if difference:
            yield difference


def _precision(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """The precision that the first run has recorded; empty where none has."""
    precisions = ((run.environment or {}).get("precision") for run in runs)
    return next((each for each in precisions if isinstance(each, dict)), {})


def _values(run: RecordedRun, key: str) -> str:
    values = (run.environment or {}).get(key)
    return ", ".join(map(str, values)) if isinstance(values, list) else ""


def _gap_s(pair: Pair) -> float:
    """Seconds between the end of the one and the start of the other; 0 where they overlap, or do not say."""
    if pair.baseline.span_s is None or pair.treatment.span_s is None:
        return 0.0
    (first, first_end), (second, second_end) = pair.baseline.span_s, pair.treatment.span_s
    return max(0.0, second - first_end, first - second_end)
