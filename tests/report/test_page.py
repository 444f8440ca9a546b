"""The HTML report: self-contained, safe with any name, true to the data where it thins it, deterministic."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.codes import Code
from abrun.recipe.claims import Compare
from abrun.report import page as page_package
from abrun.report.page import charts, metric_rows, render_page
from abrun.report.panels import NUM_BUCKETS, NUM_WINDOWS, bucket_indices, bucket_means, memory_peaks
from abrun.runs.layout import RunName
from abrun.verdict.evidence import Evidence
from abrun.verdict.verdict_file import RunEnvironment
from tests.snapshot import Snapshot
from tests.verdict.recorded import run_of
from tests.verdict.verdicts import claim, section, verdict

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\"quoted\" 'name' & <b>bold</b>",
    "line\nbreak/../../etc\\passwd",
    "separators \u2028 and \u2029, half a pair \ud800, <!--<script>",
)


def experiment(
    values, arms=("baseline", "treatment"), name="simulated", failed=(), **settings
) -> RecordedExperiment:
    """`values`: {(arm, seed[, rerun]): {metric: values or (steps, values)}}."""
    runs = {}
    for (arm, *numbers), metrics in values.items():
        key = RunName(arm=arm, seed=numbers[0], rerun=numbers[1] if numbers[1:] else 0)
        status = "failed" if (arm, *numbers) in failed else "finished"
        runs[key] = run_of(metrics, name=key, place=str(key), status=status)
    return RecordedExperiment(name=name, arms=tuple(arms), compare=Compare(**settings), runs=runs)


def learning(num_steps=40, seeds=3, metrics=("train/reward",), arms=("baseline", "treatment")):
    random = np.random.default_rng(0)

    def curve():
        return np.linspace(0.2, 0.7, num_steps) + 0.02 * random.standard_normal(num_steps)

    return {(arm, seed): {metric: curve() for metric in metrics} for arm in arms for seed in range(seeds)}


def foreign(text):
    return Code.FOREIGN_TEXT(text=text)


def hostile_page():
    """Every name that a run or a recipe brings in is hostile."""
    arms = ("baseline", HOSTILE[0])
    of_experiment = experiment(learning(metrics=HOSTILE, arms=arms), arms=arms, name=HOSTILE[1])
    claims = [claim(metric=metric, arm=arms[1], margin_text=HOSTILE[0]) for metric in HOSTILE]
    values = {"guard": HOSTILE[0], "limit": 1, "value": 1}
    guard = Evidence(kind="guard", arm=arms[1], result="fail", reason=foreign(HOSTILE[3]), values=values)
    environment = RunEnvironment(runs=[*HOSTILE], environment={HOSTILE[0]: {HOSTILE[1]: HOSTILE}})
    content = verdict(
        claims,
        experiment=HOSTILE[1],
        reasons=[*map(foreign, HOSTILE)],
        notes=[*map(foreign, HOSTILE)],
        not_tested=[*map(foreign, HOSTILE)],
        reference=HOSTILE[0],
        evidence=[guard],
        environments=[environment],
        arms={arms[1]: section(treatment_diff={HOSTILE[0]: [HOSTILE[1], {HOSTILE[2]: 2**70}]})},
    )
    return render_page(of_experiment, content)


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts, styles and data blocks."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.open = [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open in ("script", "style", "title"):
            self.texts.append((*self.tags[-1], data))

    def data(self, name):
        return json.loads("".join(text for _, attrs, text in self.texts if attrs.get("id") == name))


def drawn(values, claims=(), metric="train/reward", **options):
    return charts.chart_json(experiment(values, **options), metric, claims)


def test_nothing_is_loaded():
    page = render_page(experiment(learning()), verdict([claim()]))
    for tag, attributes in Page(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "href", "srcset", "style", "onclick", "onload"} & attributes.keys()
    code = re.sub(r"/\*! https://github.com/leeoniya/uPlot .*?\*/", "", page)
    assert re.findall(r"https?://[^\"' )]*", code) == ["http://www.w3.org/2000/svg"]  # a name, never fetched
    assert "url(" not in code and "@import" not in code and "fetch(" not in code


def test_the_policy_allows_exactly_what_the_page_holds():
    page = Page(render_page(experiment(learning()), verdict([claim()])))
    policy = next(attrs for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy["content"].split(";"))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"

    def hashes(wanted):
        blocks = [text for tag, attrs, text in page.texts if tag == wanted and "type" not in attrs]
        digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in blocks]
        return [f"'sha256-{digest}'" for digest in digests]

    assert rules["script-src"].split() == hashes("script")
    assert len(hashes("script")) == len(page_package.SCRIPTS)
    assert rules["style-src"].split() == hashes("style") and len(hashes("style")) == 2


def test_names_are_data_and_nothing_else():
    page = hostile_page()
    page.encode()  # half a surrogate pair is gone
    assert "<img" not in page and "onerror=alert(1)>" not in page
    assert "\u2028" not in page and "\u2029" not in page
    tags = [tag for tag, _ in Page(page).tags]
    assert set(tags) == {"html", "head", "meta", "title", "style", "body", "noscript", "p", "script"}
    report = Page(page).data("report")
    assert report["arms"][1] == HOSTILE[0] and set(HOSTILE[:3]) < set(report["metrics"])
    assert report["content"]["arms"][HOSTILE[0]]["treatment_diff"][HOSTILE[0]][1] == {HOSTILE[2]: str(2**70)}


def sources():
    folder = Path(charts.__file__).parent
    own = [path for path in folder.iterdir() if path.suffix in (".html", ".js") and "uPlot" not in path.name]
    assert len(own) == len(page_package.SCRIPTS) - 1 + 2  # without uPlot, with two templates
    return [path.read_text() for path in own]


def test_no_markup_is_made_from_strings():
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
    assert not any(re.search(forbidden, source) for source in sources())


@pytest.mark.parametrize("num_steps", [501, 749, 1000, 10_000, 12_345])
def test_a_bucket_keeps_its_smallest_and_largest_value_in_their_order(num_steps):
    random = np.random.default_rng(1)
    values = {(arm, 0): {"x": random.standard_normal(num_steps)} for arm in ("baseline", "treatment")}
    chart = drawn(values, metric="x")
    assert chart["num_buckets"] == NUM_BUCKETS and (np.diff(chart["steps"]) > 0).all()
    shown = chart["rows"][chart["arms"][1]["seeds"][0]["row"]].reshape(-1, 2)
    covered = 0
    for (first, last), pair in zip(chart["ends"], shown, strict=True):
        held = values["treatment", 0]["x"][first - 1 : last]
        expected = [held.min(), held.max()] if held.argmin() < held.argmax() else [held.max(), held.min()]
        assert pair == pytest.approx(expected, rel=1e-6)
        covered += len(held)
    assert covered == num_steps


def test_mean_and_band_are_those_of_every_step_before_they_are_thinned():
    values = learning(num_steps=2000, seeds=4)
    of_arm = np.array([values["baseline", seed]["train/reward"] for seed in range(4)])
    mean, sd = of_arm.mean(axis=0), of_arm.std(axis=0, ddof=1)
    chart = drawn(values)
    arm = chart["arms"][0]
    first, last = chart["ends"][7]
    for row, whole in zip((arm["mean"], *arm["band"]), (mean, mean - sd, mean + sd), strict=True):
        shown = chart["rows"][row].reshape(-1, 2)
        assert shown[7, 0] == pytest.approx(whole[first - 1 : last].mean(), rel=1e-6)
        assert np.isnan(shown[:, 1]).all() and str(row) not in chart["gaps"]


@pytest.mark.parametrize("num_steps", [501, 749, 10_007])
def test_the_mean_of_a_bucket_counts_every_step_once_and_no_gap(num_steps):
    values = np.random.default_rng(3).standard_normal((2, num_steps))
    values[0, 17], values[1, :40] = np.nan, np.nan
    buckets = bucket_indices(num_steps)
    assert buckets is not None
    means = bucket_means(values, buckets)
    for shown, (first, last) in zip(means.T, buckets[:, [0, -1]], strict=True):
        held = values[:, first : last + 1]
        expected = [np.nan if np.isnan(row).all() else np.nanmean(row) for row in held]
        assert shown == pytest.approx(expected, nan_ok=True)
    chart = drawn({("baseline", 0): {"x": values[1]}, ("treatment", 0): {"x": values[0]}}, metric="x")
    mean = chart["arms"][0]["mean"]
    whole_buckets_of_nan = int(np.isnan(means[1]).sum())
    assert chart["gaps"].get(str(mean), np.empty(0)).tolist() == [
        2 * at for at in range(whole_buckets_of_nan)
    ]


def test_nan_is_a_gap_that_is_counted_and_an_absent_step_is_not(snapshot):
    values: dict[Any, Any] = learning()
    values["treatment", 1]["train/reward"][29:] = [np.nan] * 10 + [np.inf]
    values["baseline", 0]["train/reward"] = (np.arange(2, 41, 2), np.linspace(0.2, 0.7, 20))
    chart = drawn(values)
    snapshot("\n".join(chart["notes"]))
    broken, sparse = chart["arms"][1]["seeds"][1]["row"], chart["arms"][0]["seeds"][0]["row"]
    assert chart["gaps"][str(broken)].tolist() == list(range(29, 40))
    assert str(sparse) not in chart["gaps"] and np.isnan(chart["rows"][sparse][0])
    assert chart["gaps"][str(chart["arms"][1]["mean"])].tolist() == list(range(29, 40))


def test_a_metric_that_is_nan_throughout_has_a_chart_without_values(snapshot):
    values = {key: {"x": np.full(2000, np.nan)} for key in learning()}
    chart = drawn(values, metric="x", claims=[claim(metric="x")])
    assert np.isnan(chart["rows"]).all()
    snapshot(chart["notes"][0])
    render_page(experiment(values), verdict([claim(metric="x")]))


def test_a_failed_run_is_drawn_and_is_no_part_of_the_mean(snapshot):
    values = learning()
    values["treatment", 2]["train/reward"] = np.full(17, 5.0)
    chart = drawn(values, claims=[claim()], failed=[("treatment", 2)])
    arm = chart["arms"][1]
    assert [seed["finished"] for seed in arm["seeds"]] == [True, True, False] and arm["count"] == 2
    assert chart["rows"][arm["mean"]].max() < 1 and len(chart["differences"][0]["pairs"]) == 2
    snapshot("\n".join(chart["notes"]))


def test_differences_stand_on_the_scale_of_the_claim():
    steps = np.arange(40)
    metric, flat = "train/grad_norm", np.zeros(40)
    values: dict[Any, Any] = {("baseline", seed): {metric: np.exp(0.1 * seed + flat)} for seed in range(3)}
    values |= {("treatment", seed): {metric: np.exp(0.12 * seed + flat)} for seed in range(3)}
    values["treatment", 0][metric] = np.where(steps == 3, 0.0, 1.0)  # outside of the logarithm's domain
    values["baseline", 0, 1] = {metric: np.exp(0.5 + flat)}
    chart = drawn(values, [claim(metric=metric, transform="log")] * 2, metric)
    panel, *others = chart["differences"]
    assert not others and panel["arm"] == 1 and panel["unit"] == "log ratio"
    assert chart["rows"][panel["pairs"][2]["row"]] == pytest.approx(np.full(40, 0.04), abs=1e-6)
    assert chart["gaps"][str(panel["mean"])].tolist() == [3]
    assert chart["rows"][panel["reruns"][0]["row"]] == pytest.approx(np.full(40, 0.5))
    assert len(panel["windows"]) == NUM_WINDOWS and panel["windows"][0]["steps"][0] == 1
    from scipy import stats

    reach = stats.t.ppf(1 - 0.025 / 8, 2) * 0.02 / 3**0.5
    assert panel["windows"][5]["interval"] == pytest.approx((0.02 - reach, 0.02 + reach))


def test_numbers_that_float32_would_blur_stay_exact():
    values = {("baseline", 0): {"x": 1.7e9 + np.arange(40)}, ("treatment", 0): {"x": np.full(40, 1e300)}}
    chart = drawn(values, metric="x")
    assert chart["rows"][0].tolist() == values["baseline", 0]["x"].tolist()


def test_memory_is_the_mean_over_seeds_by_phase():
    metric = "memory/{}/peak_allocated_bytes"
    values = {
        (arm, seed): {metric.format("logprobs"): [1, (2 + seed) * 2**30], metric.format("loss"): [2**30, 1]}
        for arm in ("baseline", "treatment")
        for seed in range(3)
    }
    memory = memory_peaks(experiment(values))
    assert memory and memory.unit == "GiB" and memory.phases == ["overall", "logprobs", "loss"]
    assert memory.means == [[3, 3, 1], [3, 3, 1]]
    assert memory.held_by == ["logprobs", "logprobs"]
    assert memory_peaks(experiment(learning())) is None


NOTHING = {("baseline", 0): {}, ("treatment", 0): {}}


@pytest.mark.parametrize("values", [{}, NOTHING, learning(num_steps=1, seeds=1)])
def test_little_data_still_has_a_page(values):
    unknown = dict.fromkeys(("margin", "mean_difference", "ci90", "interval", "certified_bound"))
    bare = claim(num_pairs=0, steps=(0, 0), differences=[], **unknown)
    page = Page(render_page(experiment(values), verdict([bare], verdict="INVALID")))
    assert page.data("report")["content"]["verdict"] == "INVALID"


def test_a_large_experiment_is_a_small_page():
    random = np.random.default_rng(2)
    metrics = [f"train/metric-{index:02d}" for index in range(40)]
    values = {
        (arm, seed): {metric: random.standard_normal(10_000) for metric in metrics}
        for arm in ("baseline", "treatment")
        for seed in range(10)
    }
    large = experiment(values)
    claims = [claim(metric=metric, steps=(8001, 10_000)) for metric in metrics[:3]]
    assert len(render_page(large, verdict(claims)).encode()) < 10e6


def test_a_claim_s_last_step_is_on_the_axis_of_many_steps():
    """The claim's interval stands at its last step: where buckets end before it, it would not be drawn."""
    found = drawn(learning(num_steps=1203), [claim(steps=(964, 1203))])
    assert found["num_buckets"] == NUM_BUCKETS
    assert (found["steps"][0], found["steps"][-1]) == (1, 1203)
    assert (np.diff(found["steps"]) > 0).all()


