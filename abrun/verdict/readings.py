"""Repeated comparisons ("readings") of the same runs: their number, and the resulting familywise error."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from abrun.reasons import Code, Reason
from abrun.recorded.claim_tests import ClaimTest, make_claim_test
from abrun.recorded.experiment import RecordedExperiment
from abrun.stats.equivalence import ALPHA
from abrun.stats.sequential import simulate_familywise_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """All comparisons of a treatment's runs that left a report, including this one."""

    arm: str
    num_pairs: list[int]  # size of each distinct set of pairs on which these claims were tested
    # Familywise rate of a false match at the margin; None if tested once, or with interim analyses.
    false_match: float | None
    num_comparisons: int  # comparisons of these runs with different claims


def count_readings(experiment: RecordedExperiment, arm: str, earlier: Collection[ClaimTest]) -> Readings:
    """Count the earlier readings that share a pair with this one."""
    reading = make_claim_test(experiment, arm)
    same_runs = {
        reading,
        *(earlier_reading for earlier_reading in earlier if earlier_reading.pairs & reading.pairs),
    }
    counted = {reading}
    if not experiment.compare.interim:  # declared: their levels allow for all of them
        counted = {
            earlier_reading for earlier_reading in same_runs if earlier_reading.question == reading.question
        }
    sets = sorted(
        (sorted(earlier_reading.pairs) for earlier_reading in counted), key=lambda pairs: (len(pairs), pairs)
    )
    return Readings(
        arm=arm,
        num_pairs=[len(pairs) for pairs in sets],
        false_match=simulate_familywise_error(sets) if len(sets) > 1 else None,
        num_comparisons=len({earlier_reading.question for earlier_reading in same_runs}),
    )


def reading_notes(readings: Readings, *, paired: bool, arms: int) -> Iterator[Reason]:
    """Yield how often the runs were compared; nothing if it was once."""
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
