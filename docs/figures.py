"""Generator of the figures in docs/images/: the same version of matplotlib writes the same bytes.

python docs/figures.py                    # all, from the repository; memory and error rates take minutes
python docs/figures.py power verdicts     # only these
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import abrun
from abrun.api import COLORS as VERDICT_COLORS
from abrun.api.demo import DemoVerdict, render_demo, run_demo
from abrun.messages.numbers import difference_text
from abrun.report.present.figures import COLORS, figure_style, save_figure
from abrun.report.present.terminal import Terminal
from abrun.stats.power import find_min_pairs, power_at, sd_of_difference, welch_dof_per_run
from abrun.verdict.evidence import select_evidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
INK, PALE, LINE = "#24292f", "#57606a", "#8c959f"
FAILS = "#cf222e"
WIDTH = 7.4  # inches
MONO = {"family": "monospace", "fontsize": 8}


# --- curves and their verdicts ---


def draw_overlay() -> "Figure":
    """Draw rewards of two of the demo's experiments, in bold those of the seed that differs most."""
    with tempfile.TemporaryDirectory() as folder:
        verdicts = run_demo(Path(folder))[1:]
        experiments = [abrun.load(str(verdict.directory)).recorded for verdict in verdicts]
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 3), layout="constrained")
    for ax, verdict, experiment in zip(axes, verdicts, experiments, strict=True):
        for arm, color in zip(experiment.arms, COLORS, strict=False):
            for seed, run in experiment.arm(arm).items():
                series, is_bold = run.series("train/reward"), seed == verdict.seed
                look = {"linewidth": 1.8, "label": f"{arm}, seed {seed}"} if is_bold else {"linewidth": 0.8}
                ax.plot(series.steps, series.values, color=color, alpha=1 if is_bold else 0.25, **look)
        name = verdict.comparison.verdict
        ax.set_title(name, color=VERDICT_COLORS[name], fontsize=11)
        ax.set_xlabel(f"step\n\n{_caption(verdict)}", fontsize=9)
        ax.set_ylim(0, 1)
        ax.legend(loc="lower right" if ax is axes[0] else "lower left", fontsize=8)
    axes[0].set_ylabel("reward")
    return figure


def _caption(verdict: DemoVerdict) -> str:
    """Return the difference, and what decided: a step-one check that fails, or too few seeds."""
    content = verdict.comparison.content
    claim = content.claims[0]
    assert claim.estimate.mean_difference is not None and claim.estimate.interval is not None
    difference = difference_text(claim.estimate.mean_difference, claim.estimate.interval)
    text = f"difference {difference}, margin {claim.claim.margin_text}\n"
    for check in select_evidence(content.evidence, "step one"):
        if check.result == "fail":
            levels = f"{check['treatment']:.3g} instead of {check['baseline']:.3g}"
            step_one = f"at step 1 of seed {check['seed']}, {check['metric']} is"
            return f"{text}a bug: {step_one}\n{levels} on the same completions"
    return (
        f"{text}seed noise: both arms are equal; {claim.power.pairs_needed} seeds\nwould show it (80 % power)"
    )


# --- the four verdicts ---


def draw_verdicts() -> "Figure":
    """Draw the interval of a difference against its margin, for each verdict."""
    rows = [
        ("MATCH", (-0.55, 0.4), "inside the margin"),
        ("MATCH", (-0.75, -0.25), "inside the margin, yet below 0: the report states the loss"),
        ("INCONCLUSIVE", (-1.4, 0.1), "crosses the margin: the report says how many pairs would do"),
        ("MISMATCH", (-2.1, -1.25), "beyond the margin"),
        ("INVALID", None, "not comparable, such as unfinished or copied runs: not tested"),
    ]
    figure, ax = pyplot.subplots(figsize=(WIDTH, 2.7), layout="constrained")
    ax.axvspan(-1, 1, color="#dafbe1", zorder=0)
    ax.axvline(0, color=LINE, linewidth=0.8, zorder=1)
    for row, (verdict, interval, text) in enumerate(rows):
        color = VERDICT_COLORS[verdict]
        if interval is None:
            ax.plot([-1.6, 0.6], [row, row], color=color, linewidth=1.2, linestyle=(0, (1, 3)))
        else:
            ax.plot(interval, [row, row], color=color, linewidth=3, solid_capstyle="butt")
            ax.plot([sum(interval) / 2], [row], "o", color=color, markersize=6)
        ax.text(-2.5, row, verdict, color=color, weight="bold", ha="right", va="center")
        ax.text(1.25, row, text, color=INK, va="center", fontsize=8.5)
    ax.set(xlim=(-3.6, 5.4), ylim=(len(rows) - 0.5, -0.6), yticks=[])
    ax.set_xticks([-1, 0, 1], ["-margin", "0", "+margin"])
    ax.set_xlabel("90 % interval of the difference, treatment minus baseline", x=0.4, fontsize=8.5)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return figure


