"""The verdict of an experiment's report, as `abrun status` shows it."""

import json
import os
from pathlib import Path

import pytest

from abrun.logs.recorded.sources import ReadingOptions
from abrun.report.comparing import compare_sources
from abrun.runs.experiment import read_reported_verdict
from abrun.watch import read_overviews
from tests.verdict.simulate import write_experiment


@pytest.mark.parametrize(
    ("scenario", "verdict", "exit_code"),
    [
        ({}, "MATCH", 0),
        ({"shift": -0.1}, "MISMATCH", 3),
        ({"compare": {}}, "DESCRIPTION", 0),
        ({"noise": 0.05}, "INCONCLUSIVE", 4),
    ],
)
def test_the_verdict_is_that_of_the_report_until_a_run_goes_on(
    tmp_path: Path, scenario: dict, verdict: str, exit_code: int
) -> None:
    experiment_dir = write_experiment(tmp_path / "some", **{"seeds": [0, 1, 2], "controls": {}, **scenario})
    report = experiment_dir / "report"
    (before,), _ = read_overviews(tmp_path, lambda _: None)
    assert (before.verdict, before.is_verdict_old) == (None, False)
    found = compare_sources([str(experiment_dir)], ReadingOptions(), output=report, formats=["json"])
    assert found.exit_code == json.loads((report / "verdict.json").read_text())["exit_code"] == exit_code
    reported = read_reported_verdict(experiment_dir)
    assert reported and (reported.verdict, reported.exit_code) == (verdict, exit_code)
    (current,), _ = read_overviews(tmp_path, lambda _: None)
    assert (current.verdict, current.is_verdict_old) == (verdict, False)
    os.utime(report / "verdict.json", (1, 1))
    (old,), _ = read_overviews(tmp_path, lambda _: None)
    assert (old.verdict, old.is_verdict_old) == (verdict, True)


def test_a_damaged_report_hides_no_experiment(tmp_path: Path) -> None:
    write_experiment(tmp_path / "some", seeds=[0, 1], controls={})
    (tmp_path / "some/report").mkdir()
    (tmp_path / "some/report/verdict.json").write_text('{"verdict": "FINE", "exit_code": 0}')
    (overview,), problems = read_overviews(tmp_path, lambda _: None)
    assert overview.verdict is None and "verdict.json" in problems[0]
