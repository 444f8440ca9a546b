"""Repeated comparisons of the same runs: how many there were, and what that does to the level."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from abrun.reasons import Code, Reason
from abrun.recorded.claim_tests import ClaimTest, make_claim_test
from abrun.recorded.experiment import RecordedExperiment
from abrun.stats.equivalence import ALPHA
from abrun.stats.sequential import level_of_readings


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """All comparisons of a treatment's runs that left a report, this one among them."""

    arm: str
    num_pairs: list[int]  # of each different set of pairs that these claims were tested on
    false_match: (
        float | None
    )  # rate at the margin, where the first match is taken; None: tested once, or interim analyses
    num_comparisons: int  # of these runs, each with other claims


def count_readings(experiment: RecordedExperiment, arm: str, earlier: Collection[ClaimTest]) -> Readings:
    """Count the earlier readings that share a pair with this one."""
    reading = make_claim_test(experiment, arm)
    same_runs = {reading, *(one for one in earlier if one.pairs & reading.pairs)}
    counted = {reading}
    if not experiment.compare.interim:  # declared: their levels allow for all of them
        counted = {one for one in same_runs if one.question == reading.question}
    sets = sorted((sorted(one.pairs) for one in counted), key=lambda pairs: (len(pairs), pairs))
    return Readings(
        arm=arm,
        num_pairs=[len(pairs) for pairs in sets],
        false_match=level_of_readings(sets) if len(sets) > 1 else None,
        num_comparisons=len({one.question for one in same_runs}),
    )


def reading_notes(readings: Readings, *, paired: bool, arms: int) -> Iterator[Reason]:
    """Yield how often the runs were compared; nothing where it was once."""
    arm = readings.arm if arms > 1 else None
    if readings.false_match is not None:
        yield Code.READ_SEVERAL_TIMES(
            arm=arm,
            num_pairs=readings.num_pairs,
            paired=paired,
            false_match=readings.false_match,
            level=ALPHA,
        )
    if readings.num_comparisons > 1:
        yield Code.SEVERAL_COMPARISONS(arm=arm, num_comparisons=readings.num_comparisons)
