"""Sentences of notes: what readers have to know beside a verdict, and what was guessed of runs."""

from collections.abc import Mapping, Sequence

from abrun.messages.message import Message
from abrun.messages.numbers import units
from abrun.reasons import Code

_MOST_NAMED = 5
_OTHER_MACHINES = {"hosts": "other hosts", "drivers": "other drivers"}


def _names(runs: Sequence[str]) -> str:
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    return f"{', '.join(runs[:_MOST_NAMED])}{more}"


def _note_of_runs(runs: list[str], note: str) -> str:
    return f"{_names(runs)}: {note}"


def _code_changed(runs: list[str], versions: list[str]) -> str:
    return f"{_names(runs)}: trained by several versions of the code: {', then '.join(versions)}"


def _arms_of_other_code(baseline: str, baseline_code: list[str], arm: str, code: list[str]) -> str:
    return (
        f"the arms ran different code: {baseline} {' and '.join(baseline_code)}, {arm} {' and '.join(code)}; "
        "the "
        "difference between them includes that of the code"
    )


def _runs_of_other_code(runs: list[str], code: str, usual_code: str) -> str:
    return f"{_names(runs)}: trained by the code {code}, other runs by {usual_code}"


def _other_machines(
    kind: str, arm: str, num_differing: int, num_pairs: int, seed: int, value: str, baseline: str
) -> str:
    return (
        f"{num_differing} of {num_pairs} pairs of {arm} ran on {_OTHER_MACHINES[kind]} than their baseline "
        "(seed "
        f"{seed}: {value} against {baseline}): times compare with care"
    )


def _hours_apart(arm: str, num_apart: int, num_pairs: int, seed: int, gap_s: float) -> str:
    return (
        f"{num_apart} of {num_pairs} pairs of {arm} ran hours apart (seed {seed}: {gap_s / 3600:.1f} h "
        "between "
        "its runs): times compare with care"
    )


def _counters_differ(
    metric: str, grids: Mapping[str, Mapping[str, int]], late: str, num_shared: int, first: int, last: int
) -> str:
    (left, one), (right, other) = grids.items()
    return (
        f"{metric}: the counters differ by one: {left} counts {one['first']}-{one['last']}, {right} "
        f"{other['first']}-{other['last']}, so that at the same number {late} has made one update fewer; "
        f"{_compared_on(num_shared, first, last)}"
    )


def _grids_differ(
    metric: str,
    grids: Mapping[str, Mapping[str, int]],
    averaged: bool,
    num_shared: int,
    first: int,
    last: int,
) -> str:
    described = ", ".join(f"{name} {_grid(**grid)}" for name, grid in grids.items())
    often = "; who logs less often may log averages" * averaged
    return (
        f"{metric}: recorded at different steps ({described}); {_compared_on(num_shared, first, last)}{often}"
    )


def _grid(first: int, last: int, every: int) -> str:
    return f"{first}-{last}" + (f" every {every}" if every > 1 else "")


def _compared_on(num_shared: int, first: int, last: int) -> str:
    return f"compared on the {num_shared} steps that all runs have ({first}-{last})"


def _read_several_times(
    arm: str | None, num_pairs: list[int], paired: bool, false_match: float, level: float
) -> str:
    *others, last = map(str, num_pairs)
    return (
        f"{_mark(arm)}these runs were read {len(num_pairs)} times, at {', '.join(others)} and {last} "
        f"{units(paired=paired)}: taking the first match errs in {false_match:.2g} of "
        f"experiments at the margin, not in {level:g}"
    )


def _several_comparisons(arm: str | None, num_comparisons: int) -> str:
    return (
        f"{_mark(arm)}{num_comparisons} comparisons of these runs with different claims or looks: the level "
        "holds "
        "for one that was declared in advance (simulated: of 20 windows some one matches falsely in 0.08 to "
        "0.29 "
        "of experiments)"
    )


def _mark(arm: str | None) -> str:
    return f"{arm}: " if arm else ""


def _ledger_empty(metric: str, first: int, last: int, budget: float) -> str:
    return (
        f"ledger of {metric} over steps {first}-{last}: no change since the anchor; drift spent 0 of "
        f"{budget:g}"
    )


