"""A mismatch budget for people and machines: mismatch.json, mismatch.md, figures, the terminal's tables."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.diagnose.logprob_diff.budget import Bin, Estimate
from abrun.diagnose.logprob_diff.findings import Budget, Row
from abrun.present.figures import COLORS, save_figure, style
from abrun.present.markdown import literal
from abrun.present.tables import Table, columns
from abrun.runs.access import PUBLIC
from abrun.runs.files import write_file, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_MEASURED = "not measured"
METRIC = "token_mult_prob_error"
COLOURS = {"trainer": COLORS[0], "engine": COLORS[1], "fault": COLORS[3], "total": "#555555"}
CHANGES = ("one thing changed", "error then", "lower by [95 %]", "log-probs moved by", "largest")
PATH = ("from the trainer's log-probs to the engine's", "adds [95 %]", "up to")
SEQUENCES = columns("sequence", "prompt", "tokens", "mean", "largest")
WORST = columns("sequence", "position", "factor", "engine", "trainer", "token", "after")
MOST_SEQUENCES = 10
SHARED = 3.0  # so many times as far from float32 as from each other


def write_report(budget: Budget, output: Path) -> None:
    """Write mismatch.json, mismatch.md, and waterfall and tokens as PNG and SVG."""
    write_json(output / "mismatch.json", budget.content(), mode=PUBLIC)
    _draw(budget, output)
    write_file(output / "mismatch.md", markdown(budget).encode(), mode=PUBLIC)


def summary(budget: Budget) -> RenderableType:
    """What the terminal shows."""
    return Group(
        Text("\n".join(_headlines(budget))),
        *(table.rich(pad_edge=True) for table in _tables(budget)),
        Text("\n".join(_notes(budget))),
    )


def markdown(budget: Budget) -> str:
    parts = [
        f"# Mismatch of {budget.facts.experiment}, {budget.facts.name}",
        "\n".join(f"- {literal(line)}" for line in _headlines(budget)),
        "![What adds up to the error, and what each change alone would take off it](waterfall.png)",
        *map(_marked, _tables(budget)),
        "\n".join(f"- {literal(line)}" for line in _notes(budget)),
        *_experts(budget),
        "## Tokens",
        "![The error by position, by probability, and by sequence](tokens.png)",
        _marked(Table(SEQUENCES, [*_sequence_rows(budget)])),
        "The worst tokens:",
        _marked(Table(WORST, [*_worst_rows(budget)])),
    ]
    return "\n\n".join(parts) + "\n"


# --- words ---


def error_text(value: float) -> str:
    """Of an error, which is 1 and something."""
    excess = value - 1
    if excess == 0:
        return "1"
    return f"1+{excess:.1e}" if abs(excess) < 5e-5 else f"{value:.4f}" if value < 10 else f"{value:.4g}"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2g}"


def _interval(estimate: Estimate, form: Callable[[float], str]) -> str:
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
    for seen in facts.seen:
        yield (
            f"step {seen['step']} has {error_text(seen['here'])} here; the run recorded "
            f"{error_text(seen['run'])}"
        )
    cause = budget.cause_row
    if cause is None or cause.lowers is None or cause.error is None:
        yield "no single change takes a tenth or more off it beyond noise"
    else:
        yield (
            f"most is taken off it by: {cause.label}: {error_text(cause.error)} instead, lower by "
            f"{_interval(cause.lowers, _signed)}"
        )
    for row in budget.floor:
        if row.moves:
            yield f"floor, the trainer against {_floor_name(row)}: {_interval(row.moves, error_text)}"


def _floor_name(row: Row) -> str:
    return "float32 of the same weights" if row.key == "float32" else row.label


def _notes(budget: Budget) -> Iterator[str]:
    facts = budget.facts
    yield (
        "Changes one at a time do not add up; the steps from trainer to engine do, in this order. Intervals "
        "hold together at 95 %, over prompts."
    )
    if any(estimate.low is None for estimate in (budget.error,)):
        yield f"No intervals: {budget.num_prompts} prompts are too few to know the spread."
    if not facts.grad_norm:
        yield "The update in between had no gradient: whether weights are stale cannot be seen."
    if facts.spread > 1:
        yield f"The run has {facts.spread} ranks; one has gone on with it here."
    if budget.num_sequences < facts.num_sequences_sampled:
        yield f"{budget.num_sequences} of the step's {facts.num_sequences_sampled} sequences were scored."
    exact = next((row.moves for row in budget.rows if row.key == "float32" and row.moves), None)
    if exact and exact.value - 1 > SHARED * (budget.error.value - 1):
        yield (
            "Trainer and engine share most of their rounding: they are nearer to each other than to float32, "
            "so that steps by way of it cancel."
        )
    yield from budget.merged
    for row in budget.rows:
        if row.reason is not None:
            yield f"{NOT_MEASURED}: {row.label}: {row.reason}"


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


def _bar_rows(budget: Budget) -> Iterator[tuple[str, ...]]:
    at = 1.0
    for bar in budget.bars:
        at += bar.adds.value
        yield bar.label, _interval(bar.adds, _signed), error_text(at)


def _sequence_rows(budget: Budget) -> Iterator[tuple[str, ...]]:
    for each in budget.sequences[:MOST_SEQUENCES]:
        numbers = (each.sequence, each.prompt, each.num_tokens)
        yield *map(str, numbers), error_text(each.mean), error_text(each.largest)


def _worst_rows(budget: Budget) -> Iterator[tuple[str, ...]]:
    import numpy as np

    for each in budget.facts.worst:
        engine, trainer = each["inference_logprob"], each["trainer_logprob"]
        with np.errstate(over="ignore"):
            factor = float(np.exp(abs(engine - trainer)))
        yield (
            str(each["sequence"]),
            str(each["position"]),
            error_text(factor),
            f"{engine:.4f}",
            f"{trainer:.4f}",
            repr(each["token"]),
            repr(each["context"]),
        )


def _experts(budget: Budget) -> Iterator[str]:
    rows = [row for row in budget.rows if row.rerouted]
    if rows:
        yield "Share of tokens that go to other experts than in the run's own scoring, by layer:"
        layers = len(rows[0].rerouted or [])
        yield _marked(
            Table(
                columns("one thing changed", *map(str, range(layers))),
                [(row.label, *(f"{share:.4f}" for share in row.rerouted or [])) for row in rows],
            )
        )


def _tables(budget: Budget) -> list[Table]:
    return [
        Table(columns(*titles, numeric=titles[1:]), [*rows])
        for titles, rows in ((CHANGES, _change_rows(budget)), (PATH, _bar_rows(budget)))
    ]


def _marked(table: Table) -> str:
    return "\n".join(table.markdown(literal))


# --- figures ---


def _draw(budget: Budget, output: Path) -> None:
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(9, 7.5), layout="constrained")
        path, changes = figure.subplots(2, 1)
        _waterfall(path, budget)
        _changes(changes, budget)
        save_figure(figure, output / "waterfall")
        figure = Figure(figsize=(12, 4), layout="constrained")
        _tokens(figure.subplots(1, 3), budget)
        save_figure(figure, output / "tokens")


def _waterfall(ax: "Axes", budget: Budget) -> None:
    at, names = 0.0, []
    for place, bar in enumerate(budget.bars):
        kind = "fault" if bar.key == "fault" else bar.label.partition(":")[0]
        ax.barh(place, bar.adds.value, left=at, color=COLOURS.get(kind, COLOURS["total"]), height=0.6)
        _whisker(ax, place, bar.adds, at)
        at += bar.adds.value
        ax.plot([at, at], [place, place + 1], color="grey", linewidth=0.6)
        names.append(f"{bar.label}  {_signed(bar.adds.value)}")
    ax.barh(len(names), at, color=COLOURS["total"], height=0.6)
    names.append(f"{METRIC} - 1  {_signed(at)}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.grid(axis="y", visible=False)
    for row, line in zip(budget.floor, (":", "--"), strict=False):
        if row.moves:
            label = f"floor: the trainer against {_floor_name(row)}"
            ax.axvline(row.moves.value - 1, color="black", linewidth=1, linestyle=line, label=label)
    if budget.floor:
        ax.legend(frameon=False, fontsize=8)
    ax.set_xlabel(f"added to {METRIC}, above 1")
    facts = budget.facts
    ax.set_title(f"{facts.experiment}, {facts.name}, step {facts.step + 2}: from trainer to engine, in order")


def _changes(ax: "Axes", budget: Budget) -> None:
    rows: list[Row] = [row for row in budget.rows if row.lowers is not None]
    for place, row in enumerate(rows):
        assert row.lowers is not None
        colour = COLOURS["fault"] if row.key == budget.cause else COLOURS["trainer"]
        ax.plot([row.lowers.value], [place], "o", color=colour, markersize=5)
        _whisker(ax, place, row.lowers, 0.0)
    ax.set_yticks(range(len(rows)), [row.label for row in rows])
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xscale("symlog", linthresh=max((budget.error.value - 1) / 10, 1e-6))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}" if value else "0")
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"{METRIC} lower by, with its interval; these do not add up")
    ax.set_title("One thing changed at a time")


def _whisker(ax: "Axes", place: float, estimate: Estimate, start: float) -> None:
    if estimate.low is not None and estimate.high is not None:
        ax.plot([start + estimate.low, start + estimate.high], [place, place], color="black", linewidth=1)


def _tokens(axes: Any, budget: Budget) -> None:
    by_position, by_probability, by_sequence = axes
    _bins(by_position, budget.positions, lambda each: f"{each.first:.0f}")
    by_position.set_xlabel("position in the completion, from (tokens)")
    by_position.set_ylabel("exp |difference| - 1: mean (bar), largest (mark)")
    _bins(by_probability, budget.probabilities, lambda each: f"{each.first:g}")
    by_probability.set_xlabel("probability of the token, from (tokens)")
    each = sorted((one.largest - 1 for one in budget.sequences), reverse=True)
    by_sequence.plot(each, "_", color="black", label="largest token")
    by_sequence.plot(
        sorted((one.mean - 1 for one in budget.sequences), reverse=True), ".", label="mean over tokens"
    )
    by_sequence.set_ylim(bottom=0)
    by_sequence.set_xlabel("sequences, each line in its own order")
    by_sequence.legend(frameon=False)
    for ax, title in zip(axes, ("By position", "By probability", "By sequence"), strict=True):
        ax.set_title(title)
        ax.grid(axis="x", visible=False)


def _bins(ax: "Axes", bins: Sequence[Bin], name: Callable[[Bin], str]) -> None:
    places = range(len(bins))
    ax.bar(places, [each.mean - 1 for each in bins], color=COLOURS["trainer"])
    ax.plot(places, [each.largest - 1 for each in bins], "_", color="black", markersize=10)
    ax.set_ylim(bottom=0)
    ax.set_xticks(places, [f"{name(each)}\n({each.num_tokens})" for each in bins], rotation=45)
