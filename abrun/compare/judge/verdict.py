"""From evidence to a verdict and the sentences that carry it (verdict.md, rules 6 and 9)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from abrun.compare.judge.by_prompt import ByPrompt, by_prompt
from abrun.compare.judge.claims import SHARED, PrimaryResult, judge_primary, setting_text, with_holm
from abrun.compare.judge.description import (
    Description,
    description_sentences,
    descriptions,
    nothing_shared,
    num_metrics,
)
from abrun.compare.judge.divergence import Divergence, divergence
from abrun.compare.judge.final_weights import FinalWeights, final_weights
from abrun.compare.judge.guards import Guard, Saving, check_guards, measure_savings, num_tests, opposed
from abrun.compare.judge.limits import judge_limit, limit_sentence
from abrun.compare.judge.margins import resolved_margin
from abrun.compare.judge.step_one import StepOne, named_otherwise, share_of_scale, step_one
from abrun.compare.judge.summaries import difference_unit
from abrun.compare.judge.untested import counted, not_tested, step_one_unread
from abrun.compare.judge.validity import Coverage, coverage, differences, invalid_reasons
from abrun.compare.read.experiment import Experiment, Sides, no_shared_step
from abrun.equivalence import ALPHA, bound_text
from abrun.looks import levels_of_looks
from abrun.recipe import Primary, units

Verdict = Literal["MATCH", "MISMATCH", "INCONCLUSIVE", "INVALID"]
EXIT_CODES: dict[Verdict, int] = {"MATCH": 0, "MISMATCH": 3, "INCONCLUSIVE": 4, "INVALID": 5}
_WORST_FIRST: tuple[Verdict, ...] = ("INVALID", "MISMATCH", "INCONCLUSIVE", "MATCH")
_OPEN_GUARDS = {
    "baseline too": "the baseline breaks the limit as well",
    "open": "beyond the limit, which seeds alone may have done",
}
_ONE_EACH = (
    "one run of each arm is a description and no test: what lies between them may be their seeds' doing"
)
_NOT_DECLARED = (
    "no primary metric is declared: step one and the guards pass, which does not show that the arms "
    "converge alike; declare compare.primary with a margin"
)
_NO_CLAIM = (
    "no verdict: no claim says which difference would be accepted (--primary METRIC:WINDOW:MARGIN), so this "
    "is a description and does not test whether the arms converge alike"
)
AT_OBSERVED = "at the observed sd"  # of numbers of pairs; `abrun plan --from` takes its upper bound
_SHOWN_FAULTS = 6  # of a kind of fault that every run may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A verdict taken when that many pairs had ended, at its share of alpha."""

    num_pairs: int
    alpha: float  # of a match: its one-sided level
    alpha_difference: float  # of a mismatch by a claim, over all claims
    alpha_guards: float  # of a mismatch by a guard or step one
    verdict: Verdict | None = None  # None: not taken yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict:
    """One treatment against the baseline."""

    arm: str
    verdict: Verdict
    reasons: list[str]
    not_tested: list[str]
    num_pairs: int  # finished pairs, of
    num_planned_pairs: int
    num_runs: tuple[int, int] | None  # finished ones of both arms, where they are not paired
    treatment_diff: dict[str, list[Any]]  # dotted key -> [baseline's value, the arm's]
    coverage: Coverage
    num_metrics: tuple[int, int] | None  # in every run, in any; None: something is claimed
    step_one: list[StepOne]
    divergence: list[Divergence]
    final_weights: list[FinalWeights]  # one; none where no finished pair says what it ended with
    descriptions: list[Description]  # of two runs, one of each arm; empty where there are more
    primaries: list[PrimaryResult]
    by_prompt: list[ByPrompt]  # one; none where no pair was validated prompt by prompt
    guards: list[Guard]
    savings: list[Saving]
    looks: list[Look]  # empty where none were declared: one verdict over all pairs