def test_many_runs_are_drawn_thinly_and_the_page_says_so(snapshot: Snapshot) -> None:
    """100 seeds of 600 steps: means of all, 32 lines, fewer buckets; the extremes of a bucket stay."""
    values = learning(num_steps=600, seeds=100)
    chart = drawn(values, [claim()])
    (baseline, _) = chart["arms"]
    assert baseline["count"] == 100 and len(baseline["seeds"]) == 32
    (difference,) = chart["differences"]
    assert difference["num_pairs"] == 100 and len(difference["pairs"]) == 32
    snapshot("\n".join(chart["notes"]))
    assert (
        chart["rows"].size <= charts.MAX_VALUES and charts.MIN_BUCKETS <= chart["num_buckets"] < NUM_BUCKETS
    )


def test_the_scripts_of_the_page_declare_each_name_once() -> None:
    """They stand in one page, where a second `const` of a name stops all of them."""
    names = [
        name
        for path in sorted((Path(page_package.__file__).parent).glob("*.js"))
        if not path.name.startswith("uPlot")
        for name in re.findall(
            r"^(?:const|let|var|class|(?:async )?function\*?) +([\w$]+)", path.read_text(), re.MULTILINE
        )
    ]
    assert len(names) > 50 and sorted(set(names)) == sorted(names)


