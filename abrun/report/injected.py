"""What a comparison would have caught, as a table and in one sentence; and the library itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abrun.messages import sentence
from abrun.messages.records import as_json
from abrun.present import tables
from abrun.present.markdown import escaped
from abrun.recipe.claims import Compare, claim_text
from abrun.recipe.faults import FAULTS, NEEDS, Fault, what_it_takes
from abrun.recorded.experiment import RecordedExperiment
from abrun.runs.access import PUBLIC_MODE
from abrun.runs.files import write_file, write_json
from abrun.verdict.injected import FaultFound, Sensitivity

if TYPE_CHECKING:
    from rich.console import RenderableType

FILE, PAGE = "sensitivity.json", "sensitivity.md"


def write_sensitivity(
    found: Sensitivity, not_injected: Mapping[str, str], folder: Path, name: str, compare: Compare
) -> Path:
    """All of it as JSON, and as a page to read, whose path is returned.

    `not_injected`: what the recipe lacks of what a fault needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, {**as_json(found), "not_injected": dict(not_injected)}, mode=PUBLIC_MODE)
    page = "\n".join(_page(found, not_injected, name, compare)) + "\n"
    write_file(folder / PAGE, page.encode(), mode=PUBLIC_MODE)
    return folder / PAGE


def caught_sentence(content: Sensitivity, *, paired: bool) -> str:
    """Return both sizes in one sentence: the experiment's, and that of each fault missed."""
    if not content.num_judged:
        injected = _count(len(content.faults), "injected fault")
        return f"could judge none of {injected}: {sentence(content.faults[0].reason)}"
    pairs = _count(content.num_pairs, "pair") if paired else f"{content.num_pairs} runs of each arm"
    runs = f"{pairs} of {_count(content.num_steps, 'step')}"
    said = f"would have caught {content.num_caught} of {content.num_judged} injected faults ({runs})"
    for verdict, outcome in (
        ("MATCH", "would have passed as a match"),
        ("INCONCLUSIVE", "left open"),
        ("INVALID", "not judged"),
    ):
        names = [_with_size(one) for one in content.faults if one.verdict == verdict]
        said += f"; {outcome}: {', '.join(names)}" if names else ""
    return said


def in_short(experiment: RecordedExperiment, content: Sensitivity | None) -> str | None:
    """In a few words; None of runs without a recipe, in which nothing could be injected."""
    if content is None:
        own, how = experiment.describe_arm_faults(), " (controls.faults)" * experiment.can_inject
        none = f"none {'as a control' if own else 'injected'}{how}"
        return "; ".join([*own, none]) if experiment.has_recipe else None
    if not content.num_judged:
        return f"could judge none of {len(content.faults)}"
    return f"would have caught {content.num_caught} of {content.num_judged}"


def advice(content: Sensitivity) -> Iterator[str]:
    """For each fault that was not caught, what could show it."""
    for one in content.faults:
        if one.advice is not None:
            yield f"{_with_size(one)} could be seen by {sentence(one.advice)}"


def columns(*, paired: bool) -> tuple[str, ...]:
    return ("fault", "size", "verdict", "caught by", "at step", "figures", "pairs" if paired else "runs")


def rows(content: Sensitivity) -> list[tuple[str, ...]]:
    """In the order of `columns`."""
    return [
        (
            one.fault,
            "-" if one.size is None else f"{one.size:g} {one.unit}",
            one.verdict,
            _evidence(one),
            "-" if one.step is None else str(one.step),
            sentence(one.figures) if one.figures else "-",
            str(one.num_pairs),
        )
        for one in content.faults
    ]


def table(found: Sensitivity, *, paired: bool) -> "RenderableType":
    """For a terminal."""
    return _table(columns(paired=paired), rows(found)).rich(padding=(0, 1))


def _page(
    content: Sensitivity, not_injected: Mapping[str, str], name: str, compare: Compare
) -> Iterator[str]:
    claims = (f"{one.metric} over {one.window} {claim_text(one)}" for one in compare.claims)
    declared = ", ".join(claims) or "none"
    yield f"# {escaped(name)}: what this comparison would have caught"
    yield ""
    yield f"It {escaped(caught_sentence(content, paired=compare.paired))}."
    yield ""
    yield (
        "Each fault was injected in the baseline, alone and at the same seeds, and judged as a treatment is: "
        f"by step one, the guards and the declared claims ({escaped(declared)}). `caught by` is the earliest "
        "of them that makes the verdict MISMATCH, `at step` where it is first known."
    )
    yield ""
    yield from _table(columns(paired=compare.paired), rows(content)).markdown()
    for title, lines in (
        ("Not caught", list(advice(content))),
        ("Not injected", [f"{fault}, which {lacks}" for fault, lacks in not_injected.items()]),
    ):
        if lines:
            yield from ("", f"## {title}", "", *(f"- {escaped(line)}" for line in lines))


def library() -> "RenderableType":
    """For a terminal: without the sizes and sources, which each fault's own page has."""
    cells = [(one.name, one.does, ", ".join(one.needs) or "-", one.shows) for one in FAULTS]
    return _table(("name", "what it does", "needs", "what should show it"), cells).rich(padding=(0, 1))


def of_algorithms() -> str:
    """Which of them an algorithm can have."""
    general = ", ".join(fault.name for fault in FAULTS if fault.any_algorithm)
    return f"SFT and DPO can have {general}; the others need algorithm.type grpo or ppo."


def library_json(faults: Sequence[Fault] = FAULTS) -> list[dict[str, Any]]:
    """All that is known of each; `needs`: by what, the setting that gives it."""
    return [{**asdict(one), "needs": what_it_takes(one), "source": _link(one)} for one in faults]


def details(fault: Fault) -> Iterator[str]:
    """One fault, in lines."""
    yield f"{fault.name}: {fault.does}"
    yield f"  seam     {fault.seam}"
    if fault.size is not None:
        most = "" if fault.most is None else f"; at most {fault.most:g}"
        yield f"  size     {fault.size:g} {fault.unit} where none is given{most}"
    needs = [NEEDS[need][1] for need in fault.needs]
    if not (fault.any_algorithm or {"GRPO", "PPO"} & set(fault.needs)):
        needs.insert(0, "algorithm.type: grpo or ppo")
    yield f"  needs    {needs[0] if needs else '-'}"
    yield from (f"           {how}" for how in needs[1:])
    yield f"  shows    {fault.shows}"
    yield f"  after    {_link(fault)}"
    sized = f"{{name: {fault.name}, size: {fault.size:g}}}" if fault.size is not None else fault.name
    yield f"  inject   abrun sensitivity RECIPE --faults {fault.name}"
    yield f"           injected_fault: {sized}"


def _link(fault: Fault) -> str:
    """GitHub sends an issue's address on to a pull request's."""
    repository, _, number = fault.source.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def _with_size(one: FaultFound) -> str:
    return one.fault if one.size is None else f"{one.fault} ({one.size:g} {one.unit})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _evidence(one: FaultFound) -> str:
    if one.verdict == "INVALID":
        return f"not judged: {sentence(one.reason)}"
    if one.caught_by == "nothing":
        return "nothing"
    return f"{one.caught_by}: {one.metric}" if one.metric else one.caught_by


def _table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> tables.Table:
    return tables.Table(tables.columns(*titles, no_wrap=("name", "fault"), fold=True), cells)
