"""The injected faults that a comparison would have caught, and the library of faults, as text and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages import sentence
from abrun.messages.numbers import count_text
from abrun.messages.records import as_json
from abrun.recipe.claims import Compare, describe_claim
from abrun.recipe.faults import FAULTS, NEEDS, Fault, describe_needs
from abrun.report.present import tables
from abrun.report.present.tables import escape_markdown
from abrun.runs.files import PUBLIC_MODE, write_file, write_json
from abrun.verdict.injected import FaultResult, Sensitivity

JSON_FILE, MARKDOWN_FILE = "sensitivity.json", "sensitivity.md"


def write_sensitivity(
    sensitivity: Sensitivity, not_injected: Mapping[str, str], folder: Path, name: str, compare: Compare
) -> Path:
    """Write the result as JSON and as Markdown; return the path of the Markdown file.

    `not_injected` maps a fault to what the recipe lacks for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {**as_json(sensitivity), "not_injected": dict(not_injected)}
    write_json(folder / JSON_FILE, content, mode=PUBLIC_MODE)
    page = "\n".join(_markdown_lines(sensitivity, not_injected, name, compare)) + "\n"
    write_file(folder / MARKDOWN_FILE, page.encode(), mode=PUBLIC_MODE)
    return folder / MARKDOWN_FILE


def caught_sentence(sensitivity: Sensitivity, *, paired: bool) -> str:
    """Return how many faults were caught, with the size of the experiment and of each missed fault."""
    if not sensitivity.num_judged:
        injected = count_text(len(sensitivity.faults), "injected fault")
        return f"could judge none of {injected}: {sentence(sensitivity.faults[0].reason)}"
    num_pairs = sensitivity.num_pairs
    pairs = count_text(num_pairs, "pair") if paired else f"{num_pairs} runs of each arm"
    runs = f"{pairs} of {count_text(sensitivity.num_steps, 'step')}"
    text = f"would have caught {sensitivity.num_caught} of {sensitivity.num_judged} injected faults ({runs})"
    for verdict, outcome in (
        ("MATCH", "would have passed as a match"),
        ("PASS", "would have passed"),
        ("INCONCLUSIVE", "left open"),
        ("INVALID", "not judged"),
    ):
        names = [_name_with_size(fault) for fault in sensitivity.faults if fault.verdict == verdict]
        text += f"; {outcome}: {', '.join(names)}" if names else ""
    return text


def sensitivity_summary(experiment: RecordedExperiment, sensitivity: Sensitivity | None) -> str | None:
    """Summarize the result in a few words; None for runs without a recipe, which cannot inject faults."""
    if sensitivity is None:
        arm_faults = experiment.describe_arm_faults()
        recipe_key = " (optional: controls.faults)" * experiment.can_inject
        none_text = f"none {'as a control' if arm_faults else 'injected'}{recipe_key}"
        return "; ".join([*arm_faults, none_text]) if experiment.has_recipe else None
    if not sensitivity.num_judged:
        return f"could judge none of {len(sensitivity.faults)}"
    return f"would have caught {sensitivity.num_caught} of {sensitivity.num_judged}"


def advice_lines(sensitivity: Sensitivity) -> Iterator[str]:
    """Yield a line of advice for each fault that was not caught."""
    for fault in sensitivity.faults:
        if fault.advice is not None:
            yield f"{_name_with_size(fault)} could be seen by {sentence(fault.advice)}"


def sensitivity_columns(*, paired: bool) -> tuple[str, ...]:
    return ("fault", "size", "verdict", "caught by", "at step", "figures", "pairs" if paired else "runs")


def sensitivity_rows(sensitivity: Sensitivity) -> list[tuple[str, ...]]:
    """Return a row per fault, in the order of `sensitivity_columns`."""
    return [
        (
            fault.fault,
            "-" if fault.size is None else f"{fault.size:g} {fault.unit}",
            fault.verdict,
            _caught_by_text(fault),
            "-" if fault.step is None else str(fault.step),
            sentence(fault.figures) if fault.figures else "-",
            str(fault.num_pairs),
        )
        for fault in sensitivity.faults
    ]


