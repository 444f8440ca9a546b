"""Who is who in the logs of a comparison: a line for each run, and what was assumed and left out."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.errors import ComparisonError
from abrun.logs import Log
from abrun.logs.log import RunRecording
from abrun.logs.naming import find_seed
from abrun.logs.recorded.identify import Sources
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import read_sources
from abrun.messages import sentences
from abrun.report.present.tables import Column, Table
from abrun.runs.redaction import display_safe

MAX_SETTINGS = 8


def list_runs(sources: Sequence[str], reading: ReadingOptions) -> tuple[RenderableType, str]:
    """Return a table of the runs and what was assumed, and why arms or seeds cannot be told; judges nothing.

    Raises StoreError or ComparisonError if the sources cannot be read.
    """
    contents = read_sources(sources, reading)
    logs = contents.recorded.logs if isinstance(contents.recorded, Sources) else []
    by_place = {log.place: log for log in logs}
    try:
        experiment = contents.experiment(may_unpair=True, may_be_one_arm=True)
    except ComparisonError as error:
        rows = [("?", "?", *_describe(log), log.place) for log in logs]
        return Group(_make_table(rows), *_differing_settings(logs)), str(error)
    rows = []
    for name, run in experiment.runs.items():
        log = by_place.get(run.place)
        seed = find_seed(log) if log else None
        origin = seed.source if seed and seed.kind == "setting" else "its name" if seed else "none stated"
        origin = "its own files" if log is None else origin if experiment.seeds_known else "numbered"
        rows.append((name.arm, f"{name.seed} ({origin})", *_describe(run), run.place))
    lines = [("guessed", text) for text in sentences(experiment.guessed)]
    lines += [("left out", text) for text in sentences(experiment.left_out)]
    lines += [("not compared", name) for name in experiment.unselected]
    notes = [Text.assemble((f"{label}  ", "bold"), display_safe(text)) for label, text in lines]
    return Group(_make_table(rows), *notes, *_differing_settings(logs)), ""


def _describe(run: RunRecording) -> tuple[str, str]:
    """Return the steps and the number of metrics of a run."""
    lengths = [
        (int(series.steps[0]), int(series.steps[-1])) for series in run.metrics.values() if len(series)
    ]
    first_step, last_step = (min(lengths)[0], max(end for _, end in lengths)) if lengths else (0, 0)
    steps = (
        f"{first_step}-{last_step}" if run.axis == "steps" and lengths else run.axis if lengths else "none"
    )
    return steps, str(len(run.metrics))


def _make_table(rows: Sequence[tuple[str, ...]]) -> Table:
    columns = [Column("arm"), Column("seed"), Column("steps"), Column("metrics"), Column("log", fold=True)]
    return Table(columns, [tuple(map(display_safe, row)) for row in rows], optional=("metrics", "steps"))


def _differing_settings(logs: Sequence[Log]) -> list[Text]:
    """Return a line on the settings that differ between the logs, for --arms-by and --seeds-by."""
    keys = dict.fromkeys(key for log in logs for key in log.config or {})
    differing = [key for key in keys if len({repr((log.config or {}).get(key)) for log in logs}) > 1]
    more = f" and {len(differing) - MAX_SETTINGS} more" if len(differing) > MAX_SETTINGS else ""
    text = display_safe(", ".join(differing[:MAX_SETTINGS]) + more)
    return [Text.assemble(("settings that differ  ", "bold"), text)] if differing else []
