"""Panels as figures: functions draw on an `ax`; `metric_figure` composes them."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from abrun.present.figures import COLORS, legend_below, short
from abrun.recorded.experiment import RecordedExperiment
from abrun.report.buckets import NUM_BUCKETS, averaged, bucket_indices
from abrun.report.panels import ClaimPanel, Curve, Difference, Panel, panel
from abrun.verdict.claims import ClaimResult

WIDTH, PANEL = 8.0, 2.4  # inches, of a figure and of the height of a panel of curves
LEGEND_COLUMN = 54  # characters that leave room for a second column
LABEL_GAP = 0.085  # of a panel's height, between names at the ends of its lines
MARGIN_COLOR = "#F0E442"  # the palette's yellow, which no arm uses


def metric_figure(
    experiment: RecordedExperiment, metric: str, claims: Sequence[ClaimResult]
) -> Figure | None:
    """One metric: bands of all arms, and below them the paired differences that claims are about.

    `claims` are those on this metric, of every arm. None where no pair has finished.
    """
    shown = panel(experiment, metric, claims)
    if not shown.curves or not shown.differences:
        return None
    below = shown.differences
    figure = Figure(figsize=(WIDTH, PANEL * (1 + len(below))), layout="constrained")
    axes = figure.subplots(1 + len(below), 1, sharex=True, squeeze=False)[:, 0]
    bands(axes[0], shown)
    direct_labels(axes[0], shown)
    axes[0].set_title(_wrapped(f"{metric}, {short(experiment.name, 60)}"))
    for ax, difference in zip(axes[1:], below, strict=True):
        note = "; bars are cut off at the edge" if paired_difference(ax, difference, metric) else ""
        arms = f"{short(difference.arm, 60)} - {experiment.baseline}"
        ax.set_title(_wrapped(f"{arms}, {_sample(difference)}{note}"))
    axes[-1].set_xlabel("optimizer step")
    axes[-1].margins(x=0.02)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure)
    return figure


def _sample(difference: Difference) -> str:
    if difference.num_runs is not None:
        return f"unpaired: {difference.num_runs[0]} and {difference.num_runs[1]} runs, Welch"
    return f"{difference.num_pairs} pair{'s' * (difference.num_pairs != 1)}"


def forest(experiment: RecordedExperiment, claims: Sequence[ClaimResult]) -> Figure | None:
    """Every claim's interval in units of its own margin, on one axis; None for fewer than two such claims."""
    shown = [claim for claim in claims if claim.claim.margin and claim.estimate.interval]
    shown = [one for one in shown if np.isfinite(np.divide(one.estimate.interval, one.claim.margin)).all()]
    if len(shown) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 1.25 + 0.42 * len(shown)), layout="constrained")
    ax = figure.subplots()
    ends = np.array([claim.estimate.interval for claim in shown]) / np.array(
        [[claim.claim.margin] for claim in shown]
    )
    reach = float(np.clip(1.1 * np.abs(ends).max(), 1.3, 4))
    ax.axvspan(-1, 1, color=MARGIN_COLOR, alpha=0.35, linewidth=0)
    ax.axvline(0, color="black", linewidth=0.8)
    names = []
    for row, (claim, (low, high)) in enumerate(zip(shown, ends, strict=True)):
        color = COLORS[experiment.arms.index(claim.arm) % len(COLORS)]
        ax.plot([low, high], [row, row], color=color, linewidth=2, marker="|", markersize=9)
        ax.plot([(low + high) / 2], [row], "D", color=color, markersize=5)
        ax.annotate(
            claim.result,
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
        arm = f"{short(claim.arm, 28)}: " if len(experiment.treatments) > 1 else ""
        names.append(f"{arm}{short(claim.claim.metric, 28)}\n{claim.claim.margin_text}")
    ax.set_yticks(range(len(shown)), names)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlim(-reach, reach)
    ax.set_xlabel("treatment - baseline, in margins of the claim:\nmean and interval")
    ax.grid(axis="y", visible=False)
    return figure


def _legend_below(figure: Figure) -> None:
    """What lines, bands and bars are, once for all panels; inside, it would hide some of them."""
    handles = {}
    for ax in figure.axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    legend_below(figure, handles, 2 if max(map(len, handles), default=0) <= LEGEND_COLUMN else 1)


def _plain(metric: str) -> str:
    """Beside an axis, whose title has the whole of it."""
    return short(metric.split("/", 1)[-1], 24)


def _wrapped(title: str) -> str:
    return textwrap.fill(title, 76, break_on_hyphens=False)


def bands(ax: Axes, shown: Panel) -> None:
    """Thin lines for seeds, a bold arm mean, shaded ±1 sd over seeds; the windows of claims are grey.

    Of many steps means over buckets are drawn, and no seeds: what each did is on the page.
    """
    long = bucket_indices(len(shown.steps)) is not None
    for order, curve in enumerate(shown.curves):
        color = COLORS[curve.index % len(COLORS)]
        for seed in curve.seeds if len(curve.seeds) > 1 and not long else ():
            style = "-" if seed.finished else ":"
            ax.plot(seed.steps, seed.values, color=color, linewidth=0.5, linestyle=style, alpha=0.35)
        if len(curve.steps):
            _mean_and_band(ax, curve, color, order)
    for first, last in shown.windows:
        ax.axvspan(first - 0.5, last + 0.5, color="black", alpha=0.05, linewidth=0)
    ax.set_ylabel(f"{_plain(shown.metric)}{f' [{shown.unit}]' if shown.unit else ''}")
    if shown.windows:
        ax.fill_between([], [], [], color="black", alpha=0.05, linewidth=0, label="grey: window of a claim")
    if long:
        ax.plot([], [], alpha=0, label=f"many steps: means of {NUM_BUCKETS} buckets, no seeds")
    elif any(len(curve.seeds) > 1 for curve in shown.curves):
        ax.plot([], [], color="grey", linewidth=0.5, label=_thin(shown))
    if any(curve.sd is not None for curve in shown.curves):
        ax.fill_between([], [], [], color="grey", alpha=0.25, linewidth=0, label="band: ±1 sd over seeds")


def direct_labels(ax: Axes, shown: Panel) -> None:
    """Each arm's name beside the end of its mean, with its level over the last claim's window.

    Drawn last: the axis keeps the range that it has now.
    """
    ends = []
    for curve in shown.curves:
        known = np.flatnonzero(np.isfinite(curve.mean))
        if len(known):
            ends.append((float(curve.mean[known[-1]]), curve))
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    ends.sort(key=lambda one: one[0])
    for place, (_, curve) in zip(_apart([(end - low) / (high - low) for end, _ in ends]), ends, strict=True):
        text = short(curve.arm, 24)  # the legend has more of it
        if shown.windows:
            first, last = shown.windows[-1]
            inside = curve.mean[(first <= curve.steps) & (curve.steps <= last)]
            text += f" {inside.mean():.3g}" if len(inside) else ""
        color = COLORS[curve.index % len(COLORS)]
        ax.annotate(text, (1.01, place), xycoords="axes fraction", color=color, va="center", fontsize=8)
    if shown.windows:
        ax.plot([], [], alpha=0, label="numbers: arm means over the window of the last claim")


def _apart(places: Sequence[float]) -> list[float]:
    """Ascending places of labels on an axis from 0 to 1, moved as little as keeps them on it and apart."""
    if not len(places):
        return []
    gaps = LABEL_GAP * np.arange(len(places))
    spread = np.maximum.accumulate(np.array(places) - gaps) + gaps
    return (spread - np.clip((spread - places).mean(), spread[-1] - 0.97, spread[0] - 0.03)).tolist()


def _thin(shown: Panel) -> str:
    drawn, there = max((len(curve.seeds), curve.num_seeds) for curve in shown.curves)
    return "thin: one seed" if drawn == there else f"thin: one seed ({drawn} of {there} are drawn)"


def _mean_and_band(ax: Axes, curve: Curve, color: str, order: int) -> None:
    style = "-" if order == 0 else (0, (5, 1.5))  # dashed on top: two equal curves are both seen
    label = f"{short(curve.arm, 60)}: mean of {curve.count} seed{'s' * (curve.count > 1)}"
    sd = np.zeros_like(curve.mean) if curve.sd is None else curve.sd
    steps, (mean, low, high) = averaged(curve.steps, np.stack([curve.mean, curve.mean - sd, curve.mean + sd]))
    ax.plot(steps, mean, color=color, linewidth=2, linestyle=style, label=label, zorder=3 + order)
    if curve.sd is not None:
        ax.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)


