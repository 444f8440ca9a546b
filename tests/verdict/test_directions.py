"""Every claim states the direction of what it detects, and a number reads the same wherever it is printed."""

from dataclasses import asdict

import numpy as np
import pytest
from rich.console import Console

from abrun.messages import sentence
from abrun.messages.codes import Code
from abrun.messages.numbers import difference_and_seeds_text
from abrun.recipe.claims import parse_claim
from abrun.verdict.results import detect
from tests.verdict.simulate import fail


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("0.07", "MATCH"),
        ("0.02", "MISMATCH"),
        ("0.033", "INCONCLUSIVE"),
        (">0.3", "PASS"),
        ("<1.5x", "PASS"),
        ("9 sigma", "MATCH"),
    ],
)
def test_a_loss_is_stated_whatever_the_verdict(simulated, judged, claim, verdict):
    experiment_dir, claim = simulated(shift=-0.033), parse_claim(f"train/reward:last 20%:{claim}")
    found = judged(experiment_dir, claims=[claim], formats=("json", "markdown", "html"))
    assert found.content.verdict == verdict, found.content.reasons
    detected = found.content.claims[0].estimate.detected
    assert detected is not None and detected.interval[1] < 0
    assert (detected.direction, detected.num_agreeing) == ("lower", 5)
    reason = found.content.reasons[0]
    assert reason["detected"]["direction"] == "lower"
    console = Console(width=4000)
    with console.capture() as capture:
        console.print(found.summary())
    assert sentence(reason) in capture.get()
    assert sentence(reason) in (experiment_dir / "report/report.md").read_text().replace("\\", "")
    assert "in 5 of 5 seeds" in (experiment_dir / "report/report.html").read_text()


def test_no_direction_is_stated_where_the_interval_holds_zero(simulated, judged):
    found = judged(simulated())
    assert found.content.claims[0].estimate.detected is None
    assert found.content.reasons[0]["detected"] is None


def test_no_failure_rate_is_bounded_beside_a_failure(simulated, judged):
    clean = judged(simulated()).content
    assert Code.RARE_FAILURES in [reason.code for reason in clean.not_tested]
    experiment_dir = simulated()
    fail(experiment_dir / "treatment/seed-1", after_steps=20)
    failed = judged(experiment_dir).content
    assert Code.RARE_FAILURES not in [reason.code for reason in failed.not_tested]


def test_directions_agree_with_their_interval():
    base = np.array([0.1, 0.2, 0.3])
    assert detect(base, base + 0.1, 0.1, (-0.1, 0.3), paired=True) is None
    found = detect(base, base + np.array([0.1, 0.2, -0.01]), 0.1, (0.01, 0.2), paired=True)
    assert found is not None
    assert (found.direction, found.num_agreeing, found.num_compared) == ("higher", 2, 3)
    assert difference_and_seeds_text(asdict(found), "new", "old") == "+0.1 [0.01, 0.2], in 2 of 3 seeds"
