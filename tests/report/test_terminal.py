"""What the terminal shows: the verdict last, in few lines, and no number cut."""

from pathlib import Path

import pytest

from tests.report.test_report import TWO_CLAIMS, shown
from tests.verdict.simulate import edit_rows


def places(lines: list[str], *begins: str) -> list[int]:
    return [next(at for at, line in enumerate(lines) if line.startswith(begin)) for begin in begins]


def test_the_verdict_stands_below_its_evidence_and_what_passed_is_one_line(simulated, judged):
    lines = shown(judged(simulated(), formats=("html", "json")), width=200).splitlines()
    order = places(lines, "metric ", "treatment ", "passed ", "╭─ MATCH: simulated", "next ", "report ")
    assert order == sorted(order) and len(lines) <= 11
    assert "step one, guards, 5 of 5 pairs; not tested: 4 things" in lines[order[2]]
    assert lines[order[-1]].endswith("report/report.html")


def test_all_evidence_is_shown_where_it_is_asked_for(simulated, judged):
    comparison = judged(simulated())
    short, whole = shown(comparison), shown(comparison, verbose=True)
    for said in ("levels ", "divergence ", "rare failures: 0 of 5 seeds failed", "corresponds to a 90 %"):
        assert said in whole and said not in short
    assert len(whole.splitlines()) > 1.5 * len(short.splitlines())


def test_what_does_not_pass_is_said_in_full(simulated, judged):
    experiment_dir = simulated()
    edit_rows(
        experiment_dir / "treatment/seed-1",
        lambda row: row.update({"train/grad_norm": 9.0}) if row["step"] == 1 else None,
    )
    lines = shown(judged(experiment_dir)).splitlines()
    failed, passed = places(lines, "step one ", "passed ")
    assert "fails for train/grad_norm" in lines[failed] and "guards, 5 of 5 pairs" in lines[passed]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_drops_columns_and_cuts_no_number(width, simulated, judged):
    comparison = judged(simulated(compare=TWO_CLAIMS, noise=0.05))
    wide, narrow = shown(comparison, width=200), shown(comparison, width=width)
    assert "…" not in narrow and "certified bound  result" in wide and "certified bound  result" not in narrow
    for claim in comparison.content.claims:
        assert f"{claim.estimate.mean_difference:+.3g}" in narrow and claim.claim.margin_text in narrow


def test_several_arms_have_a_line_each(simulated, judged):
    arms = {"baseline": {}, "near": {"policy.logprobs.impl": "chunked"}, "far": {"policy.dtype": "bfloat16"}}
    lines = shown(judged(simulated(arms=arms))).splitlines()
    for arm in ("near ", "far "):
        assert sum(line.startswith(arm) and "passed: step one, guards" in line for line in lines) == 1


def test_the_report_is_named_from_where_its_reader_is(
    simulated, judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_dir: Path = simulated()
    monkeypatch.chdir(experiment_dir)
    lines = shown(judged(experiment_dir, formats=("html",))).splitlines()
    assert lines[-1].split() == ["report", "report/report.html"]