def judge(
    experiment: Experiment,
    primaries: Sequence[Primary],
    *,
    alpha: float = ALPHA,
    may_repeat: bool = False,
) -> list[ArmVerdict]:
    """Gather the evidence for every treatment and decide. Raises ComparisonError for a claim it cannot read.

    With looks declared, the first that decides stands: each tests at a level of which all of them together
    err no more often than one verdict would (see abrun.looks). `alpha` is what a match, and what a mismatch,
    may err; `may_repeat`: arms that are bit-identical were expected to be.
    """
    margins = [
        resolved_margin(primary, experiment.reference) if primary.margin is not None else None
        for primary in primaries
    ]
    may_repeat = may_repeat or any(primary.exact for primary in primaries)
    arms = experiment.treatments
    planned = looks_of(experiment, len(primaries), alpha)
    taken = [look for look in planned if all(_ended(experiment, arm, look) for arm in arms)] or planned[:1]
    judged: dict[str, ArmVerdict] = {}
    looks: dict[str, list[Look]] = {arm: [] for arm in arms}
    for look in taken:
        results = with_holm(
            [
                judge_primary(
                    arm,
                    experiment.sides(arm, look.num_pairs),
                    primary,
                    margin,
                    experiment.steps_of(primary.metric),
                    look.alpha,
                    look.alpha_difference,
                    may_repeat,
                )
                if margin
                else judge_limit(
                    arm,
                    experiment.sides(arm, look.num_pairs),
                    primary,
                    experiment.steps_of(primary.metric),
                    look.alpha,
                    look.alpha_difference,
                )
                for arm in arms
                for primary, margin in zip(primaries, margins, strict=True)
            ]
        )
        for arm in arms:
            if not looks[arm] or looks[arm][-1].verdict == "INCONCLUSIVE":
                of_arm = [result for result in results if result.arm == arm]
                judged[arm] = judge_arm(experiment, arm, primaries, of_arm, look)
                looks[arm].append(replace(look, verdict=judged[arm].verdict))
    if not experiment.compare.looks:
        return list(judged.values())
    return [replace(one, looks=[*looks[arm], *planned[len(looks[arm]) :]]) for arm, one in judged.items()]


def looks_of(experiment: Experiment, num_claims: int = 1, alpha: float = ALPHA) -> list[Look]:
    """The declared looks; where there are none, one at all pairs.

    Of the `alpha` in which equal arms may be called a mismatch, the guards and step one have the share that
    `guards.alpha` is of 5 %, the claims the rest. Each claim of each treatment has its part of that, before
    it is spread over the looks.
    """
    counts = experiment.compare.looks or [
        max((len(experiment.pairs(arm)) for arm in experiment.treatments), default=0)
    ]
    for_guards = experiment.compare.guards.alpha * alpha / ALPHA
    family = max(1, num_claims * len(experiment.treatments))
    spending = experiment.compare.looks_spending
    of_matches = levels_of_looks(counts, alpha, spending)
    of_mismatches = levels_of_looks(counts, (alpha - for_guards) / family, spending)
    return [
        Look(
            num_pairs=count,
            alpha=of_match,
            alpha_difference=family * of_mismatch,
            alpha_guards=for_guards / len(counts) / max(1, len(experiment.treatments)),
        )
        for count, of_match, of_mismatch in zip(counts, of_matches, of_mismatches, strict=True)
    ]


def _ended(experiment: Experiment, arm: str, look: Look) -> bool:
    pairs = experiment.pairs(arm)[: look.num_pairs]
    runs = [run for pair in pairs for run in (pair.baseline, pair.treatment)]
    return len(pairs) >= look.num_pairs and all(run.finished or run.status == "failed" for run in runs)


def judge_arm(
    experiment: Experiment,
    arm: str,
    primaries: Sequence[Primary],
    results: Sequence[PrimaryResult],
    look: Look,
) -> ArmVerdict:
    """One treatment's verdict at one look, from the results of its claims and everything beside them."""
    sides = experiment.sides(arm)  # what broke after the look is no less broken
    pairs, compare = experiment.pairs(arm), experiment.compare
    invalid = invalid_reasons(experiment, arm, look.num_pairs, primaries)
    savings = measure_savings(arm, sides)
    windows = [(result.metric, result.steps) for result in results if result.steps]
    tests = look.alpha_guards / num_tests(compare)
    excused = pairs if sides.paired else opposed(sides)
    guards = check_guards(arm, excused, sides, compare.guards, savings, windows, tests)
    first_steps = step_one(arm, pairs, compare, tests, look.num_pairs)
    unread = step_one_unread(experiment, arm, first_steps)
    first_steps = [] if unread else first_steps
    diverged = divergence(arm, pairs, primaries)
    ended = final_weights(arm, pairs)
    validated = by_prompt(arm, pairs[: look.num_pairs], results)
    verdict, reasons = decide(
        invalid,
        first_steps,
        guards,
        results,
        reads_step_one=unread is None,
        recorded=experiment.metrics(),
        apart=no_shared_step([run for pair in pairs for run in (pair.baseline, pair.treatment)]),
        has_recipe=experiment.has_recipe,
    )
    described = descriptions(experiment, arm, primaries)
    if described or not (primaries or experiment.launched_compare_sha256):
        verdict, reasons = _as_described(experiment, sides, described, verdict, reasons)
    if verdict == "INVALID":  # the numbers stay to be looked at, the claims must not
        results = [replace(result, result="not tested") for result in results]
    return ArmVerdict(
        arm=arm,
        verdict=verdict,
        reasons=reasons,
        not_tested=not_tested(experiment, sides, primaries, first_steps, diverged, unread),
        num_pairs=sum(pair.finished for pair in pairs[: look.num_pairs]),
        num_planned_pairs=len(pairs),
        num_runs=None if sides.paired else sides.finished.sizes,
        treatment_diff=differences(experiment, arm),
        coverage=coverage(sides),
        num_metrics=None if primaries or not described else num_metrics(sides),
        step_one=first_steps,
        divergence=diverged,
        final_weights=[ended] if ended else [],
        descriptions=described,
        primaries=list(results),
        by_prompt=[validated] if validated else [],
        guards=guards,
        savings=savings,
        looks=[],
    )


