"""A comparison for people and machines: verdict.json, report.md, figures, and the terminal's summary.

Everything is a function of the content of the runs: the same runs give the same bytes, without dates.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from abrun.errors import ComparisonError, StoreError
from abrun.extras import lacking
from abrun.messages import sentence, sentences
from abrun.messages.numbers import (
    beside_limit,
    bound_text,
    confidence_text,
    difference_text,
    interval_level_text,
    units,
)
from abrun.present.figures import FIGURES, save_figure, style
from abrun.present.markdown import code, escaped
from abrun.present.tables import Table, columns
from abrun.reasons import Code
from abrun.recorded.claim_tests import STAMP_FILE, ClaimTest, read_claim_tests
from abrun.recorded.experiment import RecordedExperiment
from abrun.redaction import shown
from abrun.report.context import Context, context
from abrun.report.evidence import evidence
from abrun.report.next_step import NextStep
from abrun.runs.access import PUBLIC_MODE, share_new_folder
from abrun.runs.files import read_json, write_file, write_json
from abrun.verdict.description import Description
from abrun.verdict.results import ClaimResult
from abrun.verdict.verdict_file import VerdictFile, as_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

PAGE = "report.html"
FORMATS = ("json", "html", "markdown", "png", "svg")
COLORS = {"MATCH": "green", "MISMATCH": "red", "INCONCLUSIVE": "yellow", "INVALID": "magenta"}
CLAIMS = "claims"  # the figure of all claims
MOST_LINES = 30  # of the markdown, without images
MOST_DESCRIBED = 6  # metrics of two runs, in markdown and on a terminal; the page has all
OF_ONE_RUN, OF_SEVERAL = (
    ["mean distance step by step"],
    ["smallest margin these runs show", "a suggested margin, were the arms equal"],
)
MOST_LINKS = 20  # to runs in wandb


def drawable() -> tuple[str, ...]:
    """The formats that this environment can write."""
    return tuple(form for form in FORMATS if form not in FIGURES) if lacking("figures") else FORMATS


def write_report(
    experiment: RecordedExperiment,
    content: VerdictFile,
    output: Path,
    formats: Collection[str],
    command: str | None = None,
    readings: Sequence[ClaimTest] = (),
) -> list[Path]:
    """Write the asked formats; returns the files. Raises ComparisonError where `output` cannot be written.

    Every file is drawn from the runs: what already lies in the folder may be somebody else's. The stamp keeps
    the `readings` of this report and of those that were in its folder.
    """
    if not formats:
        return []
    beside = context(experiment, content, command)
    verdict, page, report = files = [output / name for name in ("verdict.json", PAGE, "report.md")]
    images = [form for form in FIGURES if form in formats]
    try:
        output.mkdir(parents=True, exist_ok=True)
        share_new_folder(output)
        figures = list(_draw_claims(experiment, content, output, images)) if images else []
        if "html" in formats:
            from abrun.report.page import render_page

            write_file(page, render_page(experiment, content, beside).encode(), mode=PUBLIC_MODE)
        history = sorted((test.as_json() for test in {*readings, *read_claim_tests(output)}), key=str)
        write_json(output / STAMP_FILE, {"asked": experiment.request_sha256, "readings": history})
        if "json" in formats:
            write_json(verdict, as_json(content), mode=PUBLIC_MODE)
        if "markdown" in formats:
            shown = [path.name for path in figures if path.suffix == f".{images[0]}"]
            write_file(report, markdown(content, beside, shown).encode(), mode=PUBLIC_MODE)
    except (OSError, StoreError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        raise ComparisonError(Code.OUTPUT_UNWRITABLE(folder=output, problem=reason)) from None
    written = zip(("json", "html", "markdown"), files, strict=True)
    return [*(path for form, path in written if form in formats), *figures]


def report_folder(experiment: RecordedExperiment) -> Path:
    """Where the report of runs goes that abrun did not launch: `<name>-report`.

    Where the report of other sources is there, or of another comparison of these, it has a hash behind it.
    """
    folder = Path(f"{slug(experiment.name)}-report")
    with suppress(StoreError):
        there = read_json(folder / STAMP_FILE).get("asked", experiment.request_sha256)
        if there != experiment.request_sha256:
            return Path(f"{folder}-{experiment.request_sha256[:8]}")
    return folder


def _draw_claims(
    experiment: RecordedExperiment, content: VerdictFile, output: Path, images: Sequence[str]
) -> Iterator[Path]:
    if not content.claims:
        return
    from abrun.report import plots  # half a second

    with style():
        yield from _save(plots.forest(experiment, content.claims), output / CLAIMS, images)
    for stem, metric in slugs(claim.claim.metric for claim in content.claims).items():
        of_metric = [claim for claim in content.claims if claim.claim.metric == metric]
        with style():
            yield from _save(plots.metric_figure(experiment, metric, of_metric), output / stem, images)


def _save(figure: "Figure | None", stem: Path, images: Sequence[str]) -> list[Path]:
    return save_figure(figure, stem, images) if figure else []


def slugs(metrics: Iterable[str]) -> dict[str, str]:
    """A file name for each metric: `train/reward` is `train-reward`; colliding names are numbered."""
    named: dict[str, str] = {}
    for metric in dict.fromkeys(metrics):
        plain = slug(metric) or "metric"
        unique, number = plain, 2
        while unique in named or unique == CLAIMS:
            unique, number = f"{plain}-{number}", number + 1
        named[unique] = metric
    return named


def slug(name: str) -> str:
    """What of a name can be a file's."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:100]