# --- power ---


def draw_power() -> "Figure":
    """Draw the chance of a MATCH for equal arms by the number of seeds, paired and unpaired."""
    sigma, margin = 0.02, 0.03
    counts = list(range(2, 17))
    designs = [
        (f"paired, correlation {correlation}", sd_of_difference(sigma, correlation), 1.0, color)
        for correlation, color in ((0.8, COLORS[0]), (0.5, COLORS[2]), (0.2, COLORS[4]))
    ]
    designs.append(("unpaired", sd_of_difference(sigma, 0), welch_dof_per_run((sigma, sigma)), COLORS[1]))
    figure, ax = pyplot.subplots(figsize=(WIDTH, 3.1), layout="constrained")
    for name, sd, dof, color in designs:

        def power(count: int, sd: float = sd, dof: float = dof) -> float:
            return power_at(margin, sd, count, dof_per_pair=dof)

        needed = find_min_pairs(power, 0.8)
        assert needed is not None
        style = "--" if name == "unpaired" else "-"
        label = f"{name}: {needed} seeds for 80 %"
        ax.plot(counts, [power(count) for count in counts], style, color=color, linewidth=1.8, label=label)
        ax.plot([needed], [power(needed)], "o", color=color, markersize=5)
    ax.axhline(0.8, color=LINE, linewidth=0.8, linestyle=":")
    ax.set(xlabel="seeds of each arm", ylabel="chance of a MATCH", xlim=(2, 16), ylim=(0, 1.02))
    ax.set_title(f"Equal arms, margin ±{margin}, sd over seeds {sigma}, alpha 0.05")
    ax.legend(loc="lower right")
    return figure


# --- error rates ---


def draw_error_rates() -> "Figure":
    """Draw the simulated error rates of claims at the edge of their margin, over 3 to 10 pairs."""
    from tests.bench.bench_verdict import LAWS, rates

    kinds = {
        "match, absolute margin": "false match",
        "mismatch, absolute margin": "false mismatch",
        "limit claimed": "limit falsely kept",
        "limit called broken": "limit falsely broken",
    }
    rates_by_law = {name: rates(law) for name, law in LAWS.items()}
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(WIDTH + 1, 3.1), sharey=True, layout="constrained")
    lowest, tolerated = 5e-4, 0.075
    for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
        for row, name in enumerate(rates_by_law):
            low, high = (
                max(end, lowest) for end in (min(rates_by_law[name][kind]), max(rates_by_law[name][kind]))
            )
            color = FAILS if high > tolerated else COLORS[0]
            ax.plot([low, high], [row, row], color=color, linewidth=2.5, solid_capstyle="round")
            ax.plot([low, high], [row, row], "o", color=color, markersize=4)
            if high > tolerated:
                ax.annotate(
                    f"{high:.2f}",
                    (high, row),
                    (0, 5),
                    textcoords="offset points",
                    color=color,
                    fontsize=7.5,
                    ha="center",
                )
        ax.axvline(0.05, color=INK, linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlim=(lowest / 1.4, 1.2), ylim=(len(rates_by_law) - 0.5, -0.7))
        ax.set_xticks([0.001, 0.01, 0.05, 0.5], ["0.001", "0.01", "0.05", "0.5"], fontsize=7.5)
        ax.minorticks_off()
        ax.set_title(title, fontsize=9)
    axes[0].set_yticks(range(len(rates_by_law)), [name.replace(" .8", " 0.8") for name in rates_by_law])
    figure.supxlabel(
        f"error rate, range over 3 to 10 pairs; nominal 0.05 dotted; red: above {tolerated}", fontsize=8.5
    )
    return figure


# --- diagrams ---