def _as_described(
    experiment: Experiment,
    sides: Sides,
    described: Sequence[Description],
    verdict: Verdict,
    reasons: Sequence[str],
) -> tuple[Verdict, list[str]]:
    """What is said of arms that are described: without a claim, or with one run each, nothing is tested."""
    if experiment.launched_compare_sha256 is None:
        instead = _NO_CLAIM if described else nothing_shared(sides)
        reasons = [instead if reason == _NOT_DECLARED else reason for reason in reasons]
    one_each = described and max(sides.finished.sizes) == 1
    if one_each and (verdict == "INCONCLUSIVE" or (verdict != "INVALID" and not sides.paired)):
        verdict, reasons = "INCONCLUSIVE", [_ONE_EACH, *reasons]
    if described and verdict == "INCONCLUSIVE":
        reasons = [*description_sentences(described, experiment.baseline), *reasons]
    return verdict, list(reasons)


def decide(
    invalid: Sequence[str],
    first_steps: Sequence[StepOne],
    guards: Sequence[Guard],
    primaries: Sequence[PrimaryResult],
    *,
    reads_step_one: bool = True,
    recorded: Sequence[str] = (),
    apart: str | None = None,
    has_recipe: bool = True,
) -> tuple[Verdict, list[str]]:
    """The verdict of one arm and why: invalid before mismatch before inconclusive before match.

    `recorded`: the metrics of all runs; `apart` says that the arms share no step, where that is so.
    """
    if invalid:
        return "INVALID", _shortened(invalid)
    crashed = any(guard.guard == "finished" and guard.result == "fail" for guard in guards)
    if reads_step_one and not first_steps and not crashed:
        return "INVALID", [f"step grids differ: {apart}" if apart else _no_first_step(recorded)]
    sentence = partial(primary_sentence, has_recipe=has_recipe)
    wrong = [
        *(_step_one_sentence(one) for one in first_steps if one.result == "fail"),
        *(f"guard {guard.guard} fails: {guard.text}" for guard in guards if guard.result == "fail"),
        *(sentence(one) for one in primaries if one.result == "different"),
    ]
    if wrong:
        return "MISMATCH", wrong
    open_questions = [
        *(
            f"{_step_one_sentence(one)}: rounding raises it, as a fault does, and no ground for a match"
            for one in first_steps
            if one.result == "open"
        ),
        *(
            f"guard {guard.guard}: {guard.text}: {_OPEN_GUARDS[guard.result]}, and no ground for a match"
            for guard in guards
            if guard.result in _OPEN_GUARDS
        ),
        *(sentence(one) for one in primaries if one.result not in ("equivalent", "holds")),
    ]
    if not primaries:
        open_questions.append(_NOT_DECLARED)
    if open_questions:
        return "INCONCLUSIVE", open_questions
    return "MATCH", [sentence(one) for one in primaries]


def _no_first_step(recorded: Sequence[str]) -> str:
    return (
        "missing metric: no step-one metric (reward, loss, gradient norm, ...) is recorded in both arms at "
        f"step 0 or 1, so step one cannot be read{named_otherwise(recorded)}; or say --no-step-one"
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=_WORST_FIRST.index)


