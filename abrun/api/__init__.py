"""Python API for scripts and notebooks: `launch` and `load` an experiment, `compare` runs.

Thin objects around the functions of the command line. Tables are pandas data frames, created on demand; a
notebook shows an experiment as the table of its runs and a result as its verdict. Every error that a user can
fix is a one-line `abrun.errors.AbrunError`.
"""

import base64
import html
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from abrun.errors import ComparisonError, RecipeError
from abrun.messages import sentences
from abrun.messages.numbers import counted, interval_text
from abrun.recipe.extras import missing_package
from abrun.recipe.refusals import suggest_name, validated
from abrun.runs.metric_names import REWARD

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from abrun.logs.recorded.experiment import RecordedExperiment as RecordedExperiment
    from abrun.logs.recorded.sources import SourceContents
    from abrun.report.comparing import Comparison
    from abrun.verdict.evidence import Kind
    from abrun.verdict.verdict_file import VerdictFile

COLORS = {
    **dict.fromkeys(("MATCH", "PASS"), "#1a7f37"),
    **dict.fromkeys(("MISMATCH", "FAIL"), "#cf222e"),
    "INCONCLUSIVE": "#9a6700",
    "DESCRIPTION": "#57606a",
    "INVALID": "#8250df",
}
SHORT_COLUMNS = [
    *("arm", "metric", "window", "num_pairs"),
    *("mean_difference", "interval", "margin_text", "result"),
]
LEVEL_COLUMNS = ["certified_bound", "baseline_mean", "treatment_mean", "baseline_sd", "pairs_needed"]
READING_OPTIONS = (
    *("baseline", "pattern", "arms_by", "seeds_by", "group", "aliases", "step_column", "seeds", "exclude"),
    *("unpaired", "versions_differ", "interim"),
)
ALL_OPTIONS = (
    *("claim", "reference", "arm", "step_one", "alpha", "require", "output", "formats", "runs_dir"),
    *READING_OPTIONS,
)
NO_SOURCE_PROBLEM = "got no source; give an experiment's name, or paths of runs"


