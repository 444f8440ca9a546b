"""The demo: two bundled experiments, copied to a folder, judged and summarised for a terminal.

`docs/demo_runs.py` packs their runs, which abrun's trainer made with the built-in recipes of the same names.
"""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from abrun.errors import RecipeError, StoreError
from abrun.logs.recorded.sources import ReadingOptions
from abrun.messages import sentences
from abrun.messages.numbers import difference_text
from abrun.report.comparing import Comparison, compare_sources
from abrun.report.write import PAGE, VERDICT_COLORS
from abrun.runs.files import is_directory, is_file, partial_files, remove_partial_files, write_file
from abrun.runs.layout import EXPERIMENT, REPORT
from abrun.runs.redaction import display_safe
from abrun.verdict.results import ClaimResult

ARCHIVE = Path(__file__).with_name("demo-runs.json.xz")  # file contents by path, as a JSON object
EXPERIMENTS = {  # name -> its change
    "quickstart": "log-probs computed in chunks, to save memory",
    "quickstart-injected-fault": "the same, plus a bug: every second advantage has the wrong sign",
}
INTRODUCTION = """\
Does a change to the training code change what the model learns?
A tiny model learns additions by GRPO, on 4 seeds without the change (baseline)
and on the same 4 seeds with it (treatment). The claim, declared beforehand: the
mean reward over the last 20 % of steps changes by less than 0.05."""
CONCLUSIONS = {
    "MATCH": "The reward changes by less than 0.05, at 95 % confidence.",
    "MISMATCH": "The bug is caught: the loss differs at step 1, the reward collapses.",
}
WIDTH = 80
LABEL_WIDTH = 12
MIN_AXIS_WIDTH = 30  # columns, below which an interval is not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoVerdict:
    """The verdict on one of the demo's experiments."""

    directory: Path
    comparison: Comparison

    @property
    def page(self) -> Path:
        return self.directory / REPORT / PAGE


def run_demo(folder: Path) -> list[DemoVerdict]:
    """Judge the demo's experiments in `folder`, and write their reports next to their runs.

    A missing or empty folder gets the bundled runs; a folder that has them is used as it is. Raises
    RecipeError for a folder of anything else.
    """
    unpack_runs(folder)
    return [_judge(folder / name) for name in EXPERIMENTS]


def unpack_runs(folder: Path) -> None:
    """Copy the bundled runs to `folder`, unless it has them; complete a copy that was interrupted.

    Raises RecipeError if it has other files, or cannot be written.
    """
    if os.path.lexists(folder) and not is_directory(folder):
        raise RecipeError(f"{folder}: is not a folder; choose another one with -o")
    contents = _read_archive()
    missing = {name: text for name, text in contents.items() if not is_file(folder / name)}
    if missing and not set(_list_files(folder)) <= set(contents):
        raise RecipeError(
            f"{folder}: has files, but not all of the demo's runs; choose another folder with -o"
        )
    for name in contents.keys() - missing.keys():
        if name.endswith(EXPERIMENT) and (folder / name).read_bytes() != contents[name].encode():
            raise RecipeError(f"{folder / name}: is not the demo's; choose another folder with -o")
    remove_partial_files(folder)
    try:
        for name, text in missing.items():
            write_file(folder / name, text.encode(), durable=False)
    except StoreError as error:
        problem = getattr(error.__cause__, "strerror", None) or str(error)
        raise RecipeError(f"{folder}: cannot be written: {problem}; choose another folder with -o") from None


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the paths of a folder's files, without those that a killed demo was writing."""
    for parent, _, names in os.walk(folder):
        unfinished = partial_files(names)
        paths = (os.path.join(parent, name) for name in names if name not in unfinished)
        yield from (os.path.relpath(path, folder) for path in paths)


def _read_archive() -> dict[str, str]:
    """Return the bundled files by path. Raises RecipeError if this Python cannot decompress them."""
    try:
        import lzma
    except ImportError:  # as of a Python that was built without its headers
        raise RecipeError(f"{ARCHIVE.name}: this Python lacks lzma; use a Python that has it") from None
    return json.loads(lzma.decompress(ARCHIVE.read_bytes()))


