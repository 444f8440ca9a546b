"""The report as one self-contained HTML file with its data, styles and scripts, including uPlot 1.6.32.

The data is in blocks that browsers do not execute, and names enter the page only as text. The content
security policy allows the styles and scripts of this package by their hashes, and nothing else.
"""

import base64
import hashlib
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from string import Template
from typing import Any

import numpy as np
import orjson

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, stack_runs
from abrun.messages import records
from abrun.report.context import Context, verdict_qualifiers
from abrun.report.page import charts
from abrun.report.panels import display_unit, memory_peaks
from abrun.runs.layout import RunName
from abrun.runs.metric_names import METRICS, TOKEN_MULT_PROB_ERROR
from abrun.stats.series import Array, Steps, window_bounds
from abrun.verdict.claims import ClaimResult
from abrun.verdict.summaries import reduce_arms, reduce_window
from abrun.verdict.verdict_file import VerdictFile, as_json

STYLES = ("uPlot.min.css", "page.css")
# All scripts share one scope; page.js comes last and assembles the page.
SCRIPTS = (
    *("uPlot.iife.min.js", "elements.js", "marks.js", "charts.js", "readout.js", "verdict.js"),
    *("claims.js", "evidence.js", "metrics.js", "completions.js", "runs.js", "page.js"),
)
# Limits of all charts together. MAX_VALUES is about 6 MB; charts beyond MAX_BYTES are left out.
MAX_VALUES = 600_000
MAX_BYTES = 8_000_000
MAX_NAMED_METRICS = 20  # names listed of metrics that are left out
LARGEST_INTEGER = 2**53  # JavaScript holds larger integers only approximately
_ESCAPED = {"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def render_page(experiment: RecordedExperiment, content: VerdictFile, context: Context | None = None) -> str:
    """Return the HTML page of a comparison. The same input gives the same bytes."""
    styles, scripts = [_minify(name) for name in STYLES], [_minify(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {_policy_hashes(scripts)}; "
        f"style-src {_policy_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_read_file("template.html")).substitute(
        policy=html.escape(policy, quote=False),
        license=_read_file("uPlot.LICENSE"),
        title=html.escape(_replace_surrogates(f"{content.verdict}: {experiment.name}")),
        styles="\n".join(f"<style>{style}</style>" for style in styles),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data="\n".join(_data_blocks(experiment, content, context)),
    )


def render_static_page(title: str, body: str) -> str:
    """Return an HTML page without scripts in the style of the reports; `body` is HTML."""
    style = _minify("page.css")
    policy = f"default-src 'none'; style-src {_policy_hashes([style])}; base-uri 'none'; form-action 'none'"
    return Template(_read_file("static.html")).substitute(
        policy=html.escape(policy, quote=False),
        title=html.escape(_replace_surrogates(title)),
        style=style,
        body=_replace_surrogates(body),
    )


def _data_blocks(experiment: RecordedExperiment, content: VerdictFile, context: Context | None) -> list[str]:
    """Return a block with the verdict, and one per metric, which the page parses when it draws the chart."""
    claims = content.claims
    recorded = dict.fromkeys(experiment.metrics() if experiment.axis == "steps" else ())
    claimed = {claim.claim.metric: None for claim in claims if claim.claim.metric in recorded}
    metrics = [*(claimed | recorded)]
    blocks = _chart_blocks(experiment, claims, metrics, MAX_BYTES)
    # If not all charts fit, the metrics that abrun knows come first.
    if len(blocks) < len(metrics):
        known_metrics = {metric.key: None for metric in METRICS if metric.key in recorded}
        metrics = [*(claimed | known_metrics | recorded)]
        blocks = _chart_blocks(experiment, claims, metrics, MAX_BYTES)
    num_drawn = len(blocks)
    peaks = memory_peaks(experiment)
    report = {
        # Reasons among the values of evidence as sentences
        "content": {**as_json(content), "evidence": records.as_json(content.evidence)},
        "title": content.verdict,
        "qualifiers": verdict_qualifiers(content),
        "arms": experiment.arms,
        "runs": [
            {"name": str(run), "status": run.status, "failure": run.failure, "num_steps": len(run.steps)}
            | {"last_step": int(run.steps[-1]) if len(run.steps) else None}
            for run in experiment.runs.values()
        ],
        "metrics": metrics[:num_drawn],
        "num_claimed": min(len(claimed), num_drawn),
        "metric_rows": metric_rows(experiment, metrics[:num_drawn]),
        "left_out": {"count": len(metrics) - num_drawn, "names": metrics[num_drawn:][:MAX_NAMED_METRICS]},
        "mismatch": TOKEN_MULT_PROB_ERROR if TOKEN_MULT_PROB_ERROR in metrics[:num_drawn] else None,
        "mismatch_limit": experiment.compare.guards.token_mult_prob_error_median,
        "memory": peaks and asdict(peaks),
        "context": context and asdict(context),
    }
    return [_script("report", _encode_json(report)), *blocks]


def _chart_blocks(
    experiment: RecordedExperiment, claims: Sequence[ClaimResult], metrics: Sequence[str], max_bytes: int
) -> list[str]:
    """Return the chart blocks of the first metrics, as many as fit into `max_bytes`."""
    blocks: list[str] = []
    max_values = min(charts.MAX_VALUES, MAX_VALUES // max(1, len(metrics)))
    for index, metric in enumerate(metrics):
        metric_claims = [claim for claim in claims if claim.claim.metric == metric]
        chart = _encode_json(charts.chart_json(experiment, metric, metric_claims, max_values))
        max_bytes -= len(chart)
        if max_bytes < 0:
            break
        blocks.append(_script(f"chart-{index}", chart))
    return blocks


def _encode_json(data: Any) -> bytes:
    return orjson.dumps(_to_json(data), option=orjson.OPT_SERIALIZE_NUMPY)


def _script(name: str, data: bytes) -> str:
    text = data.decode()
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return f'<script type="application/json" id="{name}">{text}</script>'


def _to_json(value: Any) -> Any:
    """Return the value as JSON and JavaScript can hold it: NaN, infinities and large integers as text."""
    if isinstance(value, str):
        return _replace_surrogates(value)
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_replace_surrogates(str(key)): _to_json(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(member) for member in value]
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


def _replace_surrogates(value: str) -> str:
    """Replace lone surrogates, which a JSON file can bring into a name and UTF-8 cannot encode."""
    return value.encode("utf-8", "replace").decode()


def _read_file(name: str) -> str:
    return resources.files("abrun.report.page").joinpath(name).read_text(encoding="utf-8")


def _minify(name: str) -> str:
    """Return a CSS or JavaScript file without indentation, blank lines and `//` lines.

    This is safe because no string in these files spans lines.
    """
    lines = map(str.strip, _read_file(name).splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _policy_hashes(sources: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# The table of metrics on the page: levels, differences from the baseline, and small curves.

WINDOW = "last 20%"
NUM_POINTS = 40  # of a small curve
CURVE_HEIGHT = 100  # small curves are whole numbers from 0 (lowest) to this
ROUNDING = 1e-6  # relative; a smaller difference or spread counts as none


@np.errstate(all="ignore")  # values that overflow give no level
def metric_rows(experiment: RecordedExperiment, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per metric, the largest difference relative to the spread over seeds first.

    Levels are means over the last 20 % of the steps that all finished runs recorded, in the display unit.
    A metric without such steps has no levels and comes last.
    """
    rows = [_make_row(experiment, index, metric) for index, metric in enumerate(metrics)]
    return sorted(rows, key=lambda row: -max((cell["score"] for cell in row["arms"]), default=-1.0))


def _make_row(experiment: RecordedExperiment, index: int, metric: str) -> dict[str, Any]:
    runs = [run for run in experiment.runs.values() if run.finished and not run.name.rerun]
    runs = [run for run in runs if len(run.series(metric))]
    steps, values = stack_runs(runs, metric)
    largest = float(np.abs(values).max(initial=0.0, where=np.isfinite(values)))
    unit, divisor = display_unit(metric, largest)
    row: dict[str, Any] = {"metric": index, "unit": unit, "baseline": None, "arms": [], "curves": []}
    if not len(steps):
        return row
    first_step, _ = window_bounds(WINDOW, steps, metric)
    levels = _levels(experiment, runs, values[:, steps >= first_step] / divisor, metric)
    by_arm: dict[str, dict[int, float]] = {arm: {} for arm in experiment.arms}
    for name, level in levels.items():
        by_arm[name.arm][name.seed] = level
    baseline = by_arm[experiment.baseline]
    row["baseline"] = float(np.mean([*baseline.values()])) if baseline else None
    row["arms"] = [
        _compare_levels(experiment.arms.index(arm), baseline, by_arm[arm], paired=experiment.compare.paired)
        for arm in experiment.treatments
        if baseline and by_arm[arm]
    ]
    row["curves"] = list(_small_curves(experiment.arms, runs, steps, values))
    return row


def _levels(
    experiment: RecordedExperiment, runs: Sequence[RecordedRun], values: Array, metric: str
) -> dict[RunName, float]:
    """Return one number per run of values [R, W]: its level, by one rule for all runs of an arm.

    As in reduce_arms, it is relative to the baselines only if the whole arm trained on their rollouts.
    """
    rows = {run.name: row for run, row in zip(runs, values, strict=True)}
    recorded_arms = {arm for arm in experiment.treatments if experiment.sides(arm).finished.share_rollouts}
    levels = {}
    for name, row in rows.items():
        baseline = rows.get(RunName(arm=experiment.baseline, seed=name.seed))
        if name.arm in recorded_arms and baseline is not None:
            _, level = reduce_arms(baseline, row, metric, stepwise=True)
        else:
            level = reduce_window(row, metric)
        levels[name] = float(level)
    return levels


def _compare_levels(
    arm: int, baseline: dict[int, float], treatment: dict[int, float], *, paired: bool
) -> dict[str, Any]:
    """Compare the levels of two arms, by seed.

    `score` is the difference in units of the larger sd over seeds; infinite if neither arm varies or only
    one level is finite, and -1 if neither is.
    """
    shared = [seed for seed in baseline if seed in treatment] if paired else []
    changes = [treatment[seed] - baseline[seed] for seed in shared]
    treated_mean, baseline_mean = float(np.mean([*treatment.values()])), float(np.mean([*baseline.values()]))
    difference = float(np.mean(changes)) if changes else treated_mean - baseline_mean
    larger = max(abs(treated_mean), abs(baseline_mean))
    if math.isfinite(difference) and abs(difference) <= ROUNDING * larger:
        difference = 0.0
    several = [[*levels.values()] for levels in (baseline, treatment) if len(levels) > 1]
    spread = max((float(np.std(levels, ddof=1)) for levels in several), default=0.0)
    if spread <= ROUNDING * larger:
        spread = 0.0
    score = abs(difference) / spread if spread else math.inf if difference else 0.0
    if not math.isfinite(difference):
        score = math.inf if math.isfinite(treated_mean) != math.isfinite(baseline_mean) else -1.0
    agreeing = sum(change * difference > 0 for change in changes)
    return {
        "arm": arm,
        "level": treated_mean,
        "difference": difference,
        "score": score,
        "varies": bool(spread),
        "seeds": [agreeing, len(changes)] if difference and len(changes) > 1 else None,
    }


def _small_curves(
    arms: Sequence[str], runs: Sequence[RecordedRun], steps: Steps, values: Array
) -> Iterator[dict[str, Any]]:
    """Yield the mean of each arm as at most NUM_POINTS whole numbers, on a scale shared by the arms."""
    chunks = np.array_split(np.arange(len(steps)), min(NUM_POINTS, len(steps)))
    means: dict[int, Array] = {}
    for index, arm in enumerate(arms):
        rows = values[[run.name.arm == arm for run in runs]]
        if len(rows):
            means[index] = np.array([rows[:, chunk].mean() for chunk in chunks])
    points = np.array([*means.values()])
    is_finite = np.isfinite(points)
    if not is_finite.any():
        return
    low, high = points[is_finite].min(), points[is_finite].max()
    span = high - low
    if not np.isfinite(span):
        return
    for index, mean in means.items():
        share = (mean - low) / span if span > 0 else np.where(np.isfinite(mean), 0.5, np.nan)
        scaled = CURVE_HEIGHT * np.where(np.isfinite(share), share, np.nan)
        points = [None if math.isnan(point) else round(point) for point in scaled.tolist()]
        yield {"arm": index, "points": points}
