"""The injected faults that a comparison would have caught, and the library of faults, as text and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages import sentence
from abrun.messages.numbers import count_text
from abrun.recipe.claims import Compare, describe_claim
from abrun.recipe.faults import FAULTS, NEEDS, Fault, describe_needs
from abrun.report.present import tables
from abrun.report.present.tables import escape_markdown
from abrun.runs.files import PUBLIC_MODE, write_file, write_json
from abrun.verdict.evidence import Evidence
from abrun.verdict.verdict_file import evidence_row

MISSED = {  # verdict on a fault that was not caught -> what became of it
    **{"MATCH": "would have passed as a match", "PASS": "would have passed"},
    **{"INCONCLUSIVE": "left open", "INVALID": "not judged"},
}
JSON_FILE, MARKDOWN_FILE = "sensitivity.json", "sensitivity.md"


def write_sensitivity(
    faults: Sequence[Evidence], not_injected: Mapping[str, str], folder: Path, name: str, compare: Compare
) -> Path:
    """Write the result as JSON and as Markdown; return the path of the Markdown file.

    `not_injected` maps a fault to what the recipe lacks for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"faults": [evidence_row(fault) for fault in faults], "not_injected": dict(not_injected)}
    write_json(folder / JSON_FILE, content, mode=PUBLIC_MODE)
    page = "\n".join(_markdown_lines(faults, not_injected, name, compare)) + "\n"
    write_file(folder / MARKDOWN_FILE, page.encode(), mode=PUBLIC_MODE)
    return folder / MARKDOWN_FILE


def caught_sentence(faults: Sequence[Evidence], *, paired: bool) -> str:
    """Return how many faults were caught, with the size of the experiment and of each missed fault."""
    num_caught, num_judged = count_caught(faults)
    if not num_judged:
        injected = count_text(len(faults), "injected fault")
        return f"could judge none of {injected}{_cause_text(faults[0])}"
    num_pairs = max(fault["num_pairs"] for fault in faults)
    pairs = count_text(num_pairs, "pair") if paired else f"{num_pairs} runs of each arm"
    runs = f"{pairs} of {count_text(faults[0]['num_steps'], 'step')}"
    text = f"would have caught {num_caught} of {num_judged} injected faults ({runs})"
    for verdict, outcome in MISSED.items():
        names = [_name_with_size(fault) for fault in faults if fault.result == verdict]
        text += f"; {outcome}: {', '.join(names)}" if names else ""
    return text


def count_caught(faults: Sequence[Evidence]) -> tuple[int, int]:
    """Return how many faults were caught, and how many were judged: all but those with INVALID runs."""
    num_caught = sum(fault["caught_by"] != "nothing" for fault in faults)
    return num_caught, sum(fault.result != "INVALID" for fault in faults)


def sensitivity_summary(experiment: RecordedExperiment, faults: Sequence[Evidence]) -> str | None:
    """Summarize the result in a few words; None for runs without a recipe, which cannot inject faults."""
    if not faults:
        arm_faults = experiment.describe_arm_faults()
        recipe_key = " (optional: controls.faults)" * experiment.can_inject
        none_text = f"none {'as a control' if arm_faults else 'injected'}{recipe_key}"
        return "; ".join([*arm_faults, none_text]) if experiment.has_recipe else None
    num_caught, num_judged = count_caught(faults)
    if not num_judged:
        return f"could judge none of {len(faults)}"
    return f"would have caught {num_caught} of {num_judged}"


def advice_lines(faults: Sequence[Evidence]) -> Iterator[str]:
    """Yield a line of advice for each fault that was not caught."""
    for fault in faults:
        if fault["advice"] is not None:
            yield f"{_name_with_size(fault)} could be seen by {sentence(fault['advice'])}"


def sensitivity_columns(*, paired: bool) -> tuple[str, ...]:
    return ("fault", "size", "verdict", "caught by", "at step", "figures", "pairs" if paired else "runs")


def sensitivity_rows(faults: Sequence[Evidence]) -> list[tuple[str, ...]]:
    """Return a row per fault, in the order of `sensitivity_columns`."""
    return [
        (
            fault["fault"],
            "-" if fault["size"] is None else f"{fault['size']:g} {fault['unit']}",
            fault.result,
            _caught_by_text(fault),
            "-" if fault["step"] is None else str(fault["step"]),
            sentence(fault["figures"]) if fault["figures"] else "-",
            str(fault["num_pairs"]),
        )
        for fault in faults
    ]


def sensitivity_table(faults: Sequence[Evidence], *, paired: bool) -> tables.Table:
    """Return the table of injected faults."""
    return _make_table(sensitivity_columns(paired=paired), sensitivity_rows(faults))


def _markdown_lines(
    faults: Sequence[Evidence], not_injected: Mapping[str, str], name: str, compare: Compare
) -> Iterator[str]:
    claims = (f"{claim.metric} over {claim.window} {describe_claim(claim)}" for claim in compare.claims)
    declared = ", ".join(claims) or "none"
    yield f"# {escape_markdown(name)}: what this comparison would have caught"
    yield ""
    yield f"It {escape_markdown(caught_sentence(faults, paired=compare.paired))}."
    yield ""
    yield (
        "Each fault was injected in the baseline, alone and at the same seeds, and judged as a treatment is: "
        f"by step one, the guards and the declared claims ({escape_markdown(declared)}). `caught by` names "
        "the earliest test that makes the verdict MISMATCH, `at step` the step at which it does."
    )
    yield ""
    yield from sensitivity_table(faults, paired=compare.paired).to_markdown()
    unmet = [f"{fault}, which {lacks}" for fault, lacks in not_injected.items()]
    sections = {"Not caught": [*advice_lines(faults)], "Not injected": unmet}
    for title, lines in sections.items():
        if lines:
            yield from ("", f"## {title}", "", *(f"- {escape_markdown(line)}" for line in lines))


def fault_library_table(width: int) -> tables.Table:
    """Return a line for each fault, for a terminal; `fault_lines` has its needs, sizes and sources."""
    cells = [(fault.name, fault.does) for fault in FAULTS]
    return _make_table(("name", "what it does"), cells).cut_to(width)


def fault_algorithms_text() -> str:
    """Return a sentence on the faults that each algorithm can have."""
    general = ", ".join(fault.name for fault in FAULTS if fault.any_algorithm)
    return f"SFT and DPO can have {general}; the others need algorithm.type grpo or ppo."


def fault_library_json(faults: Sequence[Fault] = FAULTS) -> list[dict[str, Any]]:
    """Return the faults as JSON; `needs` maps each requirement to the setting that meets it."""
    return [asdict(fault) | {"needs": describe_needs(fault), "source": _issue_url(fault)} for fault in faults]


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


def _name_with_size(fault: Evidence) -> str:
    size = "" if fault["size"] is None else f" ({fault['size']:g} {fault['unit']})"
    return fault["fault"] + size


def _caught_by_text(fault: Evidence) -> str:
    if fault.result == "INVALID":
        return f"not judged{_cause_text(fault)}"
    if fault["caught_by"] == "nothing":
        return "nothing"
    return f"{fault['caught_by']}: {fault['metric']}" if fault["metric"] else fault["caught_by"]


def _cause_text(fault: Evidence) -> str:
    return f": {sentence(fault.reason)}" if fault.reason else ""


def _make_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> tables.Table:
    return tables.Table(tables.columns(*titles, no_wrap=("name", "fault"), fold=True), cells)