def paired_difference(ax: Axes, difference: Difference, metric: str) -> bool:
    """Windows of paired differences, and what was claimed of them; True where bars leave the panel.

    The windows' Bonferroni-t bars cover all true window means at once with 95 %. A claim is the margin zone
    over its own window, and at its end the interval that is compared with the margin.
    """
    color, windows = COLORS[difference.index % len(COLORS)], difference.windows
    label = f"mean, Bonferroni-t: 95 % over all {len(windows)} windows"
    span = float(windows[-1].steps[1] - windows[0].steps[0]) if windows else 0.0
    ax.axhline(0, color="black", linewidth=0.8)
    shown, bars = [0.0], []
    for window in windows:
        center = sum(window.steps) / 2
        shown += window.pairs.tolist()
        dots = np.full(len(window.pairs), center - 0.008 * span)  # beside the bar, not under it
        ax.plot(dots, window.pairs, ".", markersize=5, color=color, alpha=0.7, mew=0, label="one pair")
        if window.interval:
            bars += window.interval
            _bar(ax, center, *window.interval, color, 1.3, "_", label)
    if difference.num_runs is not None and len(difference.steps):
        means = np.where(np.isfinite(difference.mean), difference.mean, np.nan)
        ax.plot(difference.steps, means, color=color, linewidth=0.8, label="difference of the arms' means")
        shown += (
            np.quantile(means[np.isfinite(means)], [0.02, 0.98]).tolist() if np.isfinite(means).any() else []
        )
    for claim in difference.claims:
        shown += _claim(ax, claim)
    # With two or three pairs a bar can be fifty times the margin: the panel shows pairs and claims, cut bars.
    low, high = min(shown), max(shown)
    room = 0.25 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)
    scale = difference.scale
    ax.set_ylabel(scale.replace(" of", "\nof") if scale else f"{_plain(metric)}\ndifference")
    return any(not low - room <= end <= high + room for end in bars)


def _claim(ax: Axes, claim: ClaimPanel) -> list[float]:
    """Draws a claim's margin zone and interval; returns what the panel must show of it."""
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
    if claim.interval is None:
        return [-margin, margin]
    label = f"claim's window: mean, {100 * claim.level:.3g} % t interval (TOST)"
    _bar(ax, last, *claim.interval, "black", 2.2, "D", label)
    return [-margin, margin, *claim.interval]


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
