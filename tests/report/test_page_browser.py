"""The HTML report in a real browser: it draws, reacts, loads nothing and runs nothing that a name brings in.

Needs `playwright` from PyPI and a Chromium of the system (Debian: `apt-get install chromium`), or its path in
ABRUN_CHROMIUM; playwright's own download is not used. Without them these tests fail, they do not skip.
"""

import os
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from abrun.messages.codes import Code
from abrun.recipe.claims import Claim
from abrun.report.comparing import compare, with_options
from abrun.report.context import make_context
from abrun.report.page import render_page
from abrun.verdict.decide import judge
from abrun.verdict.evidence import Evidence
from abrun.verdict.verdict_file import build_verdict_file
from tests.report.test_page import experiment, foreign, hostile_page, learning
from tests.verdict.verdicts import claim, verdict

pytestmark = pytest.mark.slow
CURVE, DIFFERENCE = ".figure .plot.curve", ".figure .plot.difference"


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("ABRUN_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("no Chromium: apt-get install chromium, or name one in ABRUN_CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ImportError:
        pytest.fail("no playwright: pip install playwright (its browsers are not needed)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page, and when the test has driven it asserts that it was silent and loaded nothing."""

    @contextmanager
    def open_page(html, width=1280, scheme="light"):
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(5000)
        said, requested = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(path.as_uri())
        yield page
        page.close()
        assert said == [] and requested == [path.as_uri()]

    return open_page


@pytest.fixture(scope="module")
def usual():
    values = learning(num_steps=300, metrics=("train/reward", "train/entropy", "train/token_mult_prob_error"))
    for metrics in values.values():
        metrics["train/token_mult_prob_error"] += 1
    claims = [claim(steps=(241, 300), baseline_mean=0.69, treatment_mean=0.68)]
    return render_page(experiment(values), verdict(claims, not_tested=["Evaluation."]))


def ink(page, selector=CURVE):
    """What a chart shows: every pixel of its canvas, as one comparable string."""
    return page.locator(f"{selector} canvas").first.evaluate("canvas => canvas.toDataURL()")


def reach(page, selector=CURVE):
    """First and last step that a chart shows."""
    index = 0 if selector == CURVE else 1
    scale = page.evaluate(f"document.querySelector('.figure').figure.plots[{index}].scales.x")
    return scale["min"], scale["max"]


def drag(page, first, last):
    box = page.locator(f"{CURVE} .u-over").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + first * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + last * box["width"], y, steps=5)
    page.mouse.up()


def test_the_verdict_comes_first_and_the_charts_below_are_drawn_when_seen(opened, usual):
    with opened(usual) as page:
        assert page.locator("h1").inner_text().endswith("MATCH")
        finding = page.locator(".finding").inner_text()
        assert finding.startswith("train/reward: treatment 0.68, baseline 0.69. The difference (")
        assert finding.endswith(") is within the margin \u00b10.05.")
        assert page.locator(".arms code").all_inner_texts() == ["policy.logprobs.impl", "logits", "chunked"]
        assert page.locator("h2").first.inner_text() == "Claims"
        page.locator(CURVE).first.scroll_into_view_if_needed()
        page.wait_for_selector(f"{DIFFERENCE} canvas")
        assert page.locator(".metric canvas").count() == 0
        row = page.locator("summary", has_text="train/entropy")
        assert len(row.locator(".small path").all()) == 2 and "of 3 seeds" in row.inner_text()
        row.click()
        page.wait_for_selector(".metric canvas")


def test_an_arm_goes_and_comes_back_everywhere(opened, usual):
    with opened(usual) as page:
        page.wait_for_selector(f"{CURVE} canvas")
        before, toggle = ink(page), page.locator(".bar button", has_text="treatment")
        toggle.click()
        page.wait_for_timeout(50)
        assert toggle.get_attribute("aria-pressed") == "false" and ink(page) != before
        assert page.locator(DIFFERENCE).first.is_hidden()
        toggle.focus()
        page.keyboard.press("Enter")
        page.wait_for_timeout(50)
        assert toggle.get_attribute("aria-pressed") == "true" and ink(page) == before
        page.locator(".figure .tools .arm", has_text="baseline").first.click()
        page.wait_for_timeout(50)
        assert ink(page) != before and page.locator(DIFFERENCE).first.is_visible()


def test_dragging_zooms_both_charts_and_a_double_click_resets(opened, usual):
    with opened(usual) as page:
        page.locator(CURVE).first.scroll_into_view_if_needed()
        page.wait_for_selector(f"{DIFFERENCE} canvas")
        assert reach(page) == (1, 300)
        drag(page, 0.25, 0.5)
        zoomed = reach(page)
        assert zoomed == pytest.approx((76, 150), abs=4)
        assert reach(page, DIFFERENCE) == pytest.approx(zoomed, abs=1)
        page.locator("button", has_text="Log scale").first.click()
        assert reach(page) == pytest.approx(zoomed)  # redrawing keeps the zoom
        page.locator(f"{CURVE} .u-over").first.dblclick()
        assert reach(page) == reach(page, DIFFERENCE) == (1, 300)
        drag(page, 0.5, 0.75)
        page.locator("button", has_text="Reset zoom").first.click()
        page.wait_for_timeout(50)
        assert reach(page) == reach(page, DIFFERENCE) == (1, 300)


def test_hovering_tells_step_means_and_seeds_in_both_charts(opened, usual):
    with opened(usual) as page:
        page.locator(CURVE).first.scroll_into_view_if_needed()
        page.wait_for_selector(f"{DIFFERENCE} canvas")
        page.locator(f"{CURVE} .u-over").first.hover()
        tip = page.locator(f"{CURVE} .tip").first.inner_text()
        assert tip.startswith("step 15") and "baseline" in tip and "treatment" in tip and "2: 0." in tip
        assert page.locator(f"{DIFFERENCE} .tip").first.inner_text().startswith(tip.split("\n")[0])
        page.mouse.move(0, 0)
        assert page.locator(f"{CURVE} .tip").first.is_hidden()


def test_log_scale_and_theme_redraw(opened, usual):
    with opened(usual) as page:
        page.wait_for_selector(f"{CURVE} canvas")
        before = ink(page)
        page.locator("button", has_text="Log scale").first.click()
        page.wait_for_timeout(50)
        assert page.locator("button", has_text="Log scale").first.get_attribute("aria-pressed") == "true"
        logarithmic = ink(page)
        assert logarithmic != before
        page.locator("button.theme").click()
        page.wait_for_timeout(50)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 22, 25)"
        assert ink(page) != logarithmic