# --- experiments of many metrics ---


def of_many_metrics(num_metrics: int, num_steps: int = 120) -> str:
    random = np.random.default_rng(5)
    metrics = [
        "train/reward",
        "train/entropy",
        *(f"extra/metric-{index:05d}" for index in range(num_metrics)),
    ]
    values = {
        (arm, seed): dict(zip(metrics, random.standard_normal((len(metrics), num_steps)), strict=True))
        for arm in ("baseline", "treatment")
        for seed in range(4)
    }
    return render_page(experiment(values), verdict([claim(metric="extra/metric-00003", steps=(97, 120))]))


def test_what_a_page_leaves_out_is_named_on_it(monkeypatch) -> None:
    monkeypatch.setattr(page_package, "MAX_BYTES", 300_000)
    data = Page(of_many_metrics(300)).data
    report = data("report")
    assert report["metrics"][:3] == ["extra/metric-00003", "train/reward", "train/entropy"]
    assert report["left_out"]["count"] == 302 - len(report["metrics"]) > 0
    assert len(report["left_out"]["names"]) == 20
    assert [data(f"chart-{index}")["metric"] for index in range(len(report["metrics"]))] == report["metrics"]


def test_a_page_of_usual_size_has_every_seed() -> None:
    data = Page(of_many_metrics(100)).data
    assert len(data("report")["metrics"]) == 102
    assert all(len(arm["seeds"]) == 4 for index in range(102) for arm in data(f"chart-{index}")["arms"])