def primary_sentence(result: PrimaryResult, *, has_recipe: bool = True) -> str:
    """One claim's outcome, in words that promise no more than was tested."""
    unit = difference_unit(result.transform)
    margin = f"{result.margin_text}{unit if result.margin_unit == '' else ''}"
    if result.problem and result.result != "different":
        seen = f"; recorded is a difference, {result.detected.text}" if result.detected else ""
        return f"{result.metric}: not tested over {result.window}: {result.problem}{seen}"
    if result.test in ("limit", "ratio limit", "exact"):
        return limit_sentence(result, has_recipe=has_recipe)
    if result.mean_difference is None or result.interval is None or result.steps is None:
        if result.num_runs is not None:
            return f"{result.metric}: not tested: equivalence needs two runs of each arm, or more"
        return (
            f"{result.metric}: {counted(result.num_pairs, 'usable pair')}; equivalence needs the spread over "
            "at least two: only step one, the guards and the divergence were looked at"
        )
    where = setting_text(result, has_recipe=has_recipe)
    level = f"{100 * (1 - 2 * result.alpha):.3g} %"
    interval = f"{level} interval [{result.interval[0]:.3g}, {result.interval[1]:.3g}]"
    bound = f"certified bound {certified(result)}"
    warning = f"; {result.warning}" if result.warning else ""
    if result.result == "equivalent":
        yet = f", and {result.detected.text}{unit};" if result.detected else ""
        return (
            f"{result.metric}: equivalent within {margin}{yet} at {100 * (1 - result.alpha):.3g} % "
            f"confidence over {where} ({bound}{_jointly(result)}){warning}"
        )
    agreement = f", {result.detected.agreement}" if result.detected else ""
    if result.result == "different":
        return (
            f"{result.metric}: differs by {result.mean_difference:+.3g}{unit}, beyond {margin}, over {where}"
            f"{agreement} ({interval}; Holm-corrected p = {result.p_beyond_holm:.2g} of a true difference "
            f"within the margin){warning}"
        )
    found = f"mean difference {result.mean_difference:+.3g}{unit}, {interval}, {bound} against {margin}"
    spread = _spread(result)
    if result.detected:
        p = 1.0 if result.p_difference_holm is None else result.p_difference_holm
        detected = "was detected" if p < result.alpha_difference else "is likely"
        return (
            f"{result.metric}: a difference {detected} over {where} (Holm p = {p:.2g}){agreement}, and "
            f"whether it stays within the margin is open: {found}; {spread}, "
            f"{_pairs_for_the_observed(result)}{warning}"
        )
    return (
        f"{result.metric}: not decided over {where}: {found}; {spread}, "
        f"power now {_percent(result.power_now)}, {_needed(result)}"
        f"{warning}"
    )


def _spread(result: PrimaryResult) -> str:
    if result.num_runs is not None:
        return f"sd of a run of each arm {result.sd_difference:.3g}"
    correlation = "undefined" if result.pair_correlation is None else f"{result.pair_correlation:.2f}"
    return f"s_d {result.sd_difference:.3g}, pair correlation {correlation}"


def _needed(result: PrimaryResult) -> str:
    if result.num_runs is None:
        return f"pairs needed for 80 % power {_pairs_needed(result)}"
    paired = (
        f"pairing by seed would need about {_or_many(result.pairs_if_shared)} at a correlation of {SHARED}"
    )
    return f"runs of each arm needed for 80 % power {_pairs_needed(result)}; {paired}"


def _jointly(result: PrimaryResult) -> str:
    """The bound that holds for all claims at once, where that is another."""
    if result.certified_jointly is None or result.certified_jointly == result.certified_bound:
        return ""
    return f", {bound_text(result.certified_jointly)} jointly with the other claims'"


def _pairs_for_the_observed(result: PrimaryResult) -> str:
    """What more pairs would bring if the true difference is the observed one."""
    if result.margin_unit == "sigma":
        return _needed(result)
    pairs = units(paired=result.num_runs is None)
    assert result.margin is not None and result.mean_difference is not None
    if abs(result.mean_difference) >= result.margin:
        return f"no number of {pairs} shows equivalence if the true difference is the observed one"
    needed = _or_many(result.pairs_needed_observed)
    return f"{pairs} needed for 80 % power {needed}, if the true difference is the observed one"


def certified(result: PrimaryResult) -> str:
    """The smallest margin that would have passed, in the margin's own unit."""
    number = result.certified_bound if result.certified_number is None else result.certified_number
    if number is None:
        return "-"
    if result.margin_unit in ("level", "climb") and result.certified_number is not None:
        return f"{bound_text(100 * number)}%{' of climb' * (result.margin_unit == 'climb')}"
    return f"{bound_text(number)}{' sigma' * (result.margin_unit == 'sigma')}"


def _step_one_sentence(one: StepOne) -> str:
    share = share_of_scale(one.deviation, one.scale, one.scale_from)
    return (
        f"step one: {one.metric} is {one.baseline:.6g} in the baseline and {one.treatment:.6g} in the "
        f"treatment at step {one.step} (seed {one.seed}): a deviation by {share}, tolerance "
        f"{one.tolerance:.2g} ({one.tolerance_from})"
    )


def _pairs_needed(result: PrimaryResult) -> str:
    if result.pairs_needed_range is None:
        return "unknown"
    low, high = (_or_many(count) for count in result.pairs_needed_range)
    return f"{_or_many(result.pairs_needed)} ({low} to {high}) {AT_OBSERVED}, if the arms are truly equal"


def _or_many(count: int | None) -> str:
    return "more than 1000" if count is None else str(count)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"


def _shortened(sentences: Sequence[str]) -> list[str]:
    """The first few; one mistake often shows in every run and every key."""
    unique = list(Counter(sentences))
    more = len(unique) - _SHOWN_FAULTS
    return unique if more <= 0 else [*unique[:_SHOWN_FAULTS], f"and {more} more of this kind"]