def _ledger(
    metric: str,
    first: int,
    last: int,
    num_entries: int,
    num_tried: int,
    budget: float,
    bound: float,
    confidence: float,
    bound_by: str,
    chain: list[float],
    direct: list[float] | None,
    direct_by: str,
    num_chains: float,
    disagree: bool,
) -> str:
    shown = ""
    if direct:
        shown = f", direct [{direct[0]:.3g}, {direct[1]:.3g}] by {direct_by}"
        shown += f" for {num_chains:.3g} possible chains" if num_chains > 1 else ""
    more = num_tried - num_entries
    text = (
        f"ledger of {metric} over steps {first}-{last}: {num_entries} change{'s' * (num_entries != 1)}, "
        "drift "
        f"spent {bound:.3g} of {budget:g} ({100 * confidence:g} % bound by {bound_by}; chain "
        f"[{chain[0]:.3g}, {chain[1]:.3g}]{shown}; jointly over {num_tried} judged changes"
        f"{f', {more} of them not accepted' if more else ''})"
    )
    if disagree:
        text += "; chain and direct comparison exclude each other: something moved that is in no entry"
    if bound > budget:
        text += (
            "; the budget is exceeded: re-anchor: run the anchor's arm against today's, and freeze today's"
        )
    return text


def _precision_differs(arm: str, precisions: Mapping[str, list[str]]) -> str:
    differences = [f"{label} in {own} instead of {usual}" for label, (usual, own) in precisions.items()]
    return f"{arm}: {', '.join(differences)}"


POST_HOC = {
    Code.NOTHING_DECLARED: Message("no comparison was declared before these runs"),
    Code.COMPARISON_CHANGED: Message(
        "the comparison is not the one declared when the experiment was launched"
    ),
    Code.PAIRS_ADDED: Message(
        "{num_pairs} pairs were added after the launch", remedy="declare compare.looks to look more than once"
    ),
    Code.CLAIMS_CHANGED: Message("the claims are not those declared when the experiment was launched"),
    Code.PAIRING_CHANGED: Message(
        "the arms were not paired, which was not declared when the experiment was launched"
    ),
    Code.STEP_ONE_DROPPED: Message(
        "step one was left out, which was not declared when the experiment was launched"
    ),
    Code.READ_SEVERAL_TIMES: Message(
        _read_several_times, remedy="judge fresh seeds alone", meaning="the runs were compared several times"
    ),
    Code.SEVERAL_COMPARISONS: Message(
        _several_comparisons, meaning="the runs were compared with several claims"
    ),
}
NOTES = {
    Code.NOTE_OF_RUNS: Message(_note_of_runs, meaning="what reading the logs of some runs had to decide"),
    Code.DECIDED_AT_LAUNCH: Message("{decision}"),
    Code.CODE_CHANGED: Message(
        _code_changed, meaning="attempts of a run were of several versions of the code"
    ),
    Code.ARMS_OF_OTHER_CODE: Message(_arms_of_other_code, meaning="the arms ran different code"),
    Code.RUNS_OF_OTHER_CODE: Message(_runs_of_other_code, meaning="some runs ran other code than the rest"),
    Code.OTHER_MACHINES: Message(_other_machines, meaning="pairs ran on other hosts or drivers"),
    Code.HOURS_APART: Message(_hours_apart, meaning="the runs of pairs are hours apart"),
    Code.PRECISION_DIFFERS: Message(_precision_differs, meaning="LM head or logits have another precision"),
    Code.COUNTERS_DIFFER: Message(_counters_differ, meaning="one arm counts its steps from one more"),
    Code.GRIDS_DIFFER: Message(_grids_differ, meaning="runs recorded a metric at different steps"),
    Code.LEDGER_EMPTY: Message(_ledger_empty, meaning="a reference's ledger without entries"),
    Code.LEDGER: Message(_ledger, meaning="what the entries of a reference's ledger add up to"),
    Code.SEED_NOT_KNOWN: Message("numbered, its seed is not known: {place}"),
    Code.PROMPTS_OF_RUNS_DIFFER: Message("the runs did not answer the same prompts at the same steps"),
    Code.VALIDATION_NOT_FINITE: Message("no finite validation in the claim's window"),
    Code.VALIDATION_UNREADABLE: Message("{problem}"),
}


def _seeds_from(how: str, arm: str | None, seed: int) -> str:
    if arm is None:
        return f"seeds from {how}: seed {seed}"
    return f"arms and seeds from {how}: {arm}, seed {seed}"


GUESSED = {
    Code.SEEDS_FROM: Message(_seeds_from, meaning="which names or settings of runs say their seeds"),
    Code.ARMS_FROM_NAMES: Message("each of the {num_arms} arms from the names of its runs"),
    Code.NOTHING_SAYS_SEEDS: Message(
        "runs are independent: nothing says their seeds; --pattern '*-s{{seed}}' says where they stand"
    ),
    Code.LOG_READ_AS: Message("{guess}"),
    Code.ARMS_SHARE_NO_SEED: Message("runs are independent: the arms have no seed in common"),
    Code.SOURCES_ARE_ARMS: Message(
        "each of the {num_sources} sources is an arm; where they are seeds of one, name their folder"
    ),
    Code.BASELINE_GUESSED: Message("the baseline is {baseline:repr} (--baseline says otherwise: {others})"),
}
MESSAGES = {**POST_HOC, **NOTES, **GUESSED}