@dataclass(frozen=True, repr=False)
class Experiment:
    """Runs of two or more arms: an experiment of abrun, or runs logged by any framework."""

    contents: "SourceContents"
    recorded: "RecordedExperiment"
    exit_code: int = 0  # of its launch: 0 every run finished, 1 some did not, 128 + signal

    @property
    def name(self) -> str:
        return self.recorded.name

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the arms, the baseline first."""
        return self.recorded.arms

    @cached_property
    def runs(self) -> "pandas.DataFrame":
        """Return one row per run: arm, seed, rerun, status, last_step, place."""
        rows = []
        for run in self.recorded.runs.values():
            state = {"status": run.status, "last_step": int(run.steps[-1]) if len(run.steps) else 0}
            rows.append({**asdict(run.name), **state, "place": run.place})
        return _make_frame(rows)

    @cached_property
    def metrics(self) -> "pandas.DataFrame":
        """Return one row per recorded value: arm, seed, rerun, step, metric, value."""
        pandas = _import_pandas()
        columns = ["arm", "seed", "rerun", "step", "metric", "value"]
        frames = []
        for run in self.recorded.runs.values():
            for metric, series in run.metrics.items():
                values = {"step": series.steps, "metric": metric, "value": series.values}
                frames.append(pandas.DataFrame({**asdict(run.name), **values}))
        if not frames:
            return pandas.DataFrame(columns=columns)
        return pandas.concat(frames, ignore_index=True).reindex(columns=columns)

    def compare(self, **options: Any) -> "Result":
        """Compare these runs with `abrun.compare`."""
        return compare(self, **options)

    def __repr__(self) -> str:
        runs = self.recorded.runs.values()
        finished = f"{sum(run.finished for run in runs)} of {counted(runs, 'run')} finished"
        return f"Experiment({self.name!r}, arms: {', '.join(self.arms)}; {finished})"

    def _repr_html_(self) -> str:
        table = _as_html(lambda: self.runs.drop(columns="place"))
        return f"<p><b>{html.escape(self.name)}</b></p>{table}"


@dataclass(frozen=True, repr=False)
class Result:
    """Verdict of a comparison with its evidence."""

    comparison: "Comparison"
    experiment: Experiment
    verdict: str  # MATCH, PASS, MISMATCH, FAIL, INCONCLUSIVE, INVALID, or DESCRIPTION without a claim

    @property
    def exit_code(self) -> int:
        """Return the exit code of `abrun compare`.

        0 MATCH, PASS or a description without a claim, 3 MISMATCH or FAIL, 4 INCONCLUSIVE, 5 INVALID.
        """
        return self.comparison.exit_code

    @property
    def reasons(self) -> list[str]:
        return sentences(self.comparison.content.reasons)

    @property
    def verdict_file(self) -> "VerdictFile":
        """Return the content of verdict.json as typed records."""
        return self.comparison.content

    @cached_property
    def content(self) -> dict[str, Any]:
        """Return the content of verdict.json as plain dicts and lists."""
        return self.comparison.as_json()

    @cached_property
    def claims(self) -> "pandas.DataFrame":
        """Return one row per claim and arm: levels, paired difference and interval, margin, bound, result."""
        from abrun.verdict.verdict_file import claim_rows

        return _make_frame(claim_rows(self.verdict_file), [*SHORT_COLUMNS, *LEVEL_COLUMNS])

    @property
    def guards(self) -> "pandas.DataFrame":
        """Return one row per guard and arm: limit, value, result and reason."""
        return self.evidence("guard")

    def evidence(self, kind: "Kind") -> "pandas.DataFrame":
        """Return one row per piece of evidence of a kind, such as "step one": arm, result, reason, values."""
        from abrun.verdict.verdict_file import evidence_row

        rows = [evidence_row(item) for item in self.verdict_file.select(kind)]
        return _make_frame([{**row, **row.pop("values")} for row in rows])

    @property
    def metrics(self) -> "pandas.DataFrame":
        """Return one row per recorded value: arm, seed, rerun, step, metric, value."""
        return self.experiment.metrics

    @property
    def report(self) -> Path | None:
        """Return the path of report.html; None unless `compare` got `output`, the folder of the report."""
        return next((path for path in self.comparison.files if path.suffix == ".html"), None)

    def __repr__(self) -> str:
        return f"Result({self.verdict}, {self.verdict_file.experiment!r})"

    def figure(self, metric: str | None = None) -> "Figure | None":
        """Return the curves of a metric in all arms, with their bands over seeds.

        By default of the first claim's metric, or else the reward. Raises ComparisonError without matplotlib,
        or for a metric that the runs do not record.
        """
        from abrun.report import plots
        from abrun.report.present.figures import figure_style

        if missing := missing_package("figures"):
            raise ComparisonError(f"figures: {missing}")
        runs, claims = self.experiment.recorded, self.verdict_file.claims
        name = metric or next((claim.claim.metric for claim in claims), REWARD)
        if name not in runs.metrics():
            raise ComparisonError(f"figure: no run records {name!r}; {suggest_name(name, runs.metrics())}")
        steps = runs.metric_steps(name)
        with figure_style():
            figure = plots.draw_metric(runs, name, [claim for claim in claims if claim.claim.metric == name])
            return figure or plots.draw_band(runs, name, (int(steps[0]), int(steps[-1])))

    def __str__(self) -> str:
        """Return the output of `abrun compare`."""
        from abrun.report.present.terminal import terminal

        console = terminal()
        with console.capture() as captured:
            console.print(self.comparison.summary())
        return captured.get()

    def _repr_html_(self) -> str:
        color = COLORS[self.verdict]
        name = html.escape(self.verdict_file.experiment)
        fragments = [f'<h4 style="color:{color};margin:0">{self.verdict}: {name}</h4>']
        fragments.append("".join(f"<p>{html.escape(reason)}</p>" for reason in self.reasons))
        if self.verdict_file.claims:
            fragments.append(_as_html(self._claims_for_people))
        fragments += [_embed_picture(path) for path in self.comparison.files if path.suffix == ".png"][:1]
        if self.report:
            report_path = html.escape(str(self.report))
            fragments.append(f'<p>report: <a href="{report_path}">{report_path}</a></p>')
        return "\n".join(fragments)

    def _claims_for_people(self) -> Any:
        def rounded(value: Any) -> str:
            if isinstance(value, Sequence) and not isinstance(value, str):
                return interval_text(value)
            return f"{value:.3g}" if isinstance(value, float) else str(value)

        return self.claims[SHORT_COLUMNS].map(rounded)


def launch(
    recipe: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    seeds: Iterable[int] | None = None,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    jobs: int | None = None,
    launcher: str | None = None,
    resume: bool = False,
    until_decided: bool = False,
    max_seeds: int | None = None,
    device_memory: str | None = None,
    quiet: bool = False,
) -> Experiment:
    """Run every arm and seed of a recipe and wait for the end, like `abrun launch --no-compare`.

    `recipe` is a file, a built-in recipe's name, or an experiment's name or folder. `overrides` sets values
    by dotted keys, such as `{"steps": 20}`. `until_decided` runs at most `max_seeds` pairs in stages and
    stops once the verdict is decided. `device_memory`: GPU memory such as "80GiB" to resolve the policy's
    `auto` values, by default this machine's. Raises RecipeError, LaunchError or StoreError before anything
    has started.
    """
    from abrun.api.launching import choose_runs_dir, launch_recipe
    from abrun.experiment.options import LaunchOptions
    from abrun.experiment.starter.shipped import find_recipe
    from abrun.processes.output import UnfailingOutput
    from abrun.recipe.experiment import load_recipe
    from abrun.report.present.terminal import terminal

    changes = dict(overrides or {}) | ({} if seeds is None else {"seeds": list(seeds)})
    path = find_recipe(Path(recipe), Path(runs_dir))
    settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    loaded = load_recipe(path, settings, is_launched=resume)
    options = LaunchOptions(
        runs_dir=choose_runs_dir(path, Path(runs_dir), resume=resume and name is None),
        name=name,
        launcher=launcher,
        jobs=jobs,
        resume=resume,
        compare=False,
        until_decided=until_decided,
        max_seeds=max_seeds,
        device_memory=device_memory,
    )
    console = terminal(cast(TextIO, UnfailingOutput(sys.stdout)))
    console.quiet = quiet
    launched = launch_recipe(loaded, options, console)
    return _make_experiment(_read_contents([str(launched.experiment_dir)], runs_dir, {}), launched.exit_code)


def load(*sources: str | Path, runs_dir: str | Path = "runs", **reading: Any) -> Experiment:
    """Load an experiment by name or path, or runs of any framework, like the sources of `abrun compare`.

    `reading`: baseline, pattern, group, aliases, step_column, unpaired, as in the options of `abrun compare`.
    One arm is enough. Raises StoreError or ComparisonError if a source cannot be read.
    """
    return _make_experiment(_read_contents([str(source) for source in sources], runs_dir, reading))


def compare(
    *sources: str | Path | Experiment,
    claim: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    reference: str | Path | None = None,
    arm: str | None = None,
    step_one: bool = True,
    alpha: float | None = None,
    require: Literal["all", "any"] | None = None,
    noise: str | Path | None = None,
    output: str | Path | None = None,
    formats: Sequence[str] | None = None,
    runs_dir: str | Path = "runs",
    **reading: Any,
) -> Result:
    """Judge whether arms converge the same way; the options are those of `abrun compare`.

    `sources` are those of `load`, or an `Experiment`. `claim`: one or several, each as text,
    'train/reward:last 20%:0.05', or as in recipes, `{"metric": "train/reward", "margin": 0.05}`. Nothing is
    written unless `output` is given: the folder of the report, in `formats` (json, html, markdown, png, svg),
    by default every available one (PNG and SVG need matplotlib). Raises StoreError or ComparisonError if the
    sources cannot be compared as requested.
    """
    from abrun.recipe.claims import Claim, parse_claim
    from abrun.report.comparing import CompareOptions, compare_contents

    if formats is not None and output is None:
        raise RecipeError("abrun.compare: formats requires output, the folder of the report; add it")
    experiment = sources[0] if len(sources) == 1 and isinstance(sources[0], Experiment) else None
    if experiment is None and any(isinstance(source, Experiment) for source in sources):
        raise RecipeError(
            "abrun.compare: got an Experiment and other sources; give the Experiment alone, or give paths"
        )
    if experiment and reading:
        raise RecipeError(
            f"abrun.compare: got {next(iter(reading))} with an Experiment that is already loaded; pass it to "
            "abrun.load"
        )
    paths = [str(source) for source in sources]
    contents = experiment.contents if experiment else _read_contents(paths, runs_dir, reading)
    claims = [claim] if isinstance(claim, str | Mapping) else claim
    parsed = [
        parse_claim(entry) if isinstance(entry, str) else validated(Claim, entry, "claim")
        for entry in claims or ()
    ]
    options = CompareOptions(
        claims=parsed or None,
        reference=Path(reference) if reference else None,
        arm=arm,
        step_one=step_one,
        alpha=alpha,
        require=require,
        noise=Path(noise) if noise else None,
        output=Path(output) if output else None,
        formats=formats,
    )
    comparison = compare_contents(contents, options)
    return Result(comparison, experiment or _make_experiment(contents), comparison.verdict)


def _read_contents(
    sources: Sequence[str], runs_dir: str | Path, options: Mapping[str, Any]
) -> "SourceContents":
    from abrun.logs.recorded.sources import ReadingOptions, read_sources

    unknown = [name for name in options if name not in READING_OPTIONS]
    if unknown:
        raise RecipeError(f"got the option {unknown[0]!r}; {suggest_name(unknown[0], ALL_OPTIONS)}")
    if not sources:
        raise RecipeError(NO_SOURCE_PROBLEM)
    aliases = options.get("aliases", ())
    if isinstance(aliases, Mapping):
        aliases = (f"{ours}={theirs}" for ours, theirs in aliases.items())
    settings = {**options, "runs_dir": Path(runs_dir), "aliases": tuple(aliases)}
    return read_sources(sources, ReadingOptions(**settings))


def _make_experiment(contents: "SourceContents", exit_code: int = 0) -> Experiment:
    recorded = contents.experiment(allows_one_arm=True, may_be_one_arm=True, interim=())
    return Experiment(contents, recorded, exit_code)


def _make_frame(rows: list[dict[str, Any]], columns: list[str] | None = None) -> "pandas.DataFrame":
    return _import_pandas().DataFrame(rows, columns=columns)


def _import_pandas() -> Any:
    if missing := missing_package("frames"):
        raise ComparisonError(f"data frames: {missing}")
    import pandas

    return pandas


def _as_html(make_frame: Callable[[], "pandas.DataFrame"]) -> str:
    """Return a table for a notebook, or a message about the package that data frames need."""
    try:
        return make_frame().to_html(index=False)
    except ComparisonError as error:
        return f"<p>{html.escape(str(error))}</p>"


def _embed_picture(path: Path) -> str:
    """Return an image tag with embedded data, since a notebook may be moved without its files."""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img style="max-width:100%" src="data:image/png;base64,{content}">'