# --- the table of metrics ---


def rows_of(values, **options):
    of = experiment(values, **options)
    metrics = of.metrics()
    return {metrics[row["metric"]]: row for row in metric_rows(of, metrics)}


def test_the_table_has_levels_differences_and_curves_the_most_telling_first():
    shared = [0.1, 0.2, 0.3]

    def run(arm, seed):
        treated, ramp = float(arm == "treatment"), np.arange(10.0)
        return {
            "same": ramp + shared[seed],
            "noisy": np.full(10, shared[seed] - 0.05 * treated),
            "shifted": np.where(ramp < 8, 5.0, shared[seed] + treated),
            "memory/loss/peak_allocated_bytes": np.full(10, (2.0 + treated) * 2**30),
            "rounding": np.full(10, 1.0 + 1e-9 * treated),
            "rounded spread": np.full(10, 1.0 + 1e-15 * seed + treated),
            "nan": np.full(10, np.nan),
            "diverged": np.where(treated, np.inf, ramp),
        }

    rows = rows_of({(arm, seed): run(arm, seed) for arm in ("baseline", "treatment") for seed in range(3)})
    memory, shifted, noisy = (rows[name] for name in ("memory/loss/peak_allocated_bytes", "shifted", "noisy"))
    assert {*list(rows)[:3]} == {"memory/loss/peak_allocated_bytes", "diverged", "rounded spread"}
    assert list(rows)[3:5] == ["shifted", "noisy"] and list(rows)[-1] == "nan"
    assert (memory["unit"], memory["baseline"], memory["arms"][0]["level"]) == ("GiB", 2.0, 3.0)
    assert memory["arms"][0]["score"] == np.inf and not memory["arms"][0]["varies"]
    assert shifted["baseline"] == pytest.approx(0.2)  # the last 2 of 10 steps
    (cell,) = shifted["arms"]
    assert (cell["level"], cell["difference"], cell["score"]) == pytest.approx((1.2, 1.0, 10.0))
    assert cell["seeds"] == [3, 3] and noisy["arms"][0]["seeds"] == [3, 3]
    assert not rows["rounded spread"]["arms"][0]["varies"]
    assert rows["same"]["arms"][0]["difference"] == rows["rounding"]["arms"][0]["difference"] == 0.0
    assert [curve["points"][0] for curve in rows["same"]["curves"]] == [0, 0]
    assert rows["same"]["curves"][1]["points"][-1] == 100 and rows["nan"]["curves"] == []


