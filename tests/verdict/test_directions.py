"""Every claim states the direction of what it detects, and a number reads the same wherever it is printed."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from abrun.messages import sentence
from abrun.messages.numbers import detected_text
from abrun.reasons import Code
from abrun.recipe.claims import parse_primary
from abrun.recorded.sources import Reading
from abrun.report.comparing import compare_sources
from abrun.verdict.results import detect

LOSS = -0.033


def write_arm(folder: Path, shift: float, *, num_runs: int = 4, failed: str = "", first: int = 1) -> None:
    """Learning curves that seeds share between arms; after step one the arm is off by `shift`."""
    folder.mkdir()
    for seed in range(num_runs):
        of_seed = np.random.default_rng([1, seed])
        of_run = np.random.default_rng([2, seed, *folder.name.encode()])
        rows = []
        for i in range(40):
            reward = 0.2 + 0.6 / (1 + np.exp((12 - i) / 5)) + 0.01 * of_seed.standard_normal()
            reward += 0.02 * np.random.default_rng([3, seed]).standard_normal()
            reward += (i > 0) * (shift * min(i / 10, 1) + 0.003 * of_run.standard_normal())
            norm = float(np.exp(0.2 * of_seed.standard_normal() + (i > 0) * 0.02 * of_run.standard_normal()))
            rows.append({"step": i + first, "reward": float(reward), "loss": norm / 7, "grad_norm": norm})
        (folder / f"seed{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Compares two folders of such runs; returns the comparison and its terminal text on one line."""
    monkeypatch.chdir(tmp_path)

    def run(*claims: str, shift: float = LOSS, first: int = 1, unpaired: bool = False):
        write_arm(tmp_path / "old", 0.0)
        write_arm(tmp_path / "new", shift, first=first)
        command = "abrun compare old new"
        found = compare_sources(
            ["old", "new"],
            Reading(unpaired=unpaired),
            primaries=[parse_primary(claim) for claim in claims] or None,
            formats=("json", "markdown", "html"),
            output=tmp_path / "report",
            command=command,
        )
        console = Console(width=4000)
        with console.capture() as capture:
            console.print(found.summary())
        return found, capture.get()

    return run


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("reward:last 20%:0.07", "MATCH"),
        ("reward:last 20%:0.02", "MISMATCH"),
        ("reward:last 20%:0.033", "INCONCLUSIVE"),
        ("reward:last 20%:>0.3", "MATCH"),
        ("reward:last 20%:<1.5x", "MATCH"),
        ("reward:last 20%:9 sigma", "MATCH"),
    ],
)
def test_a_loss_is_stated_whatever_the_verdict(compared, claim, verdict):
    found, text = compared(claim.replace("reward", "train/reward"))
    assert found.content.verdict == verdict, found.content.reasons
    (result,) = found.content.primaries
    assert result.estimate.detected is not None
    assert (result.estimate.detected.direction, result.estimate.detected.num_agreeing) == ("lower", 4)
    assert result.estimate.detected.interval[1] < 0
    assert found.content.reasons[0]["detected"]["direction"] == "lower"
    reason = sentence(found.content.reasons[0])
    report = Path("report")
    assert reason in text
    assert reason in (report / "report.md").read_text().replace("\\", "")
    content = json.loads((report / "verdict.json").read_text())
    assert content["primaries"][0]["detected"]["direction"] == "lower"
    assert "in 4 of 4 seeds" in (report / "report.html").read_text()


def test_no_direction_is_stated_where_the_interval_holds_zero(compared):
    found, _ = compared("train/reward:last 20%:0.05", shift=0.0)
    assert found.content.primaries[0].estimate.detected is None
    assert found.content.reasons[0]["detected"] is None


def test_no_failure_rate_is_bounded_beside_a_failure(simulated, judged):
    from tests.verdict.simulate import fail

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
    assert detected_text(asdict(found)) == "higher: +0.1 [0.01, 0.2], in 2 of 3 seeds"
