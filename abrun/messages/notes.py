"""Sentences of notes: what readers have to know beside a verdict, and what was guessed of runs."""

from collections.abc import Mapping, Sequence

from abrun.messages.message import Message
from abrun.messages.numbers import units
from abrun.messages.validity import first_and_more
from abrun.reasons import Code


def _counters_differ(metric, grids, late, num_shared, first, last) -> str:
    """One arm counts its steps from one more."""
    (left, one), (right, other) = grids.items()
    return (
        f"{metric}: the counters differ by one: {left} counts {one['first']}-{one['last']}, {right} "
        f"{other['first']}-{other['last']}, so that at the same number {late} has made one update fewer; "
        f"{_compared_on(num_shared, first, last)}"
    )


def _grids_differ(metric, grids, averaged, num_shared, first, last) -> str:
    """Runs recorded a metric at different steps."""
    described = ", ".join(f"{name} {_grid(**grid)}" for name, grid in grids.items())
    often = "; who logs less often may log averages" * averaged
    return (
        f"{metric}: recorded at different steps ({described}); {_compared_on(num_shared, first, last)}{often}"
    )


def _grid(first: int, last: int, every: int) -> str:
    return f"{first}-{last}" + (f" every {every}" if every > 1 else "")


def _compared_on(num_shared: int, first: int, last: int) -> str:
    return f"compared on the {num_shared} steps that all runs have ({first}-{last})"


def _read_several_times(arm, num_pairs, paired, false_match, level) -> str:
    """The runs were compared several times."""
    *others, last = map(str, num_pairs)
    return (
        f"{_mark(arm)}these runs were read {len(num_pairs)} times, at {', '.join(others)} and {last} "
        f"{units(paired=paired)}: taking the first match errs in {false_match:.2g} of experiments at the "
        f"margin, not in {level:g}; judge fresh seeds alone"
    )


def _mark(arm: str | None) -> str:
    return f"{arm}: " if arm else ""


def _ledger(
    metric,
    first,
    last,
    num_entries,
    num_tried,
    budget,
    bound,
    confidence,
    bound_by,
    chain,
    direct,
    direct_by,
    num_chains,
    disagree,
) -> str:
    """Sum of the entries of a reference's ledger."""
    shown = ""
    if direct:
        shown = f", direct [{direct[0]:.3g}, {direct[1]:.3g}] by {direct_by}"
        shown += f" for {num_chains:.3g} possible chains" if num_chains > 1 else ""
    more = num_tried - num_entries
    text = (
        f"ledger of {metric} over steps {first}-{last}: {num_entries} change{'s' * (num_entries != 1)}, "
        f"drift spent {bound:.3g} of {budget:g} ({100 * confidence:g} % bound by {bound_by}; chain "
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


def _code_differs(versions: Sequence[Mapping[str, list[str]]]) -> str:
    """Runs, or attempts of one run, are of different code."""
    listed = (f"{', then '.join(of['code'])} ({first_and_more(of['runs'])})" for of in versions)
    return f"the runs are of different code: {', '.join(listed)}"


def _precision_differs(arm: str, precisions: Mapping[str, list[str]]) -> str:
    """LM head or logits have another precision."""
    differences = [f"{label} in {own} instead of {usual}" for label, (usual, own) in precisions.items()]
    return f"{arm}: {', '.join(differences)}"


POST_HOC: dict[Code, Message] = {
    Code.NOTHING_DECLARED: "no comparison was declared before these runs",
    Code.COMPARISON_CHANGED: "the comparison is not the one declared when the experiment was launched",
    Code.PAIRS_ADDED: "{num_pairs} pairs were added after the launch; declare compare.interim to analyse "
    "more than once",
    Code.CLAIMS_CHANGED: "the claims are not those declared when the experiment was launched",
    Code.PAIRING_CHANGED: "the arms were not paired, which was not declared when the experiment was launched",
    Code.STEP_ONE_DROPPED: "step one was left out, which was not declared when the experiment was launched",
    Code.READ_SEVERAL_TIMES: _read_several_times,
    Code.SEVERAL_COMPARISONS: "{arm:if {arm}: }{num_comparisons} comparisons of these runs with different "
    "claims or interim analyses: the level holds for one that was declared in advance (simulated: of 20 "
    "windows some one matches falsely in 0.08 to 0.29 of experiments)",
}
NOTES: dict[Code, Message] = {
    Code.NOTE_OF_RUNS: "{runs:some}: {note}",
    Code.DECIDED_AT_LAUNCH: "{decision}",
    Code.CODE_DIFFERS: _code_differs,
    Code.PRECISION_DIFFERS: _precision_differs,
    Code.COUNTERS_DIFFER: _counters_differ,
    Code.GRIDS_DIFFER: _grids_differ,
    Code.LEDGER_EMPTY: "ledger of {metric} over steps {first}-{last}: no change since the anchor; drift "
    "spent 0 of {budget:g}",
    Code.LEDGER: _ledger,
    Code.SEED_NOT_KNOWN: "numbered, its seed is not known: {place}",
}


GUESSED: dict[Code, Message] = {
    Code.SEEDS_FROM: "{arm:if arms and }seeds from {how}: {arm:if {arm}, }seed {seed}",
    Code.ARMS_FROM_NAMES: "each of the {num_arms} arms from the names of its runs",
    Code.NOTHING_SAYS_SEEDS: "runs are independent: nothing says their seeds; --pattern '*-s{{seed}}' says "
    "where they stand",
    Code.LOG_READ_AS: "{guess}",
    Code.ARMS_SHARE_NO_SEED: "runs are independent: the arms have no seed in common",
    Code.SOURCES_ARE_ARMS: "each of the {num_sources} sources is an arm; where they are seeds of one, name "
    "their folder",
    Code.BASELINE_GUESSED: "the baseline is {baseline:repr} (--baseline says otherwise: {others})",
}
MESSAGES = {**POST_HOC, **NOTES, **GUESSED}