def test_a_row_covers_the_finished_runs_and_counts_no_rerun():
    values: dict[Any, Any] = learning(num_steps=300)
    values["treatment", 2] = {"train/reward": np.full(17, 50.0)}
    values["baseline", 0, 1] = {"train/reward": np.full(300, 50.0)}
    values["treatment", 0]["alone"] = np.ones(300)
    rows = rows_of(values, failed=[("treatment", 2)])
    (cell,) = rows["train/reward"]["arms"]
    assert cell["level"] < 1 and cell["seeds"][1] == 2
    assert all(len(curve["points"]) == 40 for curve in rows["train/reward"]["curves"])
    assert rows["alone"]["baseline"] is None and rows["alone"]["arms"] == []


@pytest.mark.parametrize("all_recorded", [True, False])
def test_the_levels_of_an_arm_are_reduced_by_one_rule(all_recorded):
    """Medians at different steps: relative to the baseline if all runs of the arm saw its rollouts."""
    metric = "train/token_mult_prob_error"
    curves = {"baseline": [1.0, 2.0, 9.0], "treatment": [3.0, 1.5, 9.5]}
    values = {(arm, seed): {metric: curve * 5} for arm, curve in curves.items() for seed in (0, 1)}
    simulated = experiment(values)
    recorded = [RunName(arm="treatment", seed=seed) for seed in ((0, 1) if all_recorded else (0,))]
    runs = {
        name: replace(run, config={"rollout.engine": "recorded"}) if name in recorded else run
        for name, run in simulated.runs.items()
    }
    (row,) = metric_rows(replace(simulated, runs=runs), [metric])
    # last 20 %: one run of the three steps
    assert row["baseline"] == 2.0 and row["arms"][0]["level"] == (2.5 if all_recorded else 3.0)
