"""Who is who in the logs of a comparison: a line for each run, and what was assumed and left out."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import ComparisonError
from abrun.logs.log import RunRecording
from abrun.logs.naming import Seed, find_seed, varying_settings
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.logs.recorded.identify import Sources
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import read_sources
from abrun.messages import sentences
from abrun.report.present.tables import Column, Table
from abrun.runs.redaction import display_safe, list_names


def list_runs(sources: Sequence[str], reading: ReadingOptions) -> tuple[RenderableType, str]:
    """Return a table of the runs and what was assumed, and why arms or seeds cannot be told; judges nothing.

    Raises StoreError or ComparisonError if the sources cannot be read.
    """
    contents = read_sources(sources, reading)
    logs = contents.recorded.logs if isinstance(contents.recorded, Sources) else []
    varying = [("settings that differ", list_names(keys, 8)) for keys in [varying_settings(logs)] if keys]
    try:
        experiment = contents.experiment(may_unpair=True, may_be_one_arm=True)
    except ComparisonError as error:
        rows = [("?", "?", *_describe(log), log.place) for log in logs]
        return Group(_make_table(rows), *_label(varying)), str(error)
    seeds: dict[tuple[str, int], Seed] = {}  # a file may hold several runs
    for log in logs:
        if seed := find_seed(log):
            seeds.setdefault((log.place, seed.number), seed)
    rows = []
    for name, run in experiment.runs.items():
        origin = _describe_origin(seeds.get((run.place, name.seed)), experiment, reading.seeds_by)
        rows.append((name.arm, f"{name.seed} ({origin})", *_describe(run), run.place))
    lines = [("guessed", text) for text in sentences(experiment.guessed)]
    lines += [("left out", text) for text in sentences(experiment.left_out)]
    lines += [("not compared", name) for name in experiment.unselected]
    return Group(_make_table(rows), *_label([*lines, *varying])), ""


def _describe_origin(seed: Seed | None, experiment: RecordedExperiment, seeds_by: str | None) -> str:
    """Return what states a run's seed; `seed`: what its log says, if that is the seed it has."""
    if experiment.directory:
        return "its own files"
    if not experiment.seeds_known:
        return "numbered"
    if seeds_by:
        return f"{seeds_by} in the settings"
    if seed is None:
        return "none stated" if len(experiment.runs) == len(experiment.arms) else "guessed"
    return seed.source if seed.kind == "setting" else "its own files" if seed.kind == "files" else "its name"


def _describe(run: RunRecording) -> tuple[str, str]:
    """Return the steps and the number of metrics of a run."""
    recorded = [series.steps for series in run.metrics.values() if len(series)]
    text = run.axis if recorded else "none"
    if recorded and run.axis == "steps":
        text = f"{min(steps[0] for steps in recorded)}-{max(steps[-1] for steps in recorded)}"
    return text, str(len(run.metrics))


def _make_table(rows: Sequence[tuple[str, ...]]) -> Table:
    columns = [Column("arm"), Column("seed"), Column("steps"), Column("metrics"), Column("log", fold=True)]
    return Table(columns, [tuple(map(display_safe, row)) for row in rows], optional=("metrics", "steps"))


def _label(lines: Sequence[tuple[str, str]]) -> list[Text]:
    return [Text.assemble((f"{label}  ", "bold"), display_safe(text)) for label, text in lines]