def test_a_description_opens_with_its_finding_and_a_curve_and_no_empty_section(opened):
    values = learning(arms=("old", "new"), metrics=("train/reward", "train/entropy"))
    for (arm, _), metrics in values.items():
        metrics["train/reward"] -= 0.2 * (arm == "new")
    of = experiment(values, arms=("old", "new"))
    content = build_verdict_file(of, judge(of, []), None)
    with opened(render_page(of, content, make_context(of, content, "abrun compare old new"))) as page:
        assert page.title() == "DESCRIPTION: simulated"
        assert page.locator("h1").inner_text().endswith("DESCRIPTION")
        finding = page.locator(".finding").inner_text()
        assert finding.startswith("train/reward is 0.2") and "lower in new: " in finding
        assert "lower in 3 of 3 seeds" in finding
        assert page.locator("#curves h3").inner_text() == "train/reward"
        page.locator(CURVE).first.scroll_into_view_if_needed()
        page.wait_for_selector(f"{CURVE} canvas")
        empty = {"claims", "step-one", "cost", "configuration", "final-weights"}
        assert not empty & set(page.locator("section").evaluate_all("all => all.map(one => one.id)"))
        assert "exit code" not in page.locator("main").inner_text()


def test_without_a_deciding_claim_the_first_reason_is_the_finding(opened):
    reasons = [foreign("a run failed"), foreign("a note")]
    content = verdict([claim(result="not tested")], verdict="MISMATCH", reasons=reasons)
    with opened(render_page(experiment(learning()), content)) as page:
        assert page.locator(".finding").inner_text() == "a run failed"
        assert page.locator(".reasons li").all_inner_texts() == ["a note"]
        assert page.locator(".forest").count() == 0


