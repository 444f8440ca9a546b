"""The files of a report (verdict.json, report.html, report.md, figures) and its summary on the terminal.

The same runs give the same bytes: no file has the date of the report.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from abrun.errors import ComparisonError, StoreError
from abrun.logs.recorded.claim_tests import STAMP_FILE, ClaimTest, read_claim_tests
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages import sentences
from abrun.messages.codes import Code
from abrun.messages.numbers import (
    certified_text,
    confidence_text,
    difference_text,
    interval_level_text,
    text_near_limit,
)
from abrun.recipe.experiment import BASELINE
from abrun.recipe.extras import missing_package
from abrun.report.arms import arms_table, has_many_arms, short_reasons
from abrun.report.context import Context, make_context, verdict_qualifiers
from abrun.report.evidence import ALONE_NOTE, evidence_lines, evidence_tables, short_lines, treatment_name
from abrun.report.next_step import NextStep
from abrun.report.present.figures import FIGURE_FORMATS, figure_style, save_figure
from abrun.report.present.tables import Table, code_span, columns, escape_markdown
from abrun.runs.files import PUBLIC_MODE, share_new_folder, write_file, write_json
from abrun.runs.layout import VERDICT
from abrun.runs.metric_names import FINAL_WEIGHTS
from abrun.runs.redaction import display_safe
from abrun.verdict.decide import FAILING, PASSING
from abrun.verdict.results import ClaimResult
from abrun.verdict.verdict_file import VerdictFile, as_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
FORMATS = ("json", "html", "markdown", "png", "svg")
VERDICT_COLORS = {
    **dict.fromkeys(PASSING, "green"),
    **dict.fromkeys(FAILING, "red"),
    "INCONCLUSIVE": "yellow",
    "DESCRIPTION": "cyan",
    "INVALID": "magenta",
}
BROKEN = {  # outcomes of claims of a kind, instead of "different"
    **{"limit": "limit broken", "sd": "limit broken", "exact": "not exact"},
    **{"not_worse": "worse", "better": "not better"},
}
CLAIMS_FIGURE = "claims"  # file name of the figure of all claims
MAX_LINKS = 20  # to runs in wandb


def writable_formats() -> tuple[str, ...]:
    """Return the formats that the installed packages can write."""
    excluded = FIGURE_FORMATS if missing_package("figures") else ()
    return tuple(form for form in FORMATS if form not in excluded)


def write_report(
    experiment: RecordedExperiment,
    content: VerdictFile,
    output: Path,
    formats: Collection[str],
    command: str | None = None,
    claim_tests: Sequence[ClaimTest] = (),
) -> list[Path]:
    """Write the report in these formats and return the files. Raise ComparisonError if that fails.

    Everything is computed from the runs: files already in the folder may be someone else's. The stamp file
    keeps the `claim_tests` of this report and of earlier ones in the folder; without any, none is written.
    """
    report_context = make_context(experiment, content, command)
    verdict, page, report = files = [output / name for name in (VERDICT, PAGE, "report.md")]
    images = [form for form in FIGURE_FORMATS if form in formats]
    try:
        output.mkdir(parents=True, exist_ok=True)
        share_new_folder(output)
        figures = list(_draw_claims(experiment, content, output, images)) if images else []
        if "html" in formats:
            from abrun.report.page import render_page

            write_file(page, render_page(experiment, content, report_context).encode(), mode=PUBLIC_MODE)
        if claim_tests:
            history = sorted((test.as_json() for test in {*claim_tests, *read_claim_tests(output)}), key=str)
            write_json(output / STAMP_FILE, {"readings": history})
        if "json" in formats:
            write_json(verdict, as_json(content), mode=PUBLIC_MODE)
        if "markdown" in formats:
            image_names = [path.name for path in figures if path.suffix == f".{images[0]}"]
            text = render_markdown(content, report_context, image_names)
            write_file(report, text.encode(), mode=PUBLIC_MODE)
    except (OSError, StoreError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        raise ComparisonError(
            f"--output: {output} cannot be written: {reason}; choose another folder"
        ) from None
    written = zip(("json", "html", "markdown"), files, strict=True)
    return [*(path for form, path in written if form in formats), *figures]


def _draw_claims(
    experiment: RecordedExperiment, content: VerdictFile, output: Path, images: Sequence[str]
) -> Iterator[Path]:
    described = [*content.select("new run"), *content.select("seed noise")]
    if not (content.claims or described):
        return
    # Importing matplotlib takes half a second.
    from abrun.report import plots

    main = next((record for record in described if record["steps"]), None)
    figures: dict[str, Figure | None] = {}  # by file name
    with figure_style():
        if main and not content.claims:
            (stem,) = unique_slugs([main["metric"]])
            figures[stem] = plots.draw_band(experiment, main["metric"], main["steps"])
        else:
            figures[CLAIMS_FIGURE] = plots.draw_forest(experiment, content.claims)
        slugs = unique_slugs(claim.claim.metric for claim in content.claims)
        for stem, metric in slugs.items() if experiment.axis == "steps" else ():  # scores have no curves
            metric_claims = [claim for claim in content.claims if claim.claim.metric == metric]
            figures[stem] = plots.draw_metric(experiment, metric, metric_claims)
        for stem, figure in figures.items():
            yield from save_figure(figure, output / stem, images) if figure else ()


def unique_slugs(metrics: Iterable[str]) -> dict[str, str]:
    """Return a file name for each metric, such as `train-reward`; colliding names are numbered."""
    named: dict[str, str] = {}
    for metric in dict.fromkeys(metrics):
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", metric).strip("-")[:100] or "metric"
        unique, number = plain, 2
        while unique in named or unique == CLAIMS_FIGURE:
            unique, number = f"{plain}-{number}", number + 1
        named[unique] = metric
    return named


# --- markdown, for a pull request ---


def render_markdown(content: VerdictFile, report_context: Context, images: Sequence[str]) -> str:
    """Return a Markdown page: verdict, next commands and tables; the rest and the figures are folded."""
    lines = [f"# {escape_markdown(_headline(content))}", ""]
    lines += [f"- {escape_markdown(text)}" for text in short_reasons(content)]
    steps = report_context.next_steps
    lines += [""] * bool(steps)
    lines += [f"**next**: {escape_markdown(step.text)}: {code_span(step.command)}  " for step in steps]
    for table in _make_tables(content, is_short=has_many_arms(content)):
        lines += ["", *table.to_markdown()]
    folded = [escape_markdown(_comparison_note(content)), "", *_fact_items(content, report_context)]
    figures = [f"![{name.rsplit('.', 1)[0]}]({name})" for name in images]
    summary = "Evidence and curves" if figures else "Evidence"
    lines += ["", f"<details><summary>{summary}</summary>", "", *folded]
    lines += ["", *figures] if figures else []
    return "\n".join([*lines, "", "</details>"]) + "\n"


def _fact_items(content: VerdictFile, report_context: Context) -> list[str]:
    items = [
        f"- **{escape_markdown(label)}**: {escape_markdown(text)}" for label, text in evidence_lines(content)
    ]
    facts = [escape_markdown(text or "") for text in (report_context.time_range, report_context.environment)]
    facts.append(f"report made by {code_span(report_context.command)}")
    items.append(f"- **runs**: {'; '.join(filter(None, facts))}")
    links = [f"[{escape_markdown(run)}]({url})" for run, url in content.wandb.items()]
    if links:
        omitted = f", and {len(links) - MAX_LINKS} more" if len(links) > MAX_LINKS else ""
        items.append(f"- **wandb**: {', '.join(links[:MAX_LINKS])}{omitted}")
    return items


def _make_tables(content: VerdictFile, *, is_short: bool) -> list[Table]:
    """Return the tables of claims and of what stands in their place, each only if it has rows.

    `is_short`: a row an arm, the lowest difference first.
    """
    has_several_arms, tables = len(content.arms) > 1, []
    claims = content.claims

    def size(claim: ClaimResult) -> float:
        """Return the difference, or the level or ratio that is limited."""
        sizes = (claim.estimate.mean_difference, claim.estimate.limited)
        return next((size for size in sizes if size is not None), math.inf)

    if is_short:
        claims = sorted(claims, key=lambda claim: (claim.claim.metric, size(claim)))
        if not claims and (table := arms_table(content)):
            return [table]
    if claims:
        rows = [[claim.arm] * has_several_arms + claim_cells(claim) for claim in claims]
        titles = columns(*["arm"] * has_several_arms, *claim_columns(content), fold=True)
        tables.append(Table(titles, rows, optional=("certified bound", "steps", "window", "pairs", "runs")))
    return [*tables, *chain(*evidence_tables(content).values())]


def _comparison_note(content: VerdictFile) -> str:
    """Return a sentence on which arm is subtracted from which, and on the confidence level."""
    if not content.arms:
        return ALONE_NOTE
    text = f"Differences are {treatment_name(content)} minus {content.baseline}."
    alphas = [claim.claim.alpha for claim in content.claims if claim.claim.test != "exact"]
    if not alphas:
        return text
    level = max(alphas)
    note = (
        f"{text} Claims are tested one-sided at {confidence_text(level)} confidence, which corresponds to a "
        f"{interval_level_text(level)} confidence interval (CI)."
    )
    if not any(claim.estimate.certified_bound is not None for claim in content.claims):
        return note
    has_better = any(claim.claim.kind == "better" for claim in content.claims)
    better_note = " (of 'better': the largest)" * has_better
    return f"{note} The certified bound is the smallest margin that would have passed{better_note}."


def _direction_note(content: VerdictFile) -> str | None:
    """Return which arm is subtracted from which; None where their names say so."""
    names = treatment_name(content), content.baseline
    if not content.arms or names == ("treatment", BASELINE):
        return None
    return f"Differences are {names[0]} minus {names[1]}."


def _headline(content: VerdictFile) -> str:
    qualifiers = ", ".join(verdict_qualifiers(content))
    return f"{content.verdict}{f' ({qualifiers})' if qualifiers else ''}: {content.experiment}"


def claim_columns(content: VerdictFile) -> list[str]:
    interval_level = interval_level_text(max(claim.claim.alpha for claim in content.claims))
    unit = "pairs" if content.paired and content.arms else "runs"
    unit = "prompts" if any(claim.claim.unit == "prompt" for claim in content.claims) else unit
    tests = {claim.claim.test for claim in content.claims if claim.claim.test != "exact"}
    limited = {claim.claim.metric for claim in content.claims if claim.claim.test == "limit"}
    level = "distance" if limited == {FINAL_WEIGHTS} else f"level of {treatment_name(content)}"
    levels = {"limit": level, "ratio limit": "ratio", "spread": "ratio of sds", "exact rate": "rate"}
    terms = [claim.claim for claim in content.claims]
    if any(claim.test == "exact rate" and claim.kind != "limit" for claim in terms):
        levels["exact rate"] = "difference of rates"
    kinds = ["difference"] * bool(not tests or tests - levels.keys())
    kinds += [name for test, name in levels.items() if test in tests]
    heading = f"{' or '.join(kinds)} [{interval_level} CI]"
    window = "steps" if content.axis == "steps" else "window"
    return ["metric", window, unit, heading, "margin", "certified bound", "result"]


def claim_cells(claim: ClaimResult) -> list[str]:
    terms, estimate = claim.claim, claim.estimate
    steps = f"{terms.steps[0]}-{terms.steps[1]}" if terms.steps else terms.window
    difference, metric = "-", terms.metric
    if estimate.interval and estimate.mean_difference is not None:
        difference = difference_text(estimate.mean_difference, estimate.interval)
    bound = certified_text(estimate.certified_bound, estimate.certified_number, terms.margin_unit)
    if terms.kind in ("not_worse", "better") and (estimate.certified_bound or 0.0) < 0:
        bound = "any" if terms.kind == "not_worse" else "none"
    if claim.result == "not tested":
        bound = "-"  # what was not tested is not certified either
    if estimate.limited is not None:
        estimates = (estimate.limited, *(estimate.limited_interval or ()))
        middle, *ends = (text_near_limit(value, terms.margin_number) for value in estimates)
        difference = middle + (f" [{', '.join(ends)}]" if ends else "")
    elif terms.transform != "identity":  # the heading of a limit names its scale
        metric += f" ({terms.transform.replace('_', ' ')})"
    sizes = [size for size in terms.num_runs or () if size] or [terms.num_pairs]  # one arm has no baseline
    sample_size = " and ".join(map(str, sizes))
    outcome = BROKEN.get(terms.kind, claim.result) if claim.result == "different" else claim.result
    return [metric, steps, sample_size, difference, terms.margin_text, bound, outcome]


# --- terminal ---


def render_terminal(
    content: VerdictFile, files: Sequence[Path], next_steps: Sequence[NextStep], *, verbose: bool = False
) -> RenderableType:
    """Return tables, evidence, verdict, next command and report, the most important last.

    `verbose`: all evidence, definitions and next commands; otherwise only what did not pass.
    """
    warnings = {warning.code for claim in content.claims for warning in claim.warnings}
    is_wide = content.verdict in PASSING and Code.MARGIN_WIDE_OF_CLIMB in warnings
    color = "yellow" if is_wide else VERDICT_COLORS[content.verdict]
    is_short = has_many_arms(content) and not verbose
    tables = _make_tables(content, is_short=is_short)
    renderables: list[RenderableType] = [*tables]
    note = _comparison_note(content) if verbose else _direction_note(content)
    if tables and note:
        renderables.append(Text(display_safe(note), style="dim"))
    lines = evidence_lines(content) if verbose else short_lines(content)
    renderables.append(_label_rows(lines))

    title = Text(display_safe(_headline(content)), style=f"bold {color}")
    texts = short_reasons(content) if is_short else sentences(content.reasons)
    reasons = Text("\n".join(map(display_safe, texts)))
    renderables.append(Panel(reasons, title=title, title_align="left", border_style=color))

    shown_steps = next_steps if verbose else next_steps[:1]
    closing = [("next", f"{step.text}: {step.command}") for step in shown_steps]
    if files and verbose and (missing := missing_package("figures")):
        closing.append(("figures", f"PNG and SVG: {missing}"))
    renderables.append(_label_rows(closing))
    if files:
        renderables.append(Text.assemble(("report  ", "bold"), _link(files)))
    return Group(*renderables)


def _label_rows(rows: Iterable[tuple[str, str]]) -> Table:
    return Table((), [(Text(display_safe(label), style="bold"), text) for label, text in rows])


def _link(files: Sequence[Path]) -> Text:
    """Return the path of the report's page, or else of its first file, as a link that terminals open."""
    path = next((path for path in files if path.name == PAGE), files[0])
    absolute = path.absolute()
    near = absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else path
    return Text(display_safe(str(near)), style=f"link {absolute.as_uri()}")
