"""Figures of a comparison: functions draw on an `ax`; `metric_figure` and `overview` compose them.

A band is a picture, not a test: it is labelled as exactly what it is (±1 sd over seeds), and the paired
difference with its intervals stands below it.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from abrun.compare.buckets import bucket_indices, drawn
from abrun.compare.evidence import PrimaryResult
from abrun.compare.experiment import Experiment, Pair, Run, stack, stack_pairs
from abrun.compare.guards import largest, peak_memory, shared_memory_metrics, shared_peak_counter
from abrun.compare.metrics import (
    TOKEN_MULT_PROB_ERROR,
    default_transform,
    difference_unit,
    display_unit,
    reduced,
    transformed,
)
from abrun.equivalence import t_interval
from abrun.series import Array, Steps

# Okabe and Ito's colours, told apart by people with any colour vision; the baseline is always the first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARGIN_COLOR = "#F0E442"  # the palette's yellow, which no arm uses
NUM_WINDOWS = 8
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.framealpha": 0.8,
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    "text.parse_math": False,  # a metric may be called $x$
    "svg.hashsalt": "abrun",  # ids of an SVG are random otherwise
    "svg.fonttype": "none",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """What every figure is drawn and saved in."""
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a name's letters that the font does not have
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One arm's runs of a metric."""

    arm: str
    color: str
    steps: Steps  # [S]
    values: Array  # [R, S] one row a seed


def metric_figure(experiment: Experiment, metric: str, results: Sequence[PrimaryResult]) -> Figure | None:
    """One metric: bands of all arms, and below them a panel of paired differences for each treatment.

    `results` are the claims on this metric, of every arm. None where no pair has finished.
    """
    curves = arm_curves(experiment, metric)
    colors = {curve.arm: curve.color for curve in curves}
    arms = [arm for arm in experiment.treatments if arm in colors and _finished_pairs(experiment, arm)]
    if not arms:
        return None
    figure = Figure(figsize=(8, 3.4 + 2.4 * len(arms)), layout="constrained")
    axes = figure.subplots(1 + len(arms), 1, sharex=True, squeeze=False)[:, 0]
    windows = list(dict.fromkeys(result.steps for result in results if result.steps))
    bands(axes[0], curves, metric, windows)
    axes[0].set_title(f"{metric}, {experiment.name}")
    for ax, arm in zip(axes[1:], arms, strict=True):
        claims = [result for result in results if result.arm == arm]
        pairs = _finished_pairs(experiment, arm)
        steps, baseline, treatment = stack_pairs(pairs, metric)
        finite = np.isfinite(baseline).all(axis=0) & np.isfinite(treatment).all(axis=0)
        cut = finite.any() and paired_difference(
            ax, steps[finite], baseline[:, finite], treatment[:, finite], metric, claims, colors[arm]
        )
        note = "; bars are cut off at the edge" if cut else ""
        ax.set_title(f"{arm} - {experiment.baseline}, {len(pairs)} pair{'s' * (len(pairs) > 1)}{note}")
    axes[-1].set_xlabel("optimizer step")
    axes[-1].margins(x=0.02)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure)
    return figure


def _legend_below(figure: Figure) -> None:
    """What lines, bands and bars are, once for all panels; inside, it would hide some of them."""
    handles = {}
    for ax in figure.axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)


def _finished_pairs(experiment: Experiment, arm: str) -> list[Pair]:
    return [pair for pair in experiment.pairs(arm) if pair.finished]


def arm_curves(experiment: Experiment, metric: str) -> list[Curve]:
    """The finished runs of every arm that recorded the metric, each arm in its colour."""
    curves = []
    for index, arm in enumerate(experiment.arms):
        runs = [run for run in experiment.arm(arm).values() if run.finished and metric in run.metrics]
        steps, values = stack(runs, metric)
        if len(steps):
            curves.append(Curve(arm=arm, color=COLORS[index % len(COLORS)], steps=steps, values=values))
    return curves


def bands(ax: Axes, curves: Sequence[Curve], metric: str, windows: Sequence[tuple[int, int]] = ()) -> None:
    """Thin lines for seeds, a bold arm mean, shaded ±1 sd over seeds; the windows of claims are grey."""
    finite = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    unit, divisor = display_unit(metric, float(finite.max(initial=0)))
    for order, curve in enumerate(curves):
        values, color = curve.values / divisor, curve.color
        mean = values.mean(axis=0)
        style = "-" if order == 0 else (0, (5, 1.5))  # dashed on top: two equal curves are both seen
        label = f"{curve.arm}: mean of {len(values)} seed{'s' * (len(values) > 1)}"
        sd = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
        steps, rows = drawn(curve.steps, np.stack([mean, mean - sd, mean + sd, *values]))
        ax.plot(steps, rows[0], color=color, linewidth=2, linestyle=style, label=label, zorder=3 + order)
        if len(values) > 1:
            ax.plot(steps, rows[3:].T, color=color, linewidth=0.5, alpha=0.35)
            ax.fill_between(steps, rows[1], rows[2], color=color, alpha=0.16, linewidth=0)
    for first, last in windows:
        ax.axvspan(first - 0.5, last + 0.5, color="black", alpha=0.05, linewidth=0)
    ax.set_ylabel(f"{metric.split('/', 1)[-1]}{f' [{unit}]' if unit else ''}")
    if windows:
        ax.fill_between([], [], [], color="black", alpha=0.05, linewidth=0, label="grey: window of a claim")
    if any(bucket_indices(len(curve.steps)) is not None for curve in curves):
        ax.plot([], [], alpha=0, label="many steps: smallest and largest of a bucket")
    if any(len(curve.values) > 1 for curve in curves):
        ax.plot([], [], color="grey", linewidth=0.5, label="thin: one seed")
        ax.fill_between([], [], [], color="grey", alpha=0.25, linewidth=0, label="band: ±1 sd over seeds")


