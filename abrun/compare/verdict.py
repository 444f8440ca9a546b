"""From evidence to a verdict and the sentences that carry it (verdict.md, rules 6 and 9)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from abrun.compare.evidence import (
    Divergence,
    PrimaryResult,
    StepOne,
    divergence,
    judge_primaries,
    step_one,
)
from abrun.compare.guards import Guard, Saving, check_guards, measure_savings
from abrun.compare.metrics import difference_unit
from abrun.compare.sources import Experiment
from abrun.compare.validity import coverage, invalid_reasons
from abrun.recipe import Primary

Verdict = Literal["MATCH", "MISMATCH", "INCONCLUSIVE", "INVALID"]
EXIT_CODES: dict[Verdict, int] = {"MATCH": 0, "MISMATCH": 3, "INCONCLUSIVE": 4, "INVALID": 5}
_WORST_FIRST: tuple[Verdict, ...] = ("INVALID", "MISMATCH", "INCONCLUSIVE", "MATCH")
_SHOWN_FAULTS = 6  # of a kind of fault that every run may have


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict:
    """One treatment against the baseline."""

    arm: str
    verdict: Verdict
    reasons: list[str]
    num_pairs: int  # finished pairs, of
    num_planned_pairs: int
    treatment_diff: dict[str, list[Any]]  # dotted key -> [baseline's value, the arm's]
    coverage: dict[str, int]
    step_one: list[StepOne]
    divergence: list[Divergence]
    primaries: list[PrimaryResult]
    guards: list[Guard]
    savings: list[Saving]


def judge_arm(experiment: Experiment, arm: str, primaries: Sequence[Primary]) -> ArmVerdict:
    """Gather the evidence for one arm and decide. Raises ComparisonError where a claim cannot be read."""
    pairs = experiment.pairs(arm)
    compare = experiment.recipe.compare
    invalid = invalid_reasons(experiment, arm, primaries)
    savings = measure_savings(arm, pairs)
    guards = check_guards(arm, pairs, compare.guards, savings)
    first_steps = step_one(arm, pairs, compare)
    results = judge_primaries(arm, pairs, primaries, experiment.all_steps())
    verdict, reasons = decide(invalid, first_steps, guards, results)
    if verdict == "INVALID":  # the numbers stay to be looked at, the claims must not
        results = [replace(result, result="not tested") for result in results]
    return ArmVerdict(
        arm=arm,
        verdict=verdict,
        reasons=reasons,
        num_pairs=sum(pair.finished for pair in pairs),
        num_planned_pairs=len(pairs),
        treatment_diff=experiment.treatment_diff.get(arm, {}),
        coverage=coverage(pairs),
        step_one=first_steps,
        divergence=divergence(arm, pairs, primaries),
        primaries=results,
        guards=guards,
        savings=savings,
    )


def decide(
    invalid: Sequence[str],
    first_steps: Sequence[StepOne],
    guards: Sequence[Guard],
    primaries: Sequence[PrimaryResult],
) -> tuple[Verdict, list[str]]:
    """The verdict of one arm and why: invalid before mismatch before inconclusive before match."""
    if invalid:
        return "INVALID", _shortened(invalid)
    crashed = any(guard.guard == "finished" and guard.result == "fail" for guard in guards)
    if not first_steps and not crashed:
        return "INVALID", [
            "missing metric: no step-one metric is recorded in both arms, so T1 cannot be read"
        ]
    wrong = [
        *(_step_one_sentence(one) for one in first_steps if not one.passes),
        *(f"guard {guard.guard} fails: {guard.text}" for guard in guards if guard.result == "fail"),
        *(primary_sentence(one) for one in primaries if one.result == "different"),
    ]
    if wrong:
        return "MISMATCH", wrong
    open_questions = [
        *(
            f"guard {guard.guard}: {guard.text}: not the treatment's doing, and no ground for a match"
            for guard in guards
            if guard.result == "baseline too"
        ),
        *(primary_sentence(one) for one in primaries if one.result != "equivalent"),
    ]
    if not primaries:
        open_questions.append(
            "no primary metric is declared: step one and the guards pass, which does not show that the arms "
            "converge alike; declare compare.primary with a margin"
        )
    if open_questions:
        return "INCONCLUSIVE", open_questions
    return "MATCH", [primary_sentence(one) for one in primaries]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=_WORST_FIRST.index)


def primary_sentence(result: PrimaryResult) -> str:
    """One claim's outcome, in words that promise no more than was tested."""
    unit = difference_unit(result.transform)
    margin = f"±{result.margin:g}{unit}"
    if result.mean_difference is None or result.ci90 is None or result.steps is None:
        return (
            f"{result.metric}: {_count(result.num_pairs, 'usable pair')}; equivalence needs the spread over "
            "at least two: only step one, the guards and the divergence were looked at"
        )
    where = f"{_count(result.num_pairs, 'pair')}, this recipe, steps {result.steps[0]}-{result.steps[1]}"
    interval = f"90 % interval [{result.ci90[0]:.3g}, {result.ci90[1]:.3g}]"
    if result.result == "equivalent":
        return (
            f"{result.metric}: equivalent within {margin} at 95 % confidence over {where} "
            f"(certified bound {result.certified_bound:.3g})"
        )
    if result.result == "different":
        return (
            f"{result.metric}: differs by {result.mean_difference:+.3g}{unit}, beyond {margin}, over {where} "
            f"({interval}, Holm p = {result.p_difference_holm:.2g})"
        )
    correlation = "undefined" if result.pair_correlation is None else f"{result.pair_correlation:.2f}"
    return (
        f"{result.metric}: not decided over {where}: mean difference {result.mean_difference:+.3g}{unit}, "
        f"{interval}, certified bound {result.certified_bound:.3g} against {margin}; "
        f"s_d {result.sd_difference:.3g}, pair correlation {correlation}, "
        f"power now {_percent(result.power_now)}, pairs needed for 80 % power {_pairs_needed(result)}"
    )


def _step_one_sentence(one: StepOne) -> str:
    return (
        f"step one: {one.metric} is {one.baseline:.6g} in the baseline and {one.treatment:.6g} in the "
        f"treatment at step {one.step} (seed {one.seed}): relative deviation {one.deviation:.2g}, tolerance "
        f"{one.tolerance:.2g} ({one.tolerance_from})"
    )


def _pairs_needed(result: PrimaryResult) -> str:
    if result.pairs_needed_range is None:
        return "unknown"
    low, high = (_or_many(count) for count in result.pairs_needed_range)
    return f"{_or_many(result.pairs_needed)} ({low} to {high}), if the arms are truly equal"


def _or_many(count: int | None) -> str:
    return "more than 1000" if count is None else str(count)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(sentences: Sequence[str]) -> list[str]:
    """The first few; one mistake often shows in every run and every key."""
    unique = list(Counter(sentences))
    more = len(unique) - _SHOWN_FAULTS
    return unique if more <= 0 else [*unique[:_SHOWN_FAULTS], f"and {more} more of this kind"]
