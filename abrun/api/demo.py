"""The demo: three bundled experiments, copied to a folder, judged and summarised for a terminal.

`docs/demo_runs.py` packs their runs, which abrun's trainer made with the built-in recipes of the same names.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from abrun.errors import RecipeError, StoreError
from abrun.logs.recorded.sources import ReadingOptions, read_sources
from abrun.messages import sentences
from abrun.messages.numbers import difference_text, pairs_or_more_text
from abrun.report.comparing import CompareOptions, Comparison, compare_contents
from abrun.report.write import PAGE, VERDICT_COLORS
from abrun.runs.files import is_directory, is_file, partial_files, remove_partial_files, write_file
from abrun.runs.layout import EXPERIMENT, REPORT
from abrun.runs.redaction import display_safe
from abrun.verdict.evidence import select_evidence
from abrun.verdict.results import ClaimResult
from abrun.watch.showing import sparkline

ARCHIVE = Path(__file__).with_name("demo-runs.json.xz")  # file contents by path, as a JSON object
EXPERIMENTS = {  # name -> its change
    "quickstart": "log-probs computed in chunks, to save memory",
    "quickstart-injected-fault": "the same, plus a bug in the advantages",
    "quickstart-small-batch": "log-probs in chunks again, with small batches and 6 seeds",
}
INTRODUCTION = """\
Does a change to the training code change what the model learns?
A tiny model learns additions by GRPO without the change (baseline) and with it
(treatment), on the same seeds. The claim, declared beforehand: the mean reward
of the last 20 % of steps changes by less than 0.05 (▒). The curves are the
rewards of the seed whose arms differ most."""
CONCLUSIONS = {
    "MATCH": "the reward changes by less than 0.05, at 95 % confidence",
    "MISMATCH": "within the margin, so the curves hide a bug; step one finds it",
    "INCONCLUSIVE": "equal arms part by seed noise; {needed} seeds would show it",
}
WIDTH = 80
LABEL_WIDTH = 12
MIN_AXIS_WIDTH = 30  # columns, below which an interval is not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoVerdict:
    """The verdict on one of the demo's experiments."""

    directory: Path
    comparison: Comparison
    seed: int | None  # of the pair that differs most
    curves: Mapping[str, Sequence[float]]  # arm -> reward at each step with that seed


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
    contents = read_sources([str(directory)], ReadingOptions(runs_dir=directory.parent))
    command = f"abrun compare {shlex.quote(str(directory))} -o {shlex.quote(str(output))}"
    options = CompareOptions(output=output, formats=("json", "html"), command=command)
    experiment, comparison = contents.experiment(), compare_contents(contents, options)
    claim = comparison.content.claims[0]
    differences = dict(zip(claim.claim.seeds, claim.estimate.differences or (), strict=False))
    seed = max(differences, key=lambda seed: abs(differences[seed]), default=None)
    pair = [run for run in experiment.runs.values() if run.name.seed == seed and not run.name.rerun]
    curves = {run.name.arm: run.series("train/reward").values.tolist() for run in pair}
    return DemoVerdict(directory=directory, comparison=comparison, seed=seed, curves=curves)


def render_demo(verdicts: Sequence[DemoVerdict], width: int = WIDTH) -> RenderableType:
    """Return the verdicts, what they mean, and commands to try, for a terminal of `width` columns."""
    title, *explanation = INTRODUCTION.splitlines(keepends=True)
    commands = [
        ("see the evidence", f"abrun compare {shlex.quote(str(verdicts[1].directory))}"),
        ("judge your runs", "abrun compare OLD NEW"),
        ("train these runs", "pip install 'abrun[train]' && abrun launch quickstart"),
    ]
    return Group(
        Text.assemble((title, "bold"), *explanation),
        *(_render_verdict(verdict, min(width, WIDTH)) for verdict in verdicts),
        *(
            Text.assemble((f"{label:<18}", "dim"), display_safe(command), no_wrap=True, overflow="ignore")
            for label, command in commands
        ),
    )


def _render_verdict(verdict: DemoVerdict, width: int) -> RenderableType:
    content, color = verdict.comparison.content, VERDICT_COLORS[verdict.comparison.verdict]
    claim = content.claims[0]
    estimate, axis_width = claim.estimate, width - 4 - LABEL_WIDTH
    rows: list[tuple[str, str | Text]] = [("change", EXPERIMENTS[verdict.directory.name])]
    if estimate.interval is None or estimate.mean_difference is None:
        rows += [("reason", display_safe(text)) for text in sentences(content.reasons)]
    else:
        drawn = axis_width >= MIN_AXIS_WIDTH
        difference = difference_text(estimate.mean_difference, estimate.interval)
        rows += _draw_curves(verdict.curves, axis_width) if drawn else ()
        rows.append(("difference", f"{difference} (90 % confidence interval)"))
        rows += [("", _draw_interval(claim, color, axis_width))] if drawn else ()
    rows += [
        ("step one", f"{check['metric']} is {check['treatment']:.3g} instead of {check['baseline']:.3g}")
        for check in select_evidence(content.evidence, "step one")
        if check.result == "fail"
    ][:1]
    if content.verdict in CONCLUSIONS:
        needed = pairs_or_more_text(claim.power.pairs_needed)
        rows.append(("so", CONCLUSIONS[content.verdict].format(needed=needed)))
    rows.append(("report", display_safe(str(verdict.directory / REPORT / PAGE))))
    lines = [Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), text) for label, text in rows]
    title = Text(display_safe(f"{content.verdict}: {content.experiment}"), style=f"bold {color}")
    return Panel(Text("\n").join(lines), title=title, title_align="left", border_style=color, width=width)


def _draw_curves(curves: Mapping[str, Sequence[float]], width: int) -> Iterator[tuple[str, str]]:
    """Yield the reward of each arm over the steps, all on one scale, and its mean over the last fifth."""
    values = [value for curve in curves.values() for value in curve]
    for arm, curve in curves.items():
        last = curve[-max(1, len(curve) // 5) :]
        drawn = sparkline(curve, width - 6, (min(values), max(values)))
        yield display_safe(arm), f"{drawn} {sum(last) / len(last):.3f}"


def _draw_interval(claim: ClaimResult, color: str, width: int) -> Text:
    """Return a line: the interval of the difference on an axis with the margin."""
    margin, mean, interval = claim.claim.margin, claim.estimate.mean_difference, claim.estimate.interval
    assert margin is not None and mean is not None and interval is not None
    start, end = min(interval[0], -1.2 * margin), max(interval[1], 1.2 * margin)

    def column(value: float) -> int:
        return round((value - start) / (end - start) * (width - 1))

    cells = [("─", "dim")] * width
    for index in range(column(-margin), column(margin) + 1):
        cells[index] = ("▒", "dim")
    for index in range(column(interval[0]), column(interval[1]) + 1):
        cells[index] = ("━", color)
    cells[column(mean)] = ("●", f"bold {color}")
    return Text.assemble(*cells)