def paired_difference(
    ax: Axes,
    steps: Steps,  # [S]
    baseline: Array,  # [P, S]
    treatment: Array,  # [P, S]
    metric: str,
    claims: Sequence[PrimaryResult],
    color: str,
) -> bool:
    """Differences of the pairs over the run, and what was claimed of them; True where bars leave the panel.

    Eight windows with Bonferroni-t bars cover all true window means at once with 95 %. A claim is the margin
    zone over its own window, and at its end the 90 % interval that TOST compares with the margin.
    """
    transform = claims[0].transform if claims else default_transform(metric)
    left, right = transformed(baseline, transform, metric), transformed(treatment, transform, metric)
    parts = np.array_split(np.arange(len(steps)), min(NUM_WINDOWS, len(steps)))
    label = f"mean, Bonferroni-t: 95 % over all {len(parts)} windows"
    span = float(steps[-1] - steps[0])
    ax.axhline(0, color="black", linewidth=0.8)
    shown, bars = [0.0], []
    for part in parts:
        differences = reduced(right[:, part], metric) - reduced(left[:, part], metric)
        center = float(steps[part].mean())
        shown += differences.tolist()
        dots = np.full(len(differences), center - 0.008 * span)  # beside the bar, not under it
        ax.plot(dots, differences, ".", markersize=5, color=color, alpha=0.7, mew=0, label="one pair")
        if len(differences) > 1:
            low, high = t_interval(differences, 1 - 0.05 / len(parts))
            bars += [low, high]
            _bar(ax, center, low, high, color, 1.3, "_", label)
    for claim in claims:
        shown += _claim(ax, claim)
    # With two or three pairs a bar can be fifty times the margin: the panel shows pairs and claims, cut bars.
    low, high = min(shown), max(shown)
    room = 0.25 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)
    scale = difference_unit(transform).strip().removeprefix("(").removesuffix(")")
    ax.set_ylabel(scale.replace(" of", "\nof") if scale else f"{metric.split('/', 1)[-1]}\ndifference")
    return any(not low - room <= end <= high + room for end in bars)


def _claim(ax: Axes, claim: PrimaryResult) -> list[float]:
    """Draws a claim's margin zone and interval; returns what the panel must show of it."""
    if claim.steps is None or claim.margin is None:
        return []
    first, last, margin = claim.steps[0] - 0.5, claim.steps[1] + 0.5, claim.margin
    zone = Rectangle(
        (first, -margin),
        last - first,
        2 * margin,
        color=MARGIN_COLOR,
        alpha=0.35,
        label=f"margin {claim.margin_text}",
    )
    ax.add_patch(zone)
    if claim.ci90 is None:
        return [-margin, margin]
    _bar(ax, last, *claim.ci90, "black", 2.2, "D", "claim's window: mean, 90 % t interval (TOST)")
    return [-margin, margin, *claim.ci90]


def _bar(
    ax: Axes, x: float, low: float, high: float, color: str, width: float, marker: str, label: str
) -> None:
    ax.errorbar(
        [x],
        [(low + high) / 2],
        yerr=[(high - low) / 2],
        color=color,
        linewidth=width,
        capsize=3,
        capthick=width,
        marker=marker,
        markersize=5,
        label=label,
        zorder=4,
    )


def overview(experiment: Experiment, error_limit: float) -> Figure | None:
    """Trainer against engine log-probs, and peak memory: looked at whichever metrics were declared."""
    errors = arm_curves(experiment, TOKEN_MULT_PROB_ERROR)
    runs = [run for arm in experiment.arms for run in experiment.arm(arm).values() if run.finished]
    counter = shared_peak_counter(runs)
    num_panels = bool(errors) + (counter is not None)
    if not num_panels:
        return None
    figure = Figure(figsize=(5 * num_panels, 3.5), layout="constrained")
    axes = list(figure.subplots(1, num_panels, squeeze=False)[0])
    if errors:
        ax = axes.pop(0)
        bands(ax, errors, TOKEN_MULT_PROB_ERROR)
        error_line(ax, error_limit)
    if counter is not None:
        memory_bars(axes.pop(0), runs, experiment.arms, counter)
    _legend_below(figure)
    return figure


def error_line(ax: Axes, limit: float) -> None:
    ax.axhline(limit, color="black", linewidth=1, linestyle=":")
    ax.annotate(
        f"guard: {limit:g}",
        (1, limit),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    ax.set_title("trainer against rollout engine")
    ax.set_xlabel("optimizer step")


def memory_bars(ax: Axes, runs: Sequence[Run], arms: Sequence[str], counter: str) -> None:
    """Peaks by phase and overall, the mean over the seeds of an arm; an arm without a run keeps its place."""
    phases = shared_memory_metrics(runs, counter)
    rows = [[peak_memory(run, counter), *(largest(run, phase) for phase in phases)] for run in runs]
    unit, divisor = display_unit(counter, float(np.max(rows)))
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        of_arm = [row for row, run in zip(rows, runs, strict=True) if run.name.arm == arm]
        if of_arm:
            x = np.arange(1 + len(phases)) + (index - (len(arms) - 1) / 2) * width
            peaks = np.mean(of_arm, axis=0) / divisor
            bars = ax.bar(x, peaks, width * 0.92, color=COLORS[index % len(COLORS)], label=arm)
            ax.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    names = ["overall", *(phase.split("/")[1].replace("_", "\n") for phase in phases)]
    ax.set_xticks(np.arange(len(names)), names)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(f"{counter.removesuffix('_bytes').replace('_', ' ')} [{unit}]")
    ax.set_title("peak memory by phase, mean over seeds")
    ax.margins(y=0.15)
