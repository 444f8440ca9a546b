"""TRL's own GRPOTrainer as both arms, through the command line: the verdict knows whether they differ."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from abrun.runs.files import read_json
from abrun.runs.rundir import RunDir

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "external" / "trl.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs abrun[external]"),
]


def abrun(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "abrun", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
def test_two_learning_rates_are_a_mismatch(tmp_path: Path) -> None:
    runs = ("--runs-dir", str(tmp_path))
    launched = abrun("launch", str(RECIPE), *runs, "--seeds", "0-2", "--no-compare")
    assert launched.returncode == 0, launched.stdout + launched.stderr
    for arm in ("baseline", "treatment"):
        for seed in range(3):
            metrics = RunDir(tmp_path / "trl" / arm / f"seed-{seed}").metrics()
            for metric in ("train/reward", "train/loss", "train/grad_norm", "timing/train/total_step_time_s"):
                assert metrics[metric].steps.tolist() == list(range(1, 31)), metric
            assert np.unique(metrics["train/lr"].values).tolist() == pytest.approx(
                [3e-3 if arm == "baseline" else 3e-4]
            )
    environment = read_json(tmp_path / "trl" / "baseline" / "seed-0" / "environment.json")
    assert all(environment["versions"].values()), environment
    compared = abrun("compare", "trl", *runs)
    assert compared.returncode == 3, compared.stdout + compared.stderr
    assert "MISMATCH" in compared.stdout and "step one" in compared.stdout


@pytest.mark.timeout(600)
def test_the_same_twice_is_no_mismatch(tmp_path: Path) -> None:
    # The learning rate is the baseline's own
    change = "{trainer.parameters.learning_rate: 3e-3, trainer.parameters.label: again}"
    same = ("--set", f"arms.treatment={change}", "--set", "controls.aa_reruns=0")
    launched = abrun(
        "launch", str(RECIPE), "--runs-dir", str(tmp_path), "--seeds", "0-2", *same, "--no-compare"
    )
    assert launched.returncode == 0, launched.stdout + launched.stderr
    compared = abrun("compare", "trl", "--runs-dir", str(tmp_path))
    assert compared.returncode in (0, 4), compared.stdout + compared.stderr