# --- markdown, for a pull request ---


def markdown(content: VerdictFile, beside: Context, images: Sequence[str]) -> str:
    """A page of at most MOST_LINES lines, then the figures."""
    lines = [
        f"# {escaped(_headline(content))}",
        "",
        *(f"- {escaped(sentence(reason))}" for reason in content.reasons),
        "",
        *(f"**next**: {escaped(step.text)}: {code(step.command)}  " for step in beside.next_steps),
    ]
    for table in _tables(content):
        lines += ["", escaped(_compared(content)), "", *table.markdown()]
    facts = [f"**{escaped(label)}**: {escaped(text)}  " for label, text in evidence(content)]
    made = f"report made by {code(beside.command)}"
    known = [escaped(text) for text in (beside.ran, beside.environment) if text]
    lines += ["", *facts, f"**runs**: {'; '.join([*known, made])}  "]
    links = [f"[{escaped(run)}]({url})" for run, url in content.wandb.items()]
    if links:
        more = f", and {len(links) - MOST_LINKS} more" if len(links) > MOST_LINKS else ""
        lines.append(f"**wandb**: {', '.join(links[:MOST_LINKS])}{more}")
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES + 2
        lines = [*lines[: MOST_LINES - 2], "", f"and {more} more lines in report.html and verdict.json"]
    lines += ["", *(f"![{name.rsplit('.', 1)[0]}]({name})" for name in images)] if images else []
    return "\n".join(lines).rstrip() + "\n"


def _tables(content: VerdictFile) -> list[Table]:
    """Return the claims' table and the descriptions', each only if it has rows."""
    several, tables = len(content.arms) > 1, []
    if content.claims:
        rows = [[one.arm] * several + claim_cells(one) for one in content.claims]
        tables.append(Table(columns(*["arm"] * several, *claim_columns(content), fold=True), rows))
    if content.descriptions:
        tables.append(Table(columns(*_description_columns(content)), _described_rows(content)))
    return tables


def _description_columns(content: VerdictFile) -> list[str]:
    arm = ["arm"] * (len(content.arms) > 1)
    described = ["metric", "steps", content.baseline, treatment_name(content)]
    if all(one.interval is None for one in content.descriptions):
        return [*arm, *described, "difference", *OF_ONE_RUN]
    return [*arm, *described, "difference [90 %]", *OF_SEVERAL]


def _compared(content: VerdictFile) -> str:
    """Say which arm a difference is taken from, and what 90 % and 95 % stand for in a report."""
    roles = [
        name if name == role else f"{name} ({role})"
        for name, role in ((treatment_name(content), "treatment"), (content.baseline, "baseline"))
    ]
    tested = [one.claim.alpha for one in content.claims if one.claim.test != "exact"]
    text = f"differences are {roles[0]} minus {roles[1]}"
    if not tested:
        return text
    level = max(tested)
    return (
        f"{text}; claims are tested at {confidence_text(level)} confidence: {100 * level:.3g} % lie beyond "
        f"each end of a {interval_level_text(level)} interval"
    )


def treatment_name(content: VerdictFile) -> str:
    """Return the name of the treatment for heads of columns; 'treatment' where there are several."""
    return next(iter(content.arms)) if len(content.arms) == 1 else "treatment"