def draw_pipeline() -> "Figure":
    """Draw the path from a recipe, or from existing logs, to the report."""
    boxes = [
        ("recipe", ["arms, seeds, claim", "with its margin"], COLORS[0]),
        ("launch", ["a process for each run;", "pairs share prompts,", "weights and seeds"], COLORS[0]),
        ("runs", ["metrics, completions,", "environment of each", "arm and seed"], COLORS[0]),
        (
            "verdict",
            ["validity, step one,", "guards, equivalence", "tests over pairs"],
            VERDICT_COLORS["MATCH"],
        ),
        ("report", ["report.html", "report.md", "verdict.json"], VERDICT_COLORS["MATCH"]),
    ]
    figure, ax = _canvas(WIDTH + 1, 2.15, (0, 100), (0, 26))
    width, step = 16.5, 20.5
    for index, (title, lines, color) in enumerate(boxes):
        x = 0.7 + index * step
        _box(ax, (x, 11), (width, 13.5), color)
        ax.text(x + width / 2, 21.7, title, ha="center", va="center", weight="bold", color=color, fontsize=10)
        for number, line in enumerate(lines):
            ax.text(
                x + width / 2, 18.4 - 2.6 * number, line, ha="center", va="center", fontsize=7.8, color=INK
            )
        if index:
            _arrow(ax, (x - step + width + 0.3, 17.8), (x - 0.3, 17.8))
    for index, command in ((1, "abrun launch"), (3, "abrun compare")):
        ax.text(0.7 + index * step + width / 2, 9.2, command, ha="center", va="center", color=PALE, **MONO)
    x = 0.7 + 2 * step
    _box(ax, (x - 7, 0.8), (width + 14, 5.2), COLORS[4])
    ax.text(
        x + width / 2,
        3.4,
        "your logs: wandb, TensorBoard, CSV, JSON",
        ha="center",
        va="center",
        fontsize=7.8,
        color=INK,
    )
    _arrow(
        ax, (x + width + 7.3, 3.4), (0.7 + 3 * step + width / 2, 7.6), bend="angle,angleA=0,angleB=90,rad=3"
    )
    return figure


def draw_grpo_step() -> "Figure":
    """Draw one GRPO step as a flow of named tensors with their shapes."""
    stages: list[tuple[str, str, list[tuple[str, str]]]] = [
        (
            "rollouts",
            "engine samples, verifier scores",
            [
                ("token_ids", "[B, S] int64"),
                ("token_mask", "[B, S] bool"),
                ("inference_logprobs", "[B, S] float32"),
                ("rewards", "[B] float32"),
            ],
        ),
        (
            "score",
            "passes without gradient",
            [
                ("old_logprobs", "[B, S] float32"),
                ("reference_logprobs", "[B, S] float32"),
                ("importance_weights", "[B, S] float32"),
                ("loss_weights", "[B, S] float64"),
            ],
        ),
        ("advantages", "rewards minus the group's mean", [("advantages", "[B, S] float32")]),
        (
            "forward",
            "for each micro-batch",
            [
                ("hidden", "[b, s, H]"),
                ("logits", "[b, s, V], or chunks of V"),
                ("logprobs, entropies", "[b, s]"),
            ],
        ),
        (
            "loss",
            "clipped ratio times advantage; backward",
            [("shares", "[b, s] float64"), ("loss", "[]  sum of the shares")],
        ),
        (
            "update",
            "all micro-batches: clip, AdamW",
            [("grad_norm", "[]"), ("weights", "to the rollout engine")],
        ),
    ]
    row, gap = 3.1, 3.4
    total = sum(max(len(tensors), 2.6) * row + gap for _, _, tensors in stages)
    figure, ax = _canvas(WIDTH - 0.4, 5.6, (0, 100), (0, total + 5))
    y = total + 3.5
    first = y
    for index, (title, text, tensors) in enumerate(stages):
        height = max(len(tensors), 2.6) * row
        color = COLORS[0] if index < 3 else COLORS[1] if index < 5 else COLORS[2]
        _box(ax, (9, y - height), (36, height), color)
        middle = y - height / 2
        ax.text(27, middle + 1.5, title, ha="center", va="center", weight="bold", color=color, fontsize=10)
        ax.text(27, middle - 1.7, text, ha="center", va="center", color=INK, fontsize=8)
        for number, (name, shape) in enumerate(tensors):
            at = middle + (len(tensors) - 1) * row / 2 - number * row
            ax.text(49, at, name, va="center", color=INK, **MONO)
            ax.text(73, at, shape, va="center", color=PALE, **MONO)
        ax.plot([47, 47], [y - height + 0.3, y - 0.3], color=color, linewidth=1.2)
        if index < len(stages) - 1:
            _arrow(ax, (27, y - height - 0.3), (27, y - height - gap + 0.3))
        y -= height + gap
    last = y + gap + row
    _arrow(ax, (8.6, last), (8.6, first - 2 * row), bend="bar,angle=90,fraction=-0.09")
    ax.text(
        2.2, (first + last) / 2, "next step", rotation=90, ha="center", va="center", color=PALE, fontsize=8
    )
    legend = "B sequences of S tokens on this rank; b, s of a micro-batch; V vocabulary; H hidden size"
    ax.text(50, 1, legend, ha="center", va="center", color=PALE, fontsize=7.8)
    return figure


