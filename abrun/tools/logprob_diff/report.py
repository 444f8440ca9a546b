"""Terminal output of a mismatch budget."""

from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.report.present.tables import Table, columns
from abrun.tools.logprob_diff.budget import ClusteredMean
from abrun.tools.logprob_diff.findings import Budget

METRIC = "token_mult_prob_error"
CHANGES = ("one thing changed", "error then", "lower by [95 %]", "log-probs moved by", "largest")
WORST = ("sequence", "position", "factor", "engine", "trainer", "token", "after")


def summary(budget: Budget) -> RenderableType:
    """Return the headlines, a row for each change, experts, the worst tokens and notes."""
    blocks = [
        Text("\n".join(_headlines(budget))),
        changes_table(budget).to_rich(pad_edge=True),
        *_experts(budget),
        Table(columns(*WORST, fold=True), [*_worst_rows(budget)], "the worst tokens"),
        Text("\n".join(_notes(budget))),
    ]
    return Group(*blocks)


def changes_table(budget: Budget) -> Table:
    return Table(columns(*CHANGES, numeric=CHANGES[1:]), [*_change_rows(budget)])


def error_text(value: float) -> str:
    """Return an error as text, with enough digits of its excess over 1."""
    excess = value - 1
    if excess == 0:
        return "1"
    return f"1+{excess:.1e}" if abs(excess) < 5e-5 else f"{value:.4f}" if value < 10 else f"{value:.4g}"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2g}"


def _interval(estimate: ClusteredMean, form: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return form(estimate.value)
    return f"{form(estimate.value)} [{form(estimate.low)}, {form(estimate.high)}]"


def _headlines(budget: Budget) -> Iterator[str]:
    facts, total = budget.facts, budget.error
    yield (
        f"{facts.run}: {METRIC} {_interval(total, error_text)} at step {facts.step + 2}, engine "
        f"{facts.engine}, trainer in {facts.dtype}; {budget.num_tokens} tokens of {budget.num_sequences} "
        f"sequences of {budget.num_prompts} prompts"
    )
    for repeated in facts.seen:
        yield (
            f"step {repeated['step']} repeated: {error_text(repeated['here'])}; the run recorded "
            f"{error_text(repeated['run'])}"
        )
    cause = budget.cause_row
    if cause is None or cause.lowers is None or cause.error is None:
        yield "no single change lowers the excess by a tenth or more beyond noise"
    else:
        yield (
            f"largest cause: {cause.label}: {error_text(cause.error)} instead, lower by "
            f"{_interval(cause.lowers, _signed)}"
        )
    for row in budget.floor:
        if row.moves:
            label = "float32 of the same weights" if row.key == "float32" else row.label
            yield f"noise floor, trainer against {label}: {_interval(row.moves, error_text)}"


def _notes(budget: Budget) -> Iterator[str]:
    facts = budget.facts
    yield "Effects of single changes are not additive. Intervals are simultaneous 95 %, clustered by prompt."
    if budget.error.low is None:
        yield f"No intervals: {budget.num_prompts} prompts are too few."
    if not facts.grad_norm:
        yield "The repeated update had no gradient, so the effect of stale weights cannot be measured."
    if facts.spread > 1:
        yield f"The run has {facts.spread} ranks; it was continued here on one."
    if budget.num_sequences < facts.num_sequences_sampled:
        yield f"{budget.num_sequences} of the step's {facts.num_sequences_sampled} sequences were scored."
    for row in budget.rows:
        if row.reason is not None:
            yield f"not measured: {row.label}: {row.reason}"


def _change_rows(budget: Budget) -> Iterator[tuple[str, ...]]:
    yield "nothing", error_text(budget.error.value), "", "", ""
    for row in budget.rows:
        if row.error is None or row.lowers is None or row.moves is None or row.largest_factor is None:
            continue
        label = f"{row.label} *" if row.key == budget.cause else row.label
        yield (
            label,
            error_text(row.error),
            _interval(row.lowers, _signed),
            error_text(row.moves.value),
            error_text(row.largest_factor),
        )


def _worst_rows(budget: Budget) -> Iterator[tuple[str, ...]]:
    for token in budget.facts.worst:
        engine, trainer = token["inference_logprob"], token["trainer_logprob"]
        with np.errstate(over="ignore"):
            factor = float(np.exp(abs(engine - trainer)))
        yield (
            str(token["sequence"]),
            str(token["position"]),
            error_text(factor),
            f"{engine:.4f}",
            f"{trainer:.4f}",
            repr(token["token"]),
            repr(token["context"]),
        )


def _experts(budget: Budget) -> Iterator[Table]:
    rows = [row for row in budget.rows if row.rerouted]
    if rows:
        layers = map(str, range(len(rows[0].rerouted or [])))
        shares = [(row.label, *(f"{share:.4f}" for share in row.rerouted or [])) for row in rows]
        title = "share of tokens routed to other experts than in the run's scoring, by layer"
        yield Table(columns("one thing changed", *layers), shares, title)
