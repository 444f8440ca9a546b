"""Figures of panels. `draw_metric` and `draw_forest` make figures, the other functions draw on an `ax`."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.numbers import count_text, interval_level_text
from abrun.report.panels import (
    NUM_BUCKETS,
    Curve,
    Difference,
    Panel,
    average_in_buckets,
    bucket_indices,
    make_panel,
)
from abrun.report.present.figures import COLORS, add_legend_below, shorten
from abrun.verdict.results import ClaimResult, ClaimTerms

WIDTH_INCHES, PANEL_INCHES = 8.0, 2.4  # width of a figure, height of a panel
LEGEND_COLUMN_CHARS = 54  # longest label of a two-column legend
LABEL_GAP = 0.085  # between labels at the ends of lines, as a share of the panel's height
MARGIN_COLOR = "#F0E442"  # the palette's yellow, used for no arm
WINDOW_COLOR = "#a0a6ad"  # intervals by which nothing is tested


def draw_metric(experiment: RecordedExperiment, metric: str, claims: Sequence[ClaimResult]) -> Figure | None:
    """Draw one metric: bands of all arms, and below them the differences that the claims are about.

    `claims` are those on this metric, of all arms. Return None if no pair has finished.
    """
    panel = make_panel(experiment, metric, claims)
    return _draw_panel(panel, experiment, PANEL_INCHES) if panel.curves and panel.differences else None


def draw_band(experiment: RecordedExperiment, metric: str, window: tuple[int, int]) -> Figure | None:
    """Draw one metric without a test: the band of each arm. Return None if no run recorded it."""
    panel = replace(make_panel(experiment, metric, []), windows=(window,))
    return _draw_panel(panel, experiment, 1.5 * PANEL_INCHES) if panel.curves else None


def _draw_panel(panel: Panel, experiment: RecordedExperiment, inches: float) -> Figure:
    num_axes = 1 + len(panel.differences)
    figure = Figure(figsize=(WIDTH_INCHES, inches * num_axes), layout="constrained")
    axes = figure.subplots(num_axes, 1, sharex=True, squeeze=False)[:, 0]
    draw_bands(axes[0], panel)
    add_direct_labels(axes[0], panel)
    axes[0].set_title(_wrap_title(f"{panel.metric}, {shorten(experiment.name, 60)}"))
    for ax, difference in zip(axes[1:], panel.differences, strict=True):
        note = "; bars cut off at the edge" if draw_paired_difference(ax, difference, panel.metric) else ""
        arms_text = f"{shorten(difference.arm, 60)} minus {experiment.baseline}"
        size = count_text(difference.num_pairs, "pair")
        if difference.num_runs is not None:
            size = f"unpaired: {difference.num_runs[0]} and {difference.num_runs[1]} runs, Welch"
        ax.set_title(_wrap_title(f"{arms_text}, {size}{note}"))
    axes[-1].set_xlabel("optimizer step")
    axes[-1].margins(x=0.02)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    # One legend for all panels, outside of them so that it hides nothing
    handles = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    add_legend_below(figure, handles, 2 if max(map(len, handles), default=0) <= LEGEND_COLUMN_CHARS else 1)
    return figure


def draw_forest(experiment: RecordedExperiment, claims: Sequence[ClaimResult]) -> Figure | None:
    """Draw the confidence interval of each claim in units of its margin; None if fewer than two have both."""
    scaled = [
        (claim, np.divide(interval, margin))
        for claim in claims
        if (margin := claim.claim.margin) and (interval := claim.estimate.interval)
    ]
    scaled = [(claim, ends) for claim, ends in scaled if np.isfinite(ends).all()]
    if len(scaled) < 2:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 1.25 + 0.42 * len(scaled)), layout="constrained")
    ax = figure.subplots()
    reach = float(np.clip(1.1 * np.abs([ends for _, ends in scaled]).max(), 1.3, 4))
    all_within = all(claim.claim.kind == "within" for claim, _ in scaled)
    if all_within:
        ax.axvspan(-1, 1, color=MARGIN_COLOR, alpha=0.35, linewidth=0)
    ax.axvline(0, color="black", linewidth=0.8)
    names = []
    for row, (claim, (low, high)) in enumerate(scaled):
        if not all_within:
            _draw_accepted(ax, claim.claim, row, reach)
        color = COLORS[experiment.arms.index(claim.arm) % len(COLORS)]
        ax.plot([low, high], [row, row], color=color, linewidth=2, marker="|", markersize=9)
        ax.plot([(low + high) / 2], [row], "D", color=color, markersize=5)
        ax.annotate(claim.result, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        arm_text = f"{shorten(claim.arm, 28)}: " if len(experiment.treatments) > 1 else ""
        names.append(f"{arm_text}{shorten(claim.claim.metric, 28)}\n{claim.claim.margin_text}")
    ax.set_yticks(range(len(scaled)), names)
    ax.set_ylim(len(scaled) - 0.5, -0.5)
    ax.set_xlim(-reach, reach)
    treatment = shorten(experiment.treatments[0], 40) if len(experiment.treatments) == 1 else "treatment"
    units = "in units of the claim's margin:\nmean and interval"
    ax.set_xlabel(f"{treatment} minus {experiment.baseline}, {units}")
    ax.grid(axis="y", visible=False)
    return figure


def _draw_accepted(ax: Axes, terms: ClaimTerms, row: int, reach: float) -> None:
    """Draw the differences that a claim accepts behind its row, in units of its margin."""
    if terms.accepted is None or not terms.margin:
        return
    low, high = terms.accepted
    start = -reach if low is None else low / terms.margin
    stop = reach if high is None else high / terms.margin
    ax.fill_between([start, stop], row - 0.45, row + 0.45, color=MARGIN_COLOR, alpha=0.35, linewidth=0)


def _axis_name(metric: str) -> str:
    """Return a short name for an axis; the title has the full one."""
    return shorten(metric.split("/", 1)[-1], 24)


def _wrap_title(title: str) -> str:
    return textwrap.fill(title, 76, break_on_hyphens=False)


def draw_bands(ax: Axes, panel: Panel) -> None:
    """Draw thin lines for seeds, a bold mean, a ±1 sd band over seeds, and grey windows of claims.

    Long runs are drawn as bucket means without seeds; the page has those.
    """
    is_bucketed = bucket_indices(len(panel.steps)) is not None
    for order, curve in enumerate(panel.curves):
        color = COLORS[curve.index % len(COLORS)]
        for seed in curve.seeds if len(curve.seeds) > 1 and not is_bucketed else ():
            style = "-" if seed.finished else ":"
            ax.plot(seed.steps, seed.values, color=color, linewidth=0.5, linestyle=style, alpha=0.35)
        if len(curve.steps):
            _draw_mean_and_band(ax, curve, color, order)
    for first_step, last_step in panel.windows:
        ax.axvspan(first_step - 0.5, last_step + 0.5, color="black", alpha=0.05, linewidth=0)
    ax.set_ylabel(f"{_axis_name(panel.metric)}{f' [{panel.unit}]' if panel.unit else ''}")
    if panel.windows:
        place = "it" if len(panel.windows) == 1 else "the last"
        label = f"grey: window of a claim or level; numbers: means in {place}"
        ax.fill_between([], [], [], color="black", alpha=0.05, linewidth=0, label=label)
    if is_bucketed:
        ax.plot([], [], alpha=0, label=f"many steps: means of {NUM_BUCKETS} buckets, no seeds")
    elif any(len(curve.seeds) > 1 for curve in panel.curves):
        num_drawn, num_seeds = max((len(curve.seeds), curve.num_seeds) for curve in panel.curves)
        drawn = f" ({num_drawn} of {num_seeds} are drawn)" * (num_drawn < num_seeds)
        ax.plot([], [], color="grey", linewidth=0.5, label=f"thin: one seed{drawn}")
    if any(curve.sd is not None for curve in panel.curves):
        ax.fill_between([], [], [], color="grey", alpha=0.25, linewidth=0, label="band: ±1 sd over seeds")


def add_direct_labels(ax: Axes, panel: Panel) -> None:
    """Write each arm's name at the end of its mean, with its level in the last claim's window.

    Call this last: it fixes the range of the axis.
    """
    ends = []
    for curve in panel.curves:
        finite_indices = np.flatnonzero(np.isfinite(curve.mean))
        if len(finite_indices):
            ends.append((float(curve.mean[finite_indices[-1]]), curve))
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    ends.sort(key=lambda end_and_curve: end_and_curve[0])
    heights = _separate_labels([(end - low) / (high - low) for end, _ in ends])
    for height, (_, curve) in zip(heights, ends, strict=True):
        text = shorten(curve.arm, 24)
        if panel.windows:
            first_step, last_step = panel.windows[-1]
            window_means = curve.mean[(first_step <= curve.steps) & (curve.steps <= last_step)]
            text += f" {window_means.mean():.4g}" if len(window_means) else ""
        color = COLORS[curve.index % len(COLORS)]
        ax.annotate(text, (1.01, height), xycoords="axes fraction", color=color, va="center", fontsize=8)


def _separate_labels(heights: Sequence[float]) -> list[float]:
    """Move ascending label heights as little as needed to keep them apart and within the axis (0 to 1)."""
    if not len(heights):
        return []
    gaps = LABEL_GAP * np.arange(len(heights))
    separated = np.maximum.accumulate(np.array(heights) - gaps) + gaps
    shift = np.clip((separated - heights).mean(), separated[-1] - 0.97, separated[0] - 0.03)
    return (separated - shift).tolist()


def _draw_mean_and_band(ax: Axes, curve: Curve, color: str, order: int) -> None:
    # Later arms are dashed, so that of two equal curves both are visible.
    style = "-" if order == 0 else (0, (5, 1.5))
    label = f"{shorten(curve.arm, 60)}: mean of {curve.count} seed{'s' * (curve.count > 1)}"
    sd = np.zeros_like(curve.mean) if curve.sd is None else curve.sd
    rows = np.stack([curve.mean, curve.mean - sd, curve.mean + sd])
    steps, (mean, low, high) = average_in_buckets(curve.steps, rows)
    ax.plot(steps, mean, color=color, linewidth=2, linestyle=style, label=label, zorder=3 + order)
    if curve.sd is not None:
        ax.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)


def draw_paired_difference(ax: Axes, difference: Difference, metric: str) -> bool:
    """Draw windows of paired differences and the claims on them; return True if bars leave the panel.

    The windows' Bonferroni-t bars cover all true window means at once with 95 %. A claim is the margin zone
    over its own window, and at its end the interval that is compared with the margin.
    """
    color, windows = COLORS[difference.index % len(COLORS)], difference.windows
    label = f"grey: simultaneous 95 % over {len(windows)} windows, not tested"
    span = float(windows[-1].steps[1] - windows[0].steps[0]) if windows else 0.0
    ax.axhline(0, color="black", linewidth=0.8)
    visible_values, interval_ends = [0.0], []
    for window in windows:
        center = sum(window.steps) / 2
        visible_values += window.pairs.tolist()
        # Draw dots beside the bar, which would cover them.
        dots = np.full(len(window.pairs), center - 0.008 * span)
        ax.plot(dots, window.pairs, ".", markersize=5, color=color, alpha=0.7, mew=0, label="one pair")
        if window.interval:
            interval_ends += window.interval
            _draw_interval(ax, center, *window.interval, WINDOW_COLOR, 0.8, "", label)
    if difference.num_runs is not None and len(difference.steps):
        means = np.where(np.isfinite(difference.mean), difference.mean, np.nan)
        ax.plot(difference.steps, means, color=color, linewidth=0.8, label="difference of the arms' means")
        if np.isfinite(means).any():
            visible_values += np.quantile(means[np.isfinite(means)], [0.02, 0.98]).tolist()
    for claim in difference.claims:
        visible_values += _draw_claim(ax, claim)
    # With two or three pairs a bar can be fifty times the margin, so bars may be cut off at the edge.
    low, high = min(visible_values), max(visible_values)
    room = 0.25 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)
    scale = difference.scale
    ax.set_ylabel(scale.replace(" of", "\nof") if scale else f"{_axis_name(metric)}\ndifference")
    return any(not low - room <= end <= high + room for end in interval_ends)


def _draw_claim(ax: Axes, claim: ClaimResult) -> list[float]:
    """Draw the margin zone and interval of a claim; return the values that must stay visible."""
    terms, interval = claim.claim, claim.estimate.interval
    assert terms.steps and terms.accepted
    left_edge, right_edge = terms.steps[0] - 0.5, terms.steps[1] + 0.5
    ends = [end for end in terms.accepted if end is not None]
    # An open end lies outside the axis
    reach = 100 * max(np.abs([*ends, *(interval or ()), 1e-300]))
    low, high = terms.accepted
    low, high = -reach if low is None else low, reach if high is None else high
    label = f"{'margin' if len(ends) == 2 else 'claimed:'} {terms.margin_text}"
    width, height = right_edge - left_edge, high - low
    ax.add_patch(Rectangle((left_edge, low), width, height, color=MARGIN_COLOR, alpha=0.35, label=label))
    if interval is None:
        return ends
    label = f"claim: mean, {interval_level_text(terms.alpha)} CI{' (TOST)' * (len(ends) == 2)}"
    _draw_interval(ax, right_edge, *interval, "black", 2.2, "D", label)
    return [*ends, *interval]


def _draw_interval(
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
        zorder=4 if marker else 2,
    )