def _canvas(
    width: float, height: float, x: tuple[float, float], y: tuple[float, float]
) -> "tuple[Figure, Axes]":
    figure = pyplot.figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=x, ylim=y)
    ax.axis("off")
    return figure, ax


def _box(ax: "Axes", corner: tuple[float, float], size: tuple[float, float], color: str) -> None:
    style = "round,pad=0,rounding_size=1"
    ax.add_patch(
        FancyBboxPatch(corner, *size, boxstyle=style, facecolor=f"{color}14", edgecolor=color, linewidth=1.1)
    )


def _arrow(ax: "Axes", start: tuple[float, float], end: tuple[float, float], bend: str = "arc3") -> None:
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            color=PALE,
            linewidth=1.1,
            connectionstyle=bend,
            shrinkA=0,
            shrinkB=0,
        )
    )


# --- memory ---

KINDS = {  # of tensors, with their colors
    **{"weights": "#0072B2", "reference weights": "#56B4E9", "optimizer state": "#009E73"},
    **{"gradients": "#F0E442", "gathered weights": "#999999", "activations": "#CC79A7"},
    **{"backward": "#882255", "log-probs": "#D55E00", "cuBLAS": "#444444"},
}
PHASES = {
    "reference_logprobs": "log-probs of the reference",
    "forward_backward": "forward + backward",
    "optimizer": "optimizer",
}
ARMS = {"baseline": "whole logits", "treatment": "fused (Triton)"}
MEMORY_PROFILE = (  # as measured in docs/measured.md
    "memory-profile grpo-qwen2.5-1.5b-1n1g-fused-logprobs --predict --lengths 16384 --set model.path=null "
    "--set model.preset=qwen2.5-1.5b --set policy.micro_batch_size=null --set policy.micro_batch_tokens=null "
    "--set policy.packing=false --set policy.share_prompts=false --set policy.compile=false "
    "--set policy.activation_checkpointing=full --set policy.backend.keep_gathered=false --set wandb=null "
    "--set"
)


def draw_memory() -> "Figure":
    """Draw the predicted memory of a step by phase, with whole logits and with fused log-probs."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*MEMORY_PROFILE.split(), "task={type: arithmetic}"]
        command = [sys.executable, "-m", "abrun", *options, "-o", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        cells = json.loads((Path(folder) / "prediction.json").read_text())["cells"]
    bars = {
        f"{title}, {ARMS[cell['arm']]}": cell["by_phase"][phase]
        for phase, title in PHASES.items()
        for cell in cells
    }
    figure, ax = pyplot.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    ends = [0.0] * len(bars)
    for kind, color in KINDS.items():
        widths = [kinds.get(kind, 0) / 2**30 for kinds in bars.values()]
        ax.barh(list(bars), widths, left=ends, color=color, label=kind, height=0.72)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        ax.annotate(f"{end:.1f}", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    ax.invert_yaxis()
    ax.margins(x=0.08)
    ax.grid(visible=False, axis="y")
    ax.set_axisbelow(True)
    ax.set_xlabel("GiB at the peak of the phase")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def write_demo() -> Path:
    """Write the terminal output of `abrun demo`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        output = render_demo(run_demo(Path("abrun-demo")))
    console = Terminal(
        file=io.StringIO(), width=80, record=True, force_terminal=True, color_system="truecolor"
    )
    console.print("$ abrun demo", output, sep="\n")
    path = IMAGES / "demo.svg"
    picture = console.export_svg(title="abrun demo", unique_id="demo")
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))  # fonts from the network
    return path


FIGURES: dict[str, Callable[[], "Figure"]] = {
    "overlay": draw_overlay,
    "verdicts": draw_verdicts,
    "power": draw_power,
    "pipeline": draw_pipeline,
    "error-rates": draw_error_rates,
    "grpo-step": draw_grpo_step,
    "memory": draw_memory,
}


def main(names: Sequence[str]) -> None:
    """Write figures, all by default."""
    for name in names or ("demo", *FIGURES):
        if name == "demo":
            path = write_demo()
        else:
            with figure_style():
                (path,) = save_figure(FIGURES[name](), IMAGES / name, ("svg",))
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