def test_no_table_is_cut_on_a_phone(opened):
    arms = ("baseline", "a-rather-long-name", "another-rather-long-name")
    claims = [claim(arm=arm, baseline_mean=0.7, treatment_mean=0.7) for arm in arms[1:]]
    values = {"metric": "train/reward", "a figure with a long name": "0123456789" * 3}
    evidence = [Evidence(kind="step one", arm=arms[1], result="pass", values=values)]
    page_text = render_page(experiment(learning(arms=arms), arms=arms), verdict(claims, evidence=evidence))
    with opened(page_text, width=390) as page:
        cut = ".scroll", "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
        assert page.locator(cut[0]).evaluate_all(cut[1]) == 0
        labels = page.locator("td").evaluate_all("all => all.map(one => one.dataset.label)")
        assert f" {arms[1]}" in labels and not any("object" in label for label in labels)


def test_a_mismatch_counts_what_fails_and_says_the_finding_once(opened):
    values = {"metric": "train/loss", "seed": 0}
    check = Evidence(kind="step one", arm="treatment", result="fail", values=values)
    checks = [check, check, replace(check, result="pass")]
    over = {"pairs": 3, "runs": None, "welch": False, "steps": [33, 40], "window": "last 20%"}
    told = {"metric": "train/reward", "arm": "treatment", "baseline_arm": "baseline", "margin": "±0.05"}
    told |= {
        "margin_unit": "",
        "transform": "identity",
        "over": over | {"unit": "seed", "recipe": False, "axis": "steps"},
    }
    told |= {"alpha": 0.05, "difference": -0.2, "interval": [-0.3, -0.1], "detected": None, "p_beyond": 0.01}
    broken = claim(result="different", mean_difference=-0.2, baseline_mean=0.7, treatment_mean=0.5)
    for warnings, shown in (([], 1), ([foreign("look out")], 2)):
        reasons = [foreign("step one differs"), Code.CLAIM_DIFFERS(**told, warnings=warnings)]
        content = verdict([broken], verdict="MISMATCH", reasons=reasons, evidence=checks)
        with opened(render_page(experiment(learning()), content)) as page:
            assert page.locator(".meaning").inner_text() == "2 step-one checks and 1 claim fail."
            assert page.locator(".reasons li").count() == shown