def sensitivity_table(sensitivity: Sensitivity, *, paired: bool) -> RenderableType:
    """Return the table of injected faults for a terminal."""
    table = _make_table(sensitivity_columns(paired=paired), sensitivity_rows(sensitivity))
    return table.to_rich(padding=(0, 1))


def _markdown_lines(
    sensitivity: Sensitivity, not_injected: Mapping[str, str], name: str, compare: Compare
) -> Iterator[str]:
    claims = (f"{claim.metric} over {claim.window} {describe_claim(claim)}" for claim in compare.claims)
    declared = ", ".join(claims) or "none"
    yield f"# {escape_markdown(name)}: what this comparison would have caught"
    yield ""
    yield f"It {escape_markdown(caught_sentence(sensitivity, paired=compare.paired))}."
    yield ""
    yield (
        "Each fault was injected in the baseline, alone and at the same seeds, and judged as a treatment is: "
        f"by step one, the guards and the declared claims ({escape_markdown(declared)}). `caught by` names "
        "the earliest test that makes the verdict MISMATCH, `at step` the step at which it does."
    )
    yield ""
    titles = sensitivity_columns(paired=compare.paired)
    yield from _make_table(titles, sensitivity_rows(sensitivity)).to_markdown()
    for title, lines in (
        ("Not caught", list(advice_lines(sensitivity))),
        ("Not injected", [f"{fault}, which {lacks}" for fault, lacks in not_injected.items()]),
    ):
        if lines:
            yield from ("", f"## {title}", "", *(f"- {escape_markdown(line)}" for line in lines))


def fault_library_table() -> RenderableType:
    """Return the table of all faults for a terminal; `fault_lines` adds sizes and sources."""
    cells = [(fault.name, fault.does, ", ".join(fault.needs) or "-", fault.shows) for fault in FAULTS]
    titles = ("name", "what it does", "needs", "what should show it")
    return _make_table(titles, cells).to_rich(padding=(0, 1))


def fault_algorithms_text() -> str:
    """Return a sentence on the faults that each algorithm can have."""
    general = ", ".join(fault.name for fault in FAULTS if fault.any_algorithm)
    return f"SFT and DPO can have {general}; the others need algorithm.type grpo or ppo."


def fault_library_json(faults: Sequence[Fault] = FAULTS) -> list[dict[str, Any]]:
    """Return the faults as JSON; `needs` maps each requirement to the setting that meets it."""
    return [
        {**asdict(fault), "needs": describe_needs(fault), "source": _issue_url(fault)} for fault in faults
    ]


def fault_lines(fault: Fault) -> Iterator[str]:
    """Yield the description of one fault, line by line."""
    yield f"{fault.name}: {fault.does}"
    yield f"  seam     {fault.seam}"
    if fault.size is not None:
        maximum_text = "" if fault.most is None else f"; at most {fault.most:g}"
        yield f"  size     {fault.size:g} {fault.unit} by default{maximum_text}"
    needs = [NEEDS[need][1] for need in fault.needs]
    if not (fault.any_algorithm or {"GRPO", "PPO"} & set(fault.needs)):
        needs.insert(0, "needs algorithm.type: grpo or ppo")
    yield f"  recipe   {needs[0] if needs else 'any'}"
    yield from (f"           {how}" for how in needs[1:])
    yield f"  shows    {fault.shows}"
    yield f"  after    {_issue_url(fault)}"
    sized = f"{{name: {fault.name}, size: {fault.size:g}}}" if fault.size is not None else fault.name
    yield f"  inject   abrun faults run RECIPE --faults {fault.name}"
    yield f"           injected_fault: {sized}"


def _issue_url(fault: Fault) -> str:
    """Return the URL of the fault's source; GitHub redirects it if the number is a pull request."""
    repository, _, number = fault.source.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def _name_with_size(fault: FaultResult) -> str:
    return fault.fault if fault.size is None else f"{fault.fault} ({fault.size:g} {fault.unit})"


def _caught_by_text(fault: FaultResult) -> str:
    if fault.verdict == "INVALID":
        return f"not judged: {sentence(fault.reason)}"
    if fault.caught_by == "nothing":
        return "nothing"
    return f"{fault.caught_by}: {fault.metric}" if fault.metric else fault.caught_by


def _make_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> tables.Table:
    return tables.Table(tables.columns(*titles, no_wrap=("name", "fault"), fold=True), cells)