def _judge(directory: Path) -> DemoVerdict:
    output = directory / REPORT
    comparison = compare_sources(
        [str(directory)],
        ReadingOptions(runs_dir=directory.parent),
        output=output,
        formats=("json", "html"),
        command=f"abrun compare {shlex.quote(str(directory))} -o {shlex.quote(str(output))}",
    )
    return DemoVerdict(directory=directory, comparison=comparison)


def render_demo(verdicts: Sequence[DemoVerdict], width: int = WIDTH) -> RenderableType:
    """Return the verdicts, what they mean, and commands to try, for a terminal of `width` columns."""
    title, *explanation = INTRODUCTION.splitlines(keepends=True)
    names = [verdict.comparison.verdict for verdict in verdicts]
    summary = [
        (name, CONCLUSIONS[name], f"bold {VERDICT_COLORS[name]}") for name in names if name in CONCLUSIONS
    ]
    summary.append(("TRY NEXT", "Open the two report pages, then:", "bold"))
    return Group(
        Text.assemble((title, "bold"), *explanation),
        *(_render_verdict(verdict, min(width, WIDTH)) for verdict in verdicts),
        *(Text.assemble((f"{label:<{LABEL_WIDTH - 2}}", style), text) for label, text, style in summary),
        *_render_commands([shlex.quote(str(verdict.directory)) for verdict in verdicts]),
    )


def _render_commands(directories: Sequence[str]) -> Iterator[Text]:
    commands = [
        ("see all evidence", f"abrun compare {directories[0]}"),
        ("", f"abrun compare {directories[1]}"),
        ("allow only ±0.02", f"abrun compare {directories[0]} \\"),
        ("", "  --claim 'train/reward:last 20%:0.02'"),
        ("judge your runs", "abrun compare OLD NEW"),
        ("train these runs", "pip install 'abrun[train]' && abrun launch quickstart"),
    ]
    for purpose, command in commands:
        label = (f"  {purpose:<18}", "dim")
        yield Text.assemble(label, display_safe(command), no_wrap=True, overflow="ignore")


def _render_verdict(verdict: DemoVerdict, width: int) -> RenderableType:
    content, color = verdict.comparison.content, VERDICT_COLORS[verdict.comparison.verdict]
    claim = content.claims[0]
    estimate = claim.estimate
    rows: list[tuple[str, str | Text]] = [("change", EXPERIMENTS[verdict.directory.name])]
    if estimate.interval is None or estimate.mean_difference is None:
        rows += [("reason", display_safe(text)) for text in sentences(content.reasons)]
    else:
        difference = difference_text(estimate.mean_difference, estimate.interval)
        levels = f"baseline {estimate.baseline_mean:.3f}, treatment {estimate.treatment_mean:.3f}"
        rows += [("reward", levels), ("difference", f"{difference} (90 % confidence interval)")]
        if (axis_width := width - 4 - LABEL_WIDTH) >= MIN_AXIS_WIDTH:
            rows += [("", line) for line in _draw_interval(claim, color, axis_width)]
    rows.append(("report", display_safe(str(verdict.page))))
    lines = [Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), text) for label, text in rows]
    title = Text(display_safe(f"{content.verdict}: {content.experiment}"), style=f"bold {color}")
    return Panel(Text("\n").join(lines), title=title, title_align="left", border_style=color, width=width)


def _draw_interval(claim: ClaimResult, color: str, width: int) -> Iterator[Text]:
    """Yield two lines: the interval of the difference on an axis with the margin, and the margin's label."""
    margin, mean, interval = claim.claim.margin, claim.estimate.mean_difference, claim.estimate.interval
    assert margin is not None and mean is not None and interval is not None
    start, end = min(interval[0], -1.2 * margin), max(interval[1], 1.2 * margin)

    def column(value: float) -> int:
        return round((value - start) / (end - start) * (width - 1))

    cells = [("─", "dim")] * width
    allowed = range(column(-margin), column(margin) + 1)
    for index in allowed:
        cells[index] = ("▒", "dim")
    for index in range(column(interval[0]), column(interval[1]) + 1):
        cells[index] = ("━", color)
    cells[column(mean)] = ("●", f"bold {color}")
    yield Text.assemble(*cells)
    label = f"▒ allowed: {claim.claim.margin_text}"
    yield Text(" " * min(allowed.start, width - len(label)) + label, style="dim")