def test_a_command_is_copied(browser, tmp_path):
    of, content = experiment(learning()), verdict([claim()])
    path = tmp_path / "report.html"
    path.write_text(render_page(of, content, make_context(of, content, "abrun compare 'a b'")))
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(path.as_uri())
    page.locator("#versions .command button").click()
    page.locator("button", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "abrun compare 'a b'"
    context.close()


def test_nothing_is_cut_on_a_phone(opened):
    values = learning(metrics=("train/reward", "train/entropy", "train/" + "length_" * 12))
    of, content = experiment(values), verdict([claim(), claim(metric="train/entropy")])
    command = "abrun compare " + "a-long-name/of-runs " * 9
    with opened(render_page(of, content, make_context(of, content, command)), width=390) as page:
        fits = "all => all.every(one => one.scrollWidth <= one.clientWidth + 1)"
        for part in (".scroll", ".command code", ".metric summary", ".banner"):
            assert page.locator(part).count() and page.locator(part).evaluate_all(fits), part
        labels = page.locator("#claims td").evaluate_all("all => all.map(one => one.dataset.label)")
        assert {"metric", "result", "margin", "certified bound"} <= set(labels)


@pytest.mark.parametrize("width", [375, 1280])
def test_hostile_names_are_only_text_and_fit(opened, width):
    with opened(hostile_page(), width=width) as page:
        for position in range(0, 9000, 400):
            page.evaluate(f"scrollTo(0, {position})")
            page.wait_for_timeout(20)
        page.locator(f"{CURVE} .u-over").first.hover()
        assert page.locator("img").count() == 0
        assert "</script><img src=x onerror=alert(1)>" in page.locator("main").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_odd_values_are_drawn_without_a_fault(opened):
    values = learning()
    for index, (key, metrics) in enumerate(values.items()):
        metrics["nan"] = np.full(40, np.nan)
        metrics["huge"] = np.full(40, (-1) ** index * 1e38)
        metrics["tiny"] = np.linspace(1e-300, 2e-300, 40)
        metrics["negative"] = np.linspace(-2.0, -1.0, 40)
        metrics["constant"] = np.ones(40)
        metrics["alone"] = np.array([1.0])
        if key[0] == "baseline":
            metrics["holes"] = np.where(np.arange(40) % 2, np.nan, 1.0)
    claims = [claim(), claim(metric="nan"), claim(metric="huge"), claim(metric="alone", steps=(1, 1))]
    with opened(render_page(experiment(values), verdict(claims))) as page:
        page.locator("button", has_text="Open all").click()
        for position in range(0, 9000, 300):
            page.evaluate(f"scrollTo(0, {position})")
            page.wait_for_timeout(20)
        assert page.locator("text=No finite value").count() == 1
        assert page.locator(".plot.curve canvas").count() == 7
        for button in page.locator("button:enabled", has_text="Log scale").all():
            button.click()


def test_paper_shows_the_claims_in_light_colours(opened, usual, tmp_path):
    with opened(usual, scheme="dark") as page:
        page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
        assert (tmp_path / "report.pdf").stat().st_size > 50_000
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.locator("canvas").count() >= 3
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") is None


def test_a_large_experiment_opens_quickly_and_stays_fluid(opened):
    random = np.random.default_rng(2)
    metrics = [f"train/metric-{index:02d}" for index in range(40)]
    values = {
        (arm, seed): {metric: random.standard_normal(10_000) for metric in metrics}
        for arm in ("baseline", "treatment")
        for seed in range(10)
    }
    html = render_page(experiment(values), verdict([claim(metric=metrics[0], steps=(8001, 10_000))]))
    with opened(html) as page:
        page.locator("button", has_text="Open all").click()
        drawn_at_once = page.evaluate("document.querySelectorAll('canvas').length")
        assert drawn_at_once < 10
        page.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
        page.wait_for_timeout(500)
        assert 2 < page.evaluate("document.querySelectorAll('canvas').length") < 20
        page.locator(f"{CURVE} .u-over").first.hover()
        assert "steps " in page.locator(f"{CURVE} .tip").first.inner_text()
        assert "10,000 steps drawn in 202 buckets" in page.locator(".resolution").first.inner_text()


def test_a_claim_that_ends_after_its_metric_s_last_step_is_drawn(opened, usual):
    """As of a validation every 35 steps: the window's last step is the run's."""
    values = learning(num_steps=34)

    def drawn(end, interval):
        page_of = verdict([claim(steps=(28, end), interval=interval)])
        with opened(render_page(experiment(values), page_of)) as page:
            page.locator(DIFFERENCE).first.scroll_into_view_if_needed()
            page.wait_for_selector(f"{DIFFERENCE} canvas")
            return ink(page, DIFFERENCE)

    assert drawn(40, (-0.01, 0.01)) == drawn(34, (-0.01, 0.01)) != drawn(34, None)


# --- long runs, numbers to take away, completions, the claims on one scale ---


@pytest.fixture(scope="module")
def long():
    return render_page(
        experiment(learning(num_steps=10_000)), verdict([claim(steps=(8001, 10_000), interval=(-0.01, 0.02))])
    )


def lines(page, selector=CURVE):
    """How many lines a chart draws, bands left out."""
    index = 0 if selector == CURVE else 1
    plot = f"document.querySelector('.figure').figure.plots[{index}]"
    edge = 0.5  # the width of a band's edge
    return page.evaluate(f"{plot}.series.slice(1).filter((one) => one.width > {edge}).length")


def mean_drawn(page):
    plot = "document.querySelector('.figure').figure.plots[0]"
    values = page.evaluate(f"{plot}.data[{plot}.series.length - 1]")
    return np.array([value for value in values if value is not None])


def test_many_steps_are_drawn_as_means_until_seeds_are_asked_for(opened, long, usual):
    with opened(long) as page:
        page.wait_for_selector(f"{DIFFERENCE} canvas")
        assert (lines(page), lines(page, DIFFERENCE)) == (2, 1)
        seeds = page.get_by_role("button", name="Seeds", exact=True).first
        assert seeds.get_attribute("aria-pressed") == "false"
        seeds.click()
        assert (lines(page), lines(page, DIFFERENCE)) == (8, 4)
        assert seeds.get_attribute("aria-pressed") == "true"
    with opened(usual) as page:
        page.wait_for_selector(f"{DIFFERENCE} canvas")
        assert (lines(page), lines(page, DIFFERENCE)) == (8, 4)


def test_smoothing_draws_running_means_and_nothing_else(opened, long):
    with opened(long) as page:
        page.wait_for_selector(f"{DIFFERENCE} canvas")
        before = mean_drawn(page)
        page.locator(".figure button", has_text="Smooth").first.click()
        after = mean_drawn(page)
        assert len(before) == len(after) == 250
        expected = [before[max(0, at - 6) : at + 7].mean() for at in range(250)]
        assert after == pytest.approx(np.array(expected))
        page.locator(".figure button", has_text="Smooth").first.click()
        assert mean_drawn(page) == pytest.approx(before, abs=0)


def test_the_numbers_of_a_chart_are_saved_as_a_table(browser, tmp_path):
    """Not by `opened`: what the page makes itself and saves counts as a request."""
    import csv

    values = learning(num_steps=30)
    values["treatment", 1]["train/reward"][4] = np.nan
    names = {"baseline": "baseline", "treatment": '=HYPERLINK("x")'}
    renamed = {(names[arm], seed): metrics for (arm, seed), metrics in values.items()}
    arms = tuple(names.values())
    content = verdict([claim(arm=arms[1])], arms=arms[1:])
    path = tmp_path / "report.html"
    path.write_text(render_page(experiment(renamed, arms=arms), content))
    page = browser.new_page(accept_downloads=True)
    page.goto(path.as_uri())
    with page.expect_download() as download:
        page.locator(".figure button", has_text="CSV").first.click()
    download.value.save_as(tmp_path / "saved.csv")
    page.close()
    assert download.value.suggested_filename == "simulated-train-reward.csv"
    with (tmp_path / "saved.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert len(rows) == 30 and [row[0] for row in rows] == [str(step) for step in range(1, 31)]
    assert all(not cell.startswith("=") for cell in head) and '\'=HYPERLINK("x") seed 2' in head
    column = head.index("baseline seed 0")
    assert [float(row[column]) for row in rows] == pytest.approx(values["baseline", 0]["train/reward"])
    assert rows[4][head.index('\'=HYPERLINK("x") seed 1')] == ""


def test_completions_stand_side_by_side_and_are_only_text(opened):
    from abrun.report.completions import PromptCompletions, ReportedCompletions

    def said(text, reward):
        return {"text": text, "reward": reward, "logprob_error": 1e-3, "num_tokens": 3, "truncated": False}

    hostile = "</script><img src=x onerror=alert(1)>\nsecond line"
    steps = [
        (1, [PromptCompletions(prompt="2+2=", completions=[said("4", 1.0), said("4", 1.0)])]),
        (40, [PromptCompletions(prompt="2+2=", completions=[said("4", 1.0), said(hostile, 0.0)])]),
    ]
    found = ReportedCompletions(seed=3, arms=[0, 1], steps=steps, num_steps=40)
    of, content = experiment(learning()), verdict([claim()])
    beside = replace(make_context(of, content, "abrun compare x"), has_recipe=True, completions=found)
    html = render_page(of, content, beside)
    for width in (390, 1280):
        with opened(html, width=width) as page:
            section = page.locator("#completions")
            texts = section.locator(".column pre").all_inner_texts()
            assert texts == ["4", hostile] and section.locator("img").count() == 0
            assert "texts differ" in section.inner_text()
            assert section.locator(".lower").inner_text() == "reward 0"
            section.locator("button", has_text="1").first.click()
            assert section.locator(".column pre").all_inner_texts() == ["4", "4"]
            left, right = (one.bounding_box() for one in section.locator(".column").all())
            assert (left["y"] == right["y"]) == (width == 1280)
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_each_kind_of_evidence_has_its_section_and_another_kind_one_with_its_values(opened):
    def found(kind, result="pass", **values):
        return Evidence(
            kind=kind, arm="treatment", result=result, reason=foreign(f"{kind}, in words"), values=values
        )

    step_one = {"metric": "train/loss", "baseline": 1, "treatment": 2, "deviation": 0.5, "seed": 3}
    step_one |= {"tolerance": 1, "tolerance_from": "rounding"}
    step_one |= {"scale": 2, "scale_from": "the larger value", "aa_deviation": None}
    evidence = [
        found("guard", guard="token_mult_prob_error_median", value=1.01, limit=1.05),
        found("guard", "not recorded", guard="peak_memory_ratio", value=None, limit=2),
        found("step one", **step_one),
        found("price", "high", amount_of_money=12, currency="EUR"),
    ]
    with opened(render_page(experiment(learning()), verdict([claim()], evidence=evidence))) as page:
        guards = page.locator("#guards")
        assert guards.locator("tbody tr").count() == 1
        assert "token mult prob error median" in guards.inner_text()
        assert "Not checked, because the runs did not record it: peak memory ratio." in guards.inner_text()
        checks = page.locator("#step-one").inner_text()
        assert "agrees" in checks and "relative to the larger value (2)" in checks and "50\u00a0%" in checks
        rows = page.locator("#price tr").all()
        assert [cell.inner_text() for cell in rows[0].locator("th").all()] == [
            *("arm", "result", "amount of money", "currency", "finding")
        ]
        assert [cell.inner_text() for cell in rows[1].locator("td").all()] == [
            *("treatment", "high", "12", "EUR", "price, in words")
        ]


def test_every_claim_is_drawn_in_units_of_its_margin(opened):
    claims = [
        claim(margin=0.1, interval=(-0.05, 0.05), mean_difference=0.0),
        claim(metric="train/entropy", margin=2.0, interval=(1.0, 3.0), mean_difference=2.0),
        claim(metric="unknown", margin=None, interval=None),
    ]
    values = learning(metrics=("train/reward", "train/entropy"))
    with opened(render_page(experiment(values), verdict(claims))) as page:
        tracks = page.locator(".forest .track:not(.heads)").all()
        assert len(tracks) == 2

        def place(track, kind):
            box = track.locator(kind).bounding_box()
            return box["x"], box["x"] + box["width"]

        for track, shares in zip(tracks, ((-0.5, 0.5), (0.5, 1.5)), strict=True):
            zone, reach = place(track, ".zone"), place(track, ".reach")
            half, middle = (zone[1] - zone[0]) / 2, sum(zone) / 2
            assert [(end - middle) / half for end in reach] == pytest.approx(shares, abs=0.03)
        assert tracks[1].get_attribute("aria-label") == "train/entropy: 1 margins, interval [0.5, 1.5]"


@pytest.mark.parametrize("width", [375, 1280])
def test_many_arms_with_long_names_leave_the_bar_its_verdict(opened, width):
    arms = ("baseline", *(f"{n}-packed-sequences-with-compiled-layers" for n in range(5)))
    values = learning(arms=arms, metrics=("train/reward",))
    for run in values.values():
        run["memory/forward_backward/peak_allocated_bytes"] = np.full(40, 2.0**33)
    html = render_page(
        experiment(values, arms=arms), verdict([claim(arm=arm) for arm in arms[1:]], arms=arms[1:])
    )
    with opened(html, width=width) as page:
        parts = (".title", ".toggles", ".theme", ".word")
        spots = [page.locator(f".bar {part}").first.bounding_box() for part in parts]
        title, toggles, theme, word = (
            (b["x"], b["y"], b["x"] + b["width"], b["y"] + b["height"]) if b else None for b in spots
        )
        # A phone has no room for the toggles
        assert title and theme and word and (toggles is None) == (width == 375)
        assert toggles is None or title[2] <= toggles[0]
        assert word[2] <= title[2] and theme[3] - theme[1] < 40  # both of one line
        assert page.locator(".bar .arm").evaluate_all("all => all.every(one => one.offsetHeight < 40)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        inside = "all => all.every(one => one.scrollWidth <= one.parentElement.clientWidth)"
        assert page.locator(".bar-row").evaluate_all(inside)


# --- hostile names in every page that abrun writes ---

SCRIPTED = [
    "</script><script>document.title='RAN'</script><img src=http://[::1]:9/x onerror=document.title='RAN'>",
    "<svg onload=document.title='RAN'>]](javascript:document.title='RAN') $\\frac{1}{$ $x$",
    "<!--<script> \u2028\u2029 ![x](http://127.0.0.1:9/x.png) [x](javascript:document.title='RAN')",
]


def rendered(markdown):
    """Markdown as a page whose HTML is taken as it is, with tables, and no policy that forbids scripts."""
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    return f"<!doctype html><meta charset=utf-8><title>ours</title>{html}"


def hostile_experiment():
    """Arms, metrics, the experiment and what its runs said; all that is drawn of it."""
    arms = ("baseline", SCRIPTED[0])
    of_arms = experiment(learning(metrics=SCRIPTED, arms=arms), arms=arms, name=SCRIPTED[1])
    runs = {name: replace(run, failure=SCRIPTED[2]) for name, run in of_arms.runs.items()}
    return replace(of_arms, runs=runs)


def pages_of_reports(folder):
    """report.html, report.md as a page, and every SVG of a report whose names are hostile."""
    compared = compare(
        with_options(hostile_experiment(), [Claim(metric=metric, margin=0.05) for metric in SCRIPTED]),
        output=folder,
    )
    for path in compared.files:
        if path.suffix in (".html", ".svg"):
            yield path
    page = folder / "markdown.html"
    page.write_text(rendered((folder / "report.md").read_text()), encoding="utf-8")
    yield page


def test_no_page_runs_or_loads_what_a_name_brings_in(browser, tmp_path):
    drawn = list(pages_of_reports(tmp_path))
    assert drawn
    for path in drawn:
        page = browser.new_page()
        requested, dialogs = [], []
        page.on("request", lambda request, to=requested: to.append(request.url))
        page.on("dialog", lambda dialog, to=dialogs: (to.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        for position in range(0, 6000, 600):
            page.evaluate(f"scrollTo(0, {position})")
            page.wait_for_timeout(10)
        beside = {(tmp_path / name).as_uri() for name in os.listdir(tmp_path)}
        assert page.title() != "RAN" and dialogs == [] and set(requested) <= beside, path
        active = "[onerror], [onload], [onclick], a[href^='javascript'], iframe, object, embed, base, form"
        assert page.locator(active).count() == 0, path
        assert page.locator("svg script, img[src^=http]").count() == 0, path
        page.close()