def _described_rows(content: VerdictFile) -> list[list[str]]:
    """The first few of every arm."""
    several = len(content.arms) > 1
    of_arms = [[one for one in content.descriptions if one.arm == arm] for arm in content.arms]
    shown = [one for of in of_arms for one in of[: MOST_DESCRIBED // (1 + several)]]
    return [[one.arm] * several + _described(one) for one in shown]


def _described(one: Description) -> list[str]:
    cells = [one.metric, f"{one.steps[0]}-{one.steps[1]}"]
    cells += [f"{one.baseline:.4g}", f"{one.treatment:.4g}"]
    if one.mean_distance is not None:
        apart = f"{one.mean_distance:.3g}, at most {one.largest_distance:.3g} (step {one.largest_at})"
        return [*cells, f"{one.difference:+.3g}", apart]
    if one.interval is None or one.certified_bound is None:
        return [*cells, f"{one.difference:+.3g}", "-", "two runs of each arm"]
    takes = "-"
    if one.margin is not None:
        count = one.runs_needed or "more than 1000"
        takes = f"±{one.margin:.3g}: {count} {units(paired=one.paired)}"
        if one.detected:
            takes += f", but it is {one.detected.direction}"
        if min(abs(end) for end in one.interval) > one.margin and one.detected:
            takes = f"±{one.margin:.3g}: the difference is beyond it"
    return [
        *cells,
        difference_text(one.difference, one.interval),
        f"±{bound_text(one.certified_bound)}",
        takes,
    ]


def _headline(content: VerdictFile) -> str:
    described = content.descriptions and content.verdict == "INCONCLUSIVE"
    said = ["post hoc"] * content.post_hoc + ["unpaired"] * (not content.paired)
    marks = f" ({', '.join(said)})" if said else ""
    return f"{'DESCRIPTION' if described else content.verdict}{marks}: {content.experiment}"


def claim_columns(content: VerdictFile) -> list[str]:
    level = interval_level_text(max(one.claim.alpha for one in content.claims))
    counted = "pairs" if content.paired else "runs"
    tested = {one.claim.test for one in content.claims if one.claim.test != "exact"}
    levels = {"limit": f"{treatment_name(content)}'s level", "ratio limit": "ratio"}
    kinds = ["difference"] * bool(not tested or tested - levels.keys())
    kinds += [name for test, name in levels.items() if test in tested]
    heading = f"{' or '.join(kinds)} [{level}]"
    return ["metric", "steps", counted, heading, "margin", "certified bound", "result"]


def claim_cells(one: ClaimResult) -> list[str]:
    steps = f"{one.claim.steps[0]}-{one.claim.steps[1]}" if one.claim.steps else one.claim.window
    difference = "-"
    if one.estimate.interval and one.estimate.mean_difference is not None:
        difference = difference_text(one.estimate.mean_difference, one.estimate.interval)
    bound = "-" if one.estimate.certified_bound is None else bound_text(one.estimate.certified_bound)
    if one.claim.margin_unit and one.estimate.certified_number is not None:
        number = one.estimate.certified_number
        bound = (
            f"{bound_text(number)} sigma"
            if one.claim.margin_unit == "sigma"
            else f"{bound_text(100 * number)}%"
        )
    if one.estimate.limited is not None:
        found = (one.estimate.limited, *(one.estimate.limited_interval or ()))
        middle, *ends = (beside_limit(value, one.claim.margin_number) for value in found)
        difference = middle + (f" [{', '.join(ends)}]" if ends else "")
    limited = one.estimate.limited is not None  # a limit says in its own words what it is of
    scale = (
        "" if limited or one.claim.transform == "identity" else f" ({one.claim.transform.replace('_', ' ')})"
    )
    metric = f"{one.claim.metric}{scale}"
    counted = "{} and {}".format(*one.claim.num_runs) if one.claim.num_runs else str(one.claim.num_pairs)
    return [metric, steps, counted, difference, one.claim.margin_text, bound, outcome(one)]


def outcome(one: ClaimResult) -> str:
    """A claim's result in the words of its kind: a limit is broken, and not different."""
    broken = {"limit": "limit broken", "ratio limit": "limit broken", "exact": "not exact"}
    return broken.get(one.claim.test, one.result) if one.result == "different" else one.result


# --- terminal ---


def terminal_summary(
    content: VerdictFile,
    files: Sequence[Path],
    next_steps: Sequence[NextStep],
    declared: Path | None = None,
) -> "RenderableType":
    """The verdict first, then why, the claims as a table, the rest as lines, what to do, the files.

    `declared`: the report of what was declared at launch, where this one is post hoc and leaves it as it is.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    color = COLORS[content.verdict]
    why = Text("\n".join(map(shown, sentences(content.reasons))))
    parts: list[RenderableType] = [
        Panel(
            why,
            title=Text(shown(_headline(content)), style=f"bold {color}"),
            title_align="left",
            border_style=color,
        )
    ]
    tables = _tables(content)
    if tables:
        parts.append(Text(shown(_compared(content)), style="dim"))
    for table in tables:
        parts += [table.rich(padding=(0, 1)), Text("")]
    facts = [
        (label, "\n".join(map(shown, sentences(content.not_tested) if label == "not tested" else [text])))
        for label, text in evidence(content)
    ]
    facts += [("next", shown(f"{step.text}: {step.command}")) for step in next_steps]
    if files and (missing := lacking("figures")):
        facts.append(("figures", f"PNG and SVG: {sentence(missing)}"))
    parts.append(Table((), [(Text(shown(label), style="bold"), Text(text)) for label, text in facts]))
    if files:
        parts.append(Text.assemble(("report  ", "bold"), str(files[0].parent)))
        parts.append(Text("        " + ", ".join(path.name for path in files)))
        if declared:
            parts.append(Text(f"        what was declared is reported in {declared}, which stays as it is"))
    return Group(*parts)
